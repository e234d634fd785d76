"""One attention benchmark's data, and the numeric check that comes before any timing.

The check compares what a variant's captured graph wrote with attention in fp64 over the same stored bytes, on the first
and the last row of the batch (each head of them), and sees that all other rows are finite. The budget follows from what
torch's own attention gets wrong on the same decoded K and V in the dtype of the query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass import ops, reference
from kvpass.bench.shapes import AttentionShape
from kvpass.bench.timing import Call, copies_for
from kvpass.formats import CODECS, KVBuffers, KVFormat

VALUES_AT_ONCE = 1 << 26  # of K or V, while a case is built
LARGEST = 64.0  # above any magnitude that `random_heads` makes, which is what the tensor scales are chosen for
FLOAT32_SUMS = 5e-7  # relative error of sums in fp32, whatever the dtype of the query
# A peer may be less precise by design (XQA rounds the query and the probabilities to fp8): it shows its error, and is
# only refused where it computes something else.
PEER_BUDGET = 0.1

Pair = tuple[KVFormat, KVFormat]  # formats of K and V
# fp64 K and V, `[tokens, head_dim]`, of one batch row and KV head, decoded from what a variant reads.
Decoded = Callable[[int, int], tuple[Tensor, Tensor]]


class Unsupported(Exception):
    """A variant that cannot run a case; the message says why."""


@dataclass(frozen=True)
class Variant:
    """One way to compute a case.

    Attributes:
        name: What rows and tables call it.
        kind: ``kvpass``, ``unfused`` (what a graph runs that was not rewritten) or ``peer``.
        call: Computes the output, ``[batch, heads, query, head_dim]``, from the copy of the buffers it is told.
        copies: How many copies there are.
        nbytes: Bytes of K and V of the tokens that attention sees, as this variant stores them.
        decoded: What it reads.
        formats: Formats of K and V where they are kvpass's.
        keep: How many of the first and of the newest slots it keeps in bf16.
    """

    name: str
    kind: str
    call: Call
    copies: int
    nbytes: int
    decoded: Decoded
    formats: tuple[str, str] | None = None
    keep: tuple[int, int] = (0, 0)


class Case:
    """Query, K, V and mask of one benchmark.

    Attributes:
        query: ``[batch, heads, query, head_dim]`` in ``dtype``.
        key, value: ``[batch, kv_heads, max_len, head_dim]`` in ``dtype``, zero past ``shape.tokens``.
        positions: ``[query]`` int64, slots of the query's tokens.
        full_mask: ``[batch, 1, query, max_len]`` boolean, what transformers passes.
        mask: The same, or None where the case has no mask.
        padding: Hidden slots at the start of each row.
        keep: How many of the first and of the newest slots are kept in bf16 beside.
        stored: Buffers of K and V by format of K and V.
    """

    def __init__(
        self,
        shape: AttentionShape,
        formats: list[Pair],
        mask: str,
        dtype: torch.dtype,
        device: torch.device,
        keep: tuple[int, int] = (0, 0),
        seed: int = 0,
    ) -> None:
        self.shape, self.dtype, self.device, self.keep = shape, dtype, device, keep
        self.scale = shape.head_dim**-0.5
        self.generator = torch.Generator(device).manual_seed(seed)
        heads = (shape.batch, shape.heads, shape.query, shape.head_dim)
        self.query = torch.randn(heads, generator=self.generator, device=device).to(dtype)
        self.positions = torch.arange(shape.tokens - shape.query, shape.tokens, device=device)
        self.padding = shape.padding(mask)
        slot = torch.arange(shape.max_len, device=device)
        shown = slot >= torch.tensor(self.padding, device=device).view(-1, 1, 1, 1)
        self.full_mask = shown & (slot <= self.positions[:, None])
        self.mask = None if mask == "none" else self.full_mask
        cache = (shape.batch, shape.kv_heads, shape.max_len, shape.head_dim)
        self.key, self.value = (torch.zeros(cache, dtype=dtype, device=device) for _ in range(2))
        self.stored: dict[Pair, tuple[KVBuffers, KVBuffers]]
        self.stored = {pair: (self._empty(pair[0]), self._empty(pair[1])) for pair in formats}
        self._copies: dict[Pair | None, list[Any]] = {}
        self._fill()

    @property
    def is_causal(self) -> bool:
        """Whether the operator is asked for causality because no mask says it."""
        return self.shape.query > 1 and self.mask is None

    def visible_bytes(self, bytes_per_token: int) -> int:
        """Bytes of the tokens that attention sees, at ``bytes_per_token`` of K and V together."""
        return (self.shape.batch * self.shape.tokens - sum(self.padding)) * bytes_per_token

    def dense_bytes(self, itemsize: int | None = None) -> int:
        """:meth:`visible_bytes` of a cache without scales, in the dtype of the query unless told otherwise."""
        itemsize = itemsize or self.dtype.itemsize
        return self.visible_bytes(2 * self.shape.kv_heads * self.shape.head_dim * itemsize)

    def dense(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """What a cache in the dtype of the query holds."""
        end = self.shape.tokens
        return self.key[row, head, :end].double(), self.value[row, head, :end].double()

    def stored_bytes(self, pair: Pair) -> int:
        """:meth:`visible_bytes` of a cache in these formats, and what is kept in bf16."""
        shape = self.shape
        kept = 2 * 2 * shape.batch * shape.kv_heads * shape.head_dim * sum(self.keep)
        return kept + self.visible_bytes(sum(fmt.bytes_per_token(shape.kv_heads, shape.head_dim) for fmt in pair))

    def stored_copies(self, pair: Pair) -> list[tuple[KVBuffers, KVBuffers]]:
        """K and V in these formats, as often as the rotation needs them."""
        if pair not in self._copies:
            key, value = self.stored[pair]
            more = copies_for(self.stored_bytes(pair), self.device) - 1
            self._copies[pair] = [(key, value), *((_clone(key), _clone(value)) for _ in range(more))]
        return self._copies[pair]

    def dense_copies(self) -> list[tuple[Tensor, Tensor]]:
        """K and V in the dtype of the query, as often as the rotation needs them."""
        if None not in self._copies:
            more = copies_for(self.dense_bytes(), self.device) - 1
            clones = ((self.key.clone(), self.value.clone()) for _ in range(more))
            self._copies[None] = [(self.key, self.value), *clones]
        return self._copies[None]

    def stored_row(self, pair: Pair, row: int, head: int) -> tuple[Tensor, Tensor]:
        """What a cache in these formats holds for one batch row and KV head, decoded."""
        key, value = (
            _decode(*item, row, head, self.shape.tokens) for item in zip(self.stored[pair], pair, strict=True)
        )
        return key, value

    def _empty(self, fmt: KVFormat) -> KVBuffers:
        """Buffers full of NaN, so that a read past the length shows; a tensor scale that differs from head to head."""
        shape = self.shape
        sizes = shape.batch, shape.kv_heads, shape.max_len, shape.head_dim
        buffers = fmt.allocate(*sizes, self.device, keep=sum(self.keep))
        for tensor in (buffers.codes, buffers.block_scale):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)
        if buffers.scale is not None:
            reach = CODECS[fmt.codec].max * (CODECS["e4m3"].max if fmt.block_scale == "e4m3" else 1.0)
            buffers.scale.copy_(torch.linspace(1.0, 1.5, shape.kv_heads) * (LARGEST / reach))
        if buffers.centre is not None:
            buffers.centre.copy_(torch.linspace(-1.0, 1.0, buffers.centre.numel()).view_as(buffers.centre))
        return buffers

    def _fill(self) -> None:
        """Random K and V, a few batch rows at a time, into the dense cache and into every format."""
        shape = self.shape
        rows = max(1, VALUES_AT_ONCE // (shape.kv_heads * shape.tokens * shape.head_dim))
        slots = torch.arange(shape.tokens, device=self.device)
        for first in range(0, shape.batch, rows):
            chunk = slice(first, min(first + rows, shape.batch))
            size = (chunk.stop - first, shape.kv_heads, shape.tokens, shape.head_dim)
            key, value = (random_heads(size, self.dtype, self.generator) for _ in range(2))
            self.key[chunk, :, : shape.tokens] = key
            self.value[chunk, :, : shape.tokens] = value
            for (key_format, value_format), pair in self.stored.items():
                parts = [buffers.map_batch(lambda tensor: tensor[chunk]) for buffers in pair]  # noqa: B023
                names = key_format.name, value_format.name
                ops.store(key, value, slots, *parts[0], *parts[1], *names, self.keep[0])


def random_heads(size: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """``[batch, kv_heads, length, head_dim]``: normal, each 16 neighbours times a power of two of their own."""
    x = torch.randn(size, dtype=dtype, generator=generator, device=generator.device).unflatten(-1, (-1, 16))
    exponent = torch.randint(-3, 3, (*x.shape[:-1], 1), dtype=torch.int8, generator=generator, device=generator.device)
    scaled: Tensor = x * exponent.to(dtype).exp2()
    return scaled.flatten(-2)


def stored_variant(case: Case, pair: Pair) -> Variant:
    """kvpass's attention over a cache of these formats."""
    names = pair[0].name, pair[1].name
    copies = case.stored_copies(pair)

    def call(index: int) -> Tensor:
        key, value = copies[index]
        out: Tensor = ops.attention(
            case.query, *key, *value, case.positions, case.mask, case.scale, case.is_causal, *names
        )
        return out

    return _stored(case, label(pair, case.keep), "kvpass", call, pair)


