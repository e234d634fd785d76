"""``kvpass bench configurations``: the fastest tiles of the plain attention kernel on this GPU, by shape class.

Each class is measured on one shape and one format. First the tiles are timed in turn, each with about as many slots on
an SM at once as the built-in configuration has; then the fastest two with other numbers of programs. A candidate that
does not compile or does not fit is left out with a reason, and one whose output is wrong fails the command. Of the
others the fastest that runs all formats of the class on a small case is chosen; the built-in one stays where no other
is 1% faster. The result is a file as :mod:`kvpass.tiles` reads it.

The Hopper kernel is measured by ``kvpass bench attention``; what is measured here is the kernel that serves every other
GPU, and on Hopper what the other does not take.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvpass import ops
from kvpass.bench.attention import Entry, checked
from kvpass.bench.case import Case, Pair, Variant, label, stored_variant
from kvpass.bench.record import environment, table
from kvpass.bench.shapes import AttentionShape, parse_formats
from kvpass.bench.timing import Summary, free_memory, interleave
from kvpass.tiles import ALLOWED, Configuration, ShapeClass, built_in, packaged, read, write

# Formats by bits of the wider codec: the first is timed, all must run.
FORMATS = {
    4: ("nvfp4", "mxfp4", "fp4_mx_block16"),
    8: ("fp8_e4m3", "fp8_e5m2", "int8", "fp8_e4m3/nvfp4"),
    16: ("bf16", "bf16/int8", "fp8_e4m3/bf16"),
}
# Slots of a step, warps, stages.
TILES = {
    "decode": [(n, w, s) for n in (32, 64, 128) for w, s in ((4, 2), (4, 3), (8, 3))],
    "chunk": [(n, w, s) for n in (32, 64, 128) for w, s in ((4, 2), (4, 3), (8, 2), (8, 3))],
}
# Values of K in a tile. Smaller ones wait for memory too often, larger ones fill the registers.
VALUES = {"decode": (4096, 16384), "chunk": (8192, 16384)}
PROGRAMS = {"decode": (1, 2, 3, 4, 6, 8), "chunk": (1, 2, 3)}
FINALISTS = 2
GAIN = 1.01  # below which the built-in configuration stays
# The last tile is cut: what is past the length is poisoned.
SHAPES = {  # as many programs as an SM holds are as many splits on a GPU of 128 or a few more
    "decode": AttentionShape(batch=16, kv_heads=8, group=4, head_dim=128, tokens=8180, slots=8192),
    "chunk": AttentionShape(batch=1, kv_heads=8, group=4, head_dim=128, tokens=8180, query=256, slots=8192),
}
SMALL_SHAPES = {  # not so small that copies past the L2 cache would be many
    "decode": AttentionShape(batch=8, kv_heads=8, group=4, head_dim=128, tokens=997, slots=1000),
    "chunk": AttentionShape(batch=8, kv_heads=8, group=4, head_dim=128, tokens=997, query=40, slots=1000),
}


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        kinds, bits, head_dims: Those of the shape classes.
        out: The file; entries for other classes that it has stay.
        rounds: How often each candidate is timed.
        device: ``cuda``; or ``cpu`` under Triton's interpreter, for tests.
    """

    kinds: list[str]
    bits: list[int]
    head_dims: list[int]
    out: Path
    rounds: int
    device: torch.device

    @classmethod
    def parse(
        cls,
        kinds: list[str] | None,
        bits: list[int] | None,
        head_dims: list[int] | None,
        out: str | None,
        rounds: int,
        device: torch.device,
    ) -> Options:
        """Options as they are written on the command line, None for all; ``ValueError`` for what is not allowed."""
        import triton

        if rounds < 1:
            raise ValueError(f"rounds is {rounds}; it must be at least 1")
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ValueError("Triton's kernels need a CUDA GPU; set TRITON_INTERPRET=1 to try the command on a CPU")
        if device.type != "cuda" and out is None:
            raise ValueError("times of a CPU are for tests only; name a file for them with --out")
        given = {"kind": kinds, "bits": bits, "head_dim": head_dims}
        for name, values in given.items():
            for value in values or ():
                if value not in ALLOWED[name]:
                    raise ValueError(f"{name} is {value}; allowed: {', '.join(map(str, ALLOWED[name]))}")
        path = Path(out) if out else packaged(gpu_name(device))
        if out and not path.parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
        chosen = {name: list(dict.fromkeys(values or ALLOWED[name])) for name, values in given.items()}
        return cls(chosen["kind"], chosen["bits"], chosen["head_dim"], path, rounds, device)


