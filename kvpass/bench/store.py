"""``kvpass bench store``: quantize-and-store, one token at a time and a chunk of a prompt.

A row is timed only if the bytes in its buffers equal the reference's. Its peer is what a static cache does in the
dtype of the model: ``index_copy_`` on K and on V.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kvpass import ops, reference
from kvpass.bench.case import Pair, label, random_heads
from kvpass.bench.record import Output, Row, compare, environment, reasons, summary_of, table, timing_columns
from kvpass.bench.shapes import DTYPES, StoreShape, choose, parse_formats, parse_store_shape
from kvpass.bench.timing import Call, Ceiling, copies_for, copy_ceiling, free_memory, interleave, prepare
from kvpass.formats import KVBuffers, KVFormat

DEFAULT_FORMATS = ("bf16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "fp4_mx_block16", "fp8_e4m3/nvfp4")
DEFAULT_SHAPES = ("token-1", "token-8", "token-32", "token-64", "prefill")
MAX_COPIES = 16  # one token moves so little that its inputs come from the L2 cache, as they do in a model
MIN_SLOTS = 64
CHECKED_TOKENS = 512  # at most about so many of each batch row and case, spread evenly, and the last
TENSOR_SCALE = 0.02
PEER = "index_copy_"


@dataclass(frozen=True)
class Options:
    """What is run: label and shape of each case, formats of K and V, key of ``DTYPES``, rounds, ``cuda`` or ``cpu``."""

    shapes: list[tuple[str, StoreShape]]
    formats: list[Pair]
    dtype: str = "bf16"
    rounds: int = 20
    device: torch.device = torch.device("cuda")

    @classmethod
    def parse(cls, shapes: list[str], formats: list[str], dtype: str, rounds: int, device: torch.device) -> Options:
        """Options as they are written on the command line; ``ValueError`` for what is unknown or does not fit."""
        if rounds < 1:
            raise ValueError(f"rounds is {rounds}; it must be at least 1")
        pairs = list(dict.fromkeys(parse_formats(text) for text in formats))
        parsed = [parse_store_shape(text) for text in shapes]
        for _, shape in parsed:
            for fmt in (fmt for pair in pairs for fmt in pair):
                fmt.check_head_dim(shape.head_dim)
        return cls(parsed, pairs, choose("dtype", dtype, DTYPES), rounds, device)


class StoreCase:
    """New K and V of one call, as often as the rotation needs them; each copy writes slots of its own."""

    def __init__(self, shape: StoreShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.values = 2 * shape.batch * shape.kv_heads * shape.tokens * shape.head_dim
        self.read_bytes = self.values * dtype.itemsize
        copies = min(MAX_COPIES, copies_for(2 * self.read_bytes, device))
        generator = torch.Generator(device).manual_seed(0)
        size = (shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
        self.new = [tuple(random_heads(size, dtype, generator) for _ in range(2)) for _ in range(copies)]
        first = [index * shape.tokens for index in range(copies)]
        self.positions = [torch.arange(start, start + shape.tokens, device=device) for start in first]
        self.slots = max(MIN_SLOTS, copies * shape.tokens)

    def empty(self, fmt: KVFormat) -> KVBuffers:
        """Buffers for all copies, full of ones so that what is not written shows."""
        shape = self.shape
        buffers = fmt.allocate(shape.batch, shape.kv_heads, self.slots, shape.head_dim, self.device)
        for tensor in (buffers.codes, buffers.block_scale):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)
        if buffers.scale is not None:
            buffers.scale.copy_(torch.linspace(TENSOR_SCALE, 2 * TENSOR_SCALE, shape.kv_heads))
        if buffers.centre is not None:
            buffers.centre.copy_(torch.linspace(-1.0, 1.0, buffers.centre.numel()).view_as(buffers.centre))
        return buffers

    def store_bytes(self, pair: Pair) -> int:
        """Bytes read plus bytes written."""
        per_token = sum(fmt.bytes_per_token(self.shape.kv_heads, self.shape.head_dim) for fmt in pair)
        return self.read_bytes + self.shape.batch * self.shape.tokens * per_token


class WrongBytes(Exception):
    """What a kernel stored is not what the reference stores."""


def run(options: Options, output: Output) -> int:
    """Run every case, printing and recording each as it finishes; 1 where a store failed, otherwise 0."""
    output.progress("measuring the copy bandwidth")
    ceiling, where, failed = copy_ceiling(options.device), environment(options.device), False
    for name, shape in options.shapes:
        output.progress(f"{name}: {shape}")
        rows = [row | where for row in run_case(name, shape, options, ceiling)]
        output.write(rows, render(f"{name}: {shape}; {options.dtype}", rows))
        failed = failed or any(row["status"] == "FAILED" for row in rows)
        free_memory(options.device)
    return int(failed)


def run_case(name: str, shape: StoreShape, options: Options, ceiling: Ceiling) -> list[Row]:
    """Rows of one case: ours, the peer, the ceiling."""
    case = StoreCase(shape, DTYPES[options.dtype], options.device)
    rows: list[Row] = []
    replays = {ceiling.name: ceiling.replay}
    sizes = {ceiling.name: ceiling.nbytes, PEER: 2 * case.read_bytes}
    for variant, kind, build in _builders(case, options):
        row: Row = {"benchmark": "store", "case": name, "variant": variant, "kind": kind, "status": "ok"}
        row |= {"shape": asdict(shape), "dtype": options.dtype, "copies": len(case.new)}
        try:
            replays[variant] = prepare(build(row, sizes), len(case.new), options.device)
        except WrongBytes as error:
            row |= {"status": "FAILED", "reason": str(error)}
        except Exception as error:  # the row says what happened, and the others go on
            row |= {"status": "FAILED", "reason": summary_of(error)}
        rows.append(row)
    rows.append({"benchmark": "store", "case": name, "variant": ceiling.name, "kind": "ceiling", "status": "ok"})
    for variant, summary in interleave(replays, options.rounds, options.device).items():
        row = next(row for row in rows if row["variant"] == variant)
        row |= timing_columns(summary, replays[variant].calls, sizes[variant], options.rounds)
    compare(rows, ceiling.name)
    return rows


Build = Callable[[Row, dict[str, int]], Call]


def _builders(case: StoreCase, options: Options) -> list[tuple[str, str, Build]]:
    builders: list[tuple[str, str, Build]] = []
    for pair in options.formats:
        builders.append((label(pair), "kvpass", functools.partial(_store, case, pair)))
    builders.append((PEER, "peer", functools.partial(_index_copy, case)))
    return builders


def _store(case: StoreCase, pair: Pair, row: Row, sizes: dict[str, int]) -> Call:
    """kvpass's store; its bytes are compared with the reference's before it is handed out."""
    buffers = case.empty(pair[0]), case.empty(pair[1])
    row["key_format"], row["value_format"] = pair[0].name, pair[1].name
    sizes[row["variant"]] = case.store_bytes(pair)

    def call(index: int) -> Tensor:
        key, value = case.new[index]
        ops.store(
            key, value, case.positions[index], *buffers[0], *buffers[1], row["key_format"], row["value_format"]
        )  # fmt: skip
        return buffers[0].codes

    for index in range(len(case.new)):
        call(index)
        for which, (x, stored, fmt) in enumerate(zip(case.new[index], buffers, pair, strict=True)):
            wrong = wrong_bytes(x, stored, fmt, case.positions[index])
            if wrong:
                raise WrongBytes(f"{wrong} bytes of {'KV'[which]} differ from the reference's, in {fmt.name!r}")
    return call


def wrong_bytes(x: Tensor, stored: KVBuffers, fmt: KVFormat, positions: Tensor) -> int:
    """How many bytes of codes and block scales differ from the reference's, over an even sample of the tokens of ``x``.

    The reference runs on CPU, where its arithmetic is what it says.
    """
    length = x.shape[2]
    step = -(-length // max(1, CHECKED_TOKENS // x.shape[0]))
    sample = torch.arange(length - 1, -1, -step, device=x.device)
    scale, centre = (None if t is None else t.cpu() for t in (stored.scale, stored.centre))
    codes, scales = reference.quantize(reference.transform(x[:, :, sample].cpu(), fmt, centre), fmt, scale)
    slots = positions[sample]
    found = stored.codes[:, :, slots].cpu().contiguous()
    wrong = int((found.view(torch.uint8) != codes.contiguous().view(torch.uint8)).sum())
    if stored.block_scale is not None and scales is not None:
        rows = reference.scale_rows(stored.block_scale, stored.codes.shape[2])[:, :, slots]
        wrong += int((rows.cpu() != scales).sum())
    return wrong


def _index_copy(case: StoreCase, row: Row, sizes: dict[str, int]) -> Call:
    """What a static cache of transformers does."""
    shape = case.shape
    size = (shape.batch, shape.kv_heads, case.slots, shape.head_dim)
    caches = [torch.zeros(size, dtype=case.new[0][0].dtype, device=case.device) for _ in range(2)]

    def call(index: int) -> Tensor:
        for cache, new in zip(caches, case.new[index], strict=True):
            cache.index_copy_(2, case.positions[index], new)
        return caches[0]

    return call


def render(title: str, rows: list[Row]) -> str:
    """The table of one case."""
    lines = []
    for row in rows:
        if "ms" in row:
            spread = f"{1e3 * row['ms_p10']:.2f} - {1e3 * row['ms_p90']:.2f}"
            ratio = f"{row['ratios'][PEER]:.2f}" if PEER in row.get("ratios", {}) else ""
            share = f"{row['share_of_ceiling']:.0%}"
            lines.append((row["variant"], f"{1e3 * row['ms']:.2f}", spread, f"{row['tb_per_s']:.2f}", share, ratio))
        else:
            lines.append((row["variant"], row["status"], "", "", "", ""))
    header = ("variant", "us", "p10 - p90", "TB/s", "of copy", f"times as fast as {PEER}")
    return "\n".join([title, table(header, lines), *reasons(rows)]) + "\n"