def unfused_variant(case: Case, pair: Pair) -> Variant:
    """What a graph computes whose attention was not fused: decode the whole cache, then transformers' attention."""
    copies = case.stored_copies(pair)

    def call(index: int) -> Tensor:
        key, value = (
            ops.dequantize(*buffers, case.positions, fmt.name, case.dtype)
            for buffers, fmt in zip(copies[index], pair, strict=True)
        )
        return static_attention(case, key, value)

    return _stored(case, f"dequantize + SDPA {label(pair)}", "unfused", call, pair)


def _stored(case: Case, name: str, kind: str, call: Call, pair: Pair) -> Variant:
    return Variant(
        name,
        kind,
        call,
        len(case.stored_copies(pair)),
        case.stored_bytes(pair),
        lambda row, head: case.stored_row(pair, row, head),
        (pair[0].name, pair[1].name),
        case.keep,
    )


def static_attention(case: Case, key: Tensor, value: Tensor) -> Tensor:
    """transformers' attention on a static cache: heads repeated in memory, a boolean mask over every slot."""

    def repeated(x: Tensor) -> Tensor:
        return x[:, :, None].expand(-1, -1, case.shape.group, -1, -1).flatten(1, 2)

    return F.scaled_dot_product_attention(
        case.query, repeated(key), repeated(value), attn_mask=case.full_mask, scale=case.scale
    )