@dataclass(frozen=True)
class Candidate:
    """A configuration that was tried.

    Attributes:
        config: The configuration.
        entry: How its check went.
        summary: Its times; None where it has none.
    """

    config: Configuration
    entry: Entry
    summary: Summary | None = None

    @property
    def is_wrong(self) -> bool:
        """Whether it ran, and computed something else."""
        return self.entry.check is not None and not self.entry.check.passed

    @property
    def ms(self) -> float:
        return self.summary.median if self.summary else float("inf")


def gpu_name(device: torch.device) -> str:
    """What a file calls the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def run(options: Options, progress: Callable[[str], None]) -> int:
    """Measure every class, print its candidates, and write the file after each; 1 where an output was wrong."""
    gpu, failed = gpu_name(options.device), False
    if options.out.is_file():
        read(options.out, gpu)  # before the work, what could not be added to
    options.out.parent.mkdir(exist_ok=True)
    keys = ("date", "driver", "torch", "triton", "kvpass", "commit")
    made = {key: value for key, value in environment(options.device).items() if key in keys}
    for kind in options.kinds:
        for bits in options.bits:
            for head_dim in options.head_dims:
                shape = ShapeClass(kind, bits, head_dim)
                progress(f"{shape}: measuring")
                candidates = measure(shape, options)
                chosen = choose(shape, candidates, options.device)
                print(render(shape, candidates, chosen), flush=True)
                failed = failed or chosen is None or any(candidate.is_wrong for candidate in candidates)
                if chosen is not None:
                    write(options.out, gpu, made, [_entry(shape, chosen, candidates[0])])
                free_memory(options.device)
    progress(f"written: {options.out}")
    return int(failed)


def measure(shape: ShapeClass, options: Options) -> list[Candidate]:
    """Every candidate of a class with its check and its time, the built-in one first."""
    default = built_in(options.device)[shape]
    pair = parse_formats(FORMATS[shape.bits][0])
    attention_shape = dataclasses.replace(SHAPES[shape.kind], head_dim=shape.head_dim)
    case = Case(attention_shape, [pair], "none", torch.bfloat16, options.device)
    tiles = [
        default._replace(block_n=n, num_warps=warps, num_stages=stages, programs_per_sm=_programs(default, n))
        for n, warps, stages in tiles_of(shape)
    ]
    first = _timed(case, pair, [default, *tiles], options.rounds)
    fastest = sorted((candidate for candidate in first if candidate.summary), key=lambda candidate: candidate.ms)
    finalists = [candidate.config for candidate in fastest[:FINALISTS]]
    more = [config._replace(programs_per_sm=n) for config in finalists for n in PROGRAMS[shape.kind]]
    # What is compared is timed in the same rounds.
    again = _timed(case, pair, [default, *finalists, *more], options.rounds)
    second = {candidate.config: candidate for candidate in again}
    return [second.pop(candidate.config, candidate) for candidate in first] + list(second.values())


def tiles_of(shape: ShapeClass) -> list[tuple[int, int, int]]:
    """Those of :data:`TILES` that make sense for a class."""
    smallest, largest = VALUES[shape.kind]
    fewest_warps = 8 if shape.kind == "chunk" and shape.head_dim > 128 else 1  # the sums of 64 rows fill the registers
    return [
        (n, warps, stages)
        for n, warps, stages in TILES[shape.kind]
        if smallest <= n * shape.head_dim <= largest and warps >= fewest_warps
    ]


def choose(shape: ShapeClass, candidates: list[Candidate], device: torch.device) -> Candidate | None:
    """The fastest of ``candidates`` that runs all formats of its class right; None where none does.

    The first one, the built-in one, where no other is faster by :data:`GAIN`.
    """
    small = dataclasses.replace(SMALL_SHAPES[shape.kind], head_dim=shape.head_dim)
    pairs = [parse_formats(text) for text in FORMATS[shape.bits]]
    case = Case(small, pairs, "bool", torch.bfloat16, device)  # a mask takes shared memory as well
    default = candidates[0]
    timed = sorted((candidate for candidate in candidates if candidate.summary), key=lambda candidate: candidate.ms)
    # False before True, and otherwise as they are: the faster ones, the built-in one, the others.
    timed.sort(key=lambda candidate: (candidate.ms * GAIN > default.ms, candidate is not default))
    for candidate in timed:
        _compile(case, ((candidate.config, pair) for pair in pairs))
        entries = {label(pair): _checked(case, candidate.config, pair) for pair in pairs}
        problems = {name: entry for name, entry in entries.items() if entry.problem}
        if not problems:
            return candidate
        candidate.entry.problem = "; ".join(f"{name}: {entry.problem}" for name, entry in problems.items())
        wrong = [entry.check for entry in problems.values() if entry.check]
        candidate.entry.check = wrong[0] if wrong else candidate.entry.check
    return None


def _programs(default: Configuration, block_n: int) -> int:
    """Programs of an SM that together hold as many slots at once as those of ``default`` do."""
    return min(8, max(1, default.programs_per_sm * default.block_n // block_n))


def _timed(case: Case, pair: Pair, configs: list[Configuration], rounds: int) -> list[Candidate]:
    """Compile, check and time ``configs``, each once, in the order given."""
    _compile(case, ((config, pair) for config in configs))
    entries = {config: _checked(case, config, pair) for config in configs}
    replays = {str(c): entry.replay for c, entry in entries.items() if entry.replay and not entry.problem}
    times = interleave(replays, rounds, case.device)
    for entry in entries.values():
        entry.variant = entry.replay = None  # the memory behind them
    return [Candidate(config, entry, times.get(str(config))) for config, entry in entries.items()]


def _checked(case: Case, config: Configuration, pair: Pair) -> Entry:
    return checked(case, str(config), "kvpass", functools.partial(_variant, case, config, pair))


def _variant(case: Case, config: Configuration, pair: Pair) -> Variant:
    """The plain kernel with ``config`` over a cache of these formats, whatever the GPU."""
    names, copies = (pair[0].name, pair[1].name), case.stored_copies(pair)

    def call(index: int) -> torch.Tensor:
        key, value = copies[index]
        call = (case.positions, case.mask, case.scale, case.is_causal, *names)
        return ops.attention_in(config, case.query, *key, *value, *call)

    return dataclasses.replace(stored_variant(case, pair), name=str(config), call=call)


def _compile(case: Case, work: Iterable[tuple[Configuration, Pair]]) -> None:
    """Compile many kernels at once. What goes wrong is left to those who call them next."""
    if case.device.type != "cuda":
        return
    variants = [_variant(case, config, pair) for config, pair in work]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as executor:
        for future in [executor.submit(variant.call, 0) for variant in variants]:
            future.exception()
    torch.cuda.synchronize(case.device)


def _entry(shape: ShapeClass, chosen: Candidate, default: Candidate) -> dict[str, Any]:
    """What the file says of a class."""
    config = {name: value for name, value in chosen.config._asdict().items() if name != "block_m"}
    times = {"ms": chosen.summary, "built_in_ms": default.summary}
    return {**shape._asdict(), **config, **{name: round(time.median, 6) for name, time in times.items() if time}}


def render(shape: ShapeClass, candidates: list[Candidate], chosen: Candidate | None) -> str:
    """The table of one class, the fastest first."""
    lines, left_out = [], []
    for candidate in sorted(candidates, key=lambda candidate: candidate.ms):
        name = f"{candidate.config}{' (built-in)' if candidate is candidates[0] else ''}"
        mark = "chosen" if candidate is chosen else ""
        if candidate.summary:
            summary = candidate.summary
            spread = f"{summary.p10:.4f} - {summary.p90:.4f}"
            lines.append((name, f"{summary.median:.4f}", spread, f"{candidates[0].ms / summary.median:.2f}", mark))
        if candidate.entry.problem:
            left_out.append(f"{'FAILED' if candidate.is_wrong else 'left out'}: {name}: {candidate.entry.problem}")
    header = ("candidate", "ms", "p10 - p90", "times as fast as the built-in", "")
    return "\n".join([str(shape), table(header, lines), *left_out]) + "\n"