def label(pair: Pair, keep: tuple[int, int] = (0, 0)) -> str:
    """``nvfp4``, or ``fp8_e4m3/nvfp4`` where K and V differ; and how many of the first and newest slots are kept."""
    text = pair[0].name if pair[0] == pair[1] else f"{pair[0].name}/{pair[1].name}"
    return f"{text}, {keep[0]} + {keep[1]} kept" if any(keep) else text


@dataclass(frozen=True)
class Check:
    """Relative error ``|output - exact| / |exact|``, and what is allowed."""

    error: float
    budget: float

    @property
    def passed(self) -> bool:
        return self.error <= self.budget  # NaN does not


def check(case: Case, variant: Variant, output: Tensor) -> Check:
    """Compare ``output`` with fp64 attention over what ``variant`` reads."""
    shape, group = case.shape, case.shape.group
    wrong = torch_wrong = norm = torch.zeros((), dtype=torch.float64, device=case.device)
    for row in sorted({0, shape.batch - 1}):
        visible = case.full_mask[row : row + 1, :, :, : shape.tokens].contiguous()
        for head in range(shape.kv_heads):
            heads = slice(head * group, (head + 1) * group)
            query = case.query[row : row + 1, heads]
            key, value = (x.view(1, 1, *x.shape) for x in variant.decoded(row, head))
            exact = reference.attention(query.double(), key, value, case.positions, visible, case.scale, False)
            key, value = (x.to(case.dtype).expand(1, group, -1, -1) for x in (key, value))
            by_torch = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=case.scale)
            wrong = wrong + (output[row : row + 1, heads].double() - exact).square().sum()
            torch_wrong = torch_wrong + (by_torch.double() - exact).square().sum()
            norm = norm + exact.square().sum()
    error = (wrong / norm).sqrt().item() if output.isfinite().all() else float("nan")
    allowance = max(torch.finfo(case.dtype).eps / 4, FLOAT32_SUMS)
    budget = 1.5 * (torch_wrong / norm).sqrt().item() + allowance
    return Check(error, max(budget, PEER_BUDGET) if variant.kind == "peer" else budget)


def _clone(buffers: KVBuffers) -> KVBuffers:
    return buffers.map_batch(torch.Tensor.clone)


def _decode(buffers: KVBuffers, fmt: KVFormat, row: int, head: int, tokens: int) -> Tensor:
    """``[tokens, head_dim]`` fp64."""
    own = buffers.map_batch(lambda tensor: tensor[row : row + 1, head : head + 1])
    scale, centre = (None if t is None else t[head : head + 1] for t in (buffers.scale, buffers.centre))
    return reference.dequantize(own._replace(scale=scale, centre=centre).first(tokens), fmt, torch.float64)[0, 0]
