"""Split-KV attention that decodes K and V on the fly.

A program takes the query rows of one KV head (query positions times the heads of its group, flattened), and one share
of the slots. The shares are equal parts of the length that ``positions`` holds on the device, so the host waits for
nothing and one captured graph serves every length; their number depends on shapes and the GPU only. With more than one
share, the partial results (fp32 sums, and each row's maximum and denominator) are combined by a second kernel.

What is exact: a code times its block scale in fp16 (bf16 for e8m0), and the powers of two by which the query and the
e2m1 values are moved into fp16's range; they return in the factor of the scores and of the output, with the tensor
scales. What is rounded: the probabilities, to the type V is decoded to.

Transforms are undone around the sums, not in the cache: the query is rotated before (and not rounded), the centre of K
is left out, since it moves all scores of a query alike, and the centre of V is added to the output. Slots that are kept
in bf16 replace the decoded ones of their tile.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvpass.formats import CODECS, KVBuffers, KVFormat, get_format
from kvpass.kernels.codecs import (
    check_buffers,
    code_factor,
    constexprs,
    interpreting,
    load_values,
    native_float8,
    on_device,
    padded_width,
    put_kept,
    round_to,
    to_float32,
)
from kvpass.kernels.rotate import rotate_rows

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_MASK_DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _powers_below(amax):
    """fp32 ``2**-e`` and ``2**e`` for the exponent ``e`` of each ``amax``, inside the normal range."""
    exponent = tl.minimum(tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) & 0xFF, 1), 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    up = (exponent << 23).to(tl.float32, bitcast=True)
    return down, up


@triton.jit
def _masked(
    scores, mask, mask_row, slot, mask_slot_stride, is_row, is_slot, IS_BOOL: tl.constexpr, HAS_ROWS: tl.constexpr
):
    """``scores`` (log2) with the mask of the tile ``slot``: hidden ones -inf, or the mask added."""
    slot_offset = slot.to(tl.int64)[None, :] * mask_slot_stride
    if HAS_ROWS:
        visible = tl.load(mask_row + slot_offset, mask=is_row[:, None] & is_slot[None, :], other=0)
    else:
        visible = tl.load(mask + slot_offset, mask=is_slot[None, :], other=0)
    if IS_BOOL:
        result = tl.where(visible != 0, scores, -float("inf"))
    else:
        bias = to_float32(visible) * 1.4426950408889634
        # Finite stays finite: a row of which all is the smallest number is not a row of which all is masked.
        result = scores + tl.where(bias == -float("inf"), bias, tl.maximum(bias, -3.4028234663852886e38))
    return result


# What a tile of the mask does to its scores.
_HIDES_ALL = tl.constexpr(0)
_MIXED = tl.constexpr(1)
_CHANGES_NOTHING = tl.constexpr(2)


@triton.jit(do_not_specialize=["length", "slots", "heads"])
def _survey_kernel(
    mask,
    mask_batch_stride,
    mask_head_stride,
    mask_token_stride,
    mask_slot_stride,
    survey,
    heads,
    length,
    slots,
    GROUP: tl.constexpr,
    IS_BOOL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What the mask does in one tile of the attention kernel: ``BLOCK_M`` query rows times ``BLOCK_N`` slots."""
    row_tiles = tl.cdiv(length * GROUP, BLOCK_M)
    row_tile = tl.program_id(0) % row_tiles
    batch = (tl.program_id(0) // row_tiles // heads).to(tl.int64)
    head = tl.program_id(0) // row_tiles % heads * GROUP
    row = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # offsets into a large mask need 64 bits
    slot = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask += batch * mask_batch_stride
    offset = ((head + row % GROUP) * mask_head_stride + (row // GROUP) * mask_token_stride)[:, None]
    is_inside = (row < length * GROUP)[:, None] & (slot < slots)[None, :]
    entry = tl.load(mask + offset + slot.to(tl.int64)[None, :] * mask_slot_stride, mask=is_inside, other=0)
    if IS_BOOL:
        hides, changes = entry == 0, entry == 0
    else:
        hides, changes = to_float32(entry) == -float("inf"), to_float32(entry) != 0
    sees = tl.max(tl.max((is_inside & (hides == 0)).to(tl.int32), 1), 0)
    changes = tl.max(tl.max((is_inside & changes).to(tl.int32), 1), 0)
    state = tl.where(sees == 0, _HIDES_ALL, tl.where(changes == 0, _CHANGES_NOTHING, _MIXED))
    tl.store(survey + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1), state.to(tl.int8))


@triton.jit
def _seen_range(survey_row, tiles, BLOCK_N: tl.constexpr):
    """The slots from the first to the last tile that the mask does not hide altogether."""
    first = tiles
    stop = 0
    for base in tl.range(0, tiles, 256):
        tile = base + tl.arange(0, 256)
        is_seen = tl.load(survey_row + tile, mask=tile < tiles, other=_HIDES_ALL) != _HIDES_ALL
        first = tl.minimum(first, tl.min(tl.where(is_seen, tile, tiles), 0))
        stop = tl.maximum(stop, tl.max(tl.where(is_seen, tile + 1, 0), 0))
    return first * BLOCK_N, stop * BLOCK_N


@triton.jit(do_not_specialize=["length", "max_len", "limit", "survey_tiles"])
def _attention_kernel(
    query,
    query_batch_stride,
    query_head_stride,
    query_token_stride,
    key_codes,
    key_block_scale,
    key_scale,
    key_kept,
    value_codes,
    value_block_scale,
    value_scale,
    value_centre,
    value_kept,
    positions,
    mask,
    mask_batch_stride,
    mask_head_stride,
    mask_token_stride,
    mask_slot_stride,
    survey,
    survey_batch_stride,
    survey_head_stride,
    survey_tiles,
    sinks,
    score_offset,
    out,
    partial_max,
    partial_sum,
    softmax_scale,
    softcap,
    kv_heads,
    length,
    max_len,
    limit,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_CODEC: tl.constexpr,
    KEY_BLOCK_SCALE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_CODEC: tl.constexpr,
    VALUE_BLOCK_SCALE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    KEEP: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    MASK_IS_BOOL: tl.constexpr,
    MASK_HAS_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    PRECISION: tl.constexpr = "ieee"
    KEY_PACKED: tl.constexpr = KEY_CODEC == "e2m1"
    VALUE_PACKED: tl.constexpr = VALUE_CODEC == "e2m1"
    rows = length * GROUP
    row_tiles = tl.cdiv(rows, BLOCK_M)
    batch_head = (tl.program_id(0) // row_tiles).to(tl.int64)
    row_tile = tl.program_id(0) % row_tiles
    split = tl.program_id(1)
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < rows
    token = (row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    last = tl.load(positions + length - 1)
    # A cache that runs over attends to nothing, and the output becomes NaN at the end.
    runs_over = last >= limit
    end = tl.where(runs_over, 0, last + 1).to(tl.int32)
    if IS_CAUSAL:
        row_end = tl.load(positions + token, mask=is_row, other=-1).to(tl.int32) + 1
        end = tl.minimum(end, tl.max(row_end, 0))
    begin = 0
    if survey is not None:
        survey_row = survey + (batch * survey_batch_stride + kv_head * survey_head_stride + row_tile) * survey_tiles
        begin, stop = _seen_range(survey_row, survey_tiles, BLOCK_N)
        end = tl.minimum(end, stop)

    # A share is a multiple of 32 slots: tiles of block scales are read whole.
    share = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK_N) * BLOCK_N
    low = begin + split * share
    high = tl.minimum(low + share, end)

    column = tl.arange(0, KEY_WIDTH)[None, :]
    query_row = query + (batch * query_batch_stride + head * query_head_stride + token * query_token_stride)[:, None]
    if KEY_PACKED:
        is_query = is_row[:, None] & (column < KEY_DIM // 2)
        query_first = to_float32(tl.load(query_row + 2 * column, mask=is_query, other=0.0))
        query_second = to_float32(tl.load(query_row + 2 * column + 1, mask=is_query, other=0.0))
        amax = tl.maximum(tl.max(tl.abs(query_first), 1), tl.max(tl.abs(query_second), 1))
    else:
        query_first = to_float32(tl.load(query_row + column, mask=is_row[:, None] & (column < KEY_DIM), other=0.0))
        query_second = query_first
        amax = tl.max(tl.abs(query_first), 1)

    score_scale = softmax_scale * LOG2_E
    if key_scale is not None:
        score_scale *= tl.load(key_scale + kv_head)
    score_scale *= 1.0 / code_factor(KEY_CODEC, KEY_DTYPE)
    score_scale = tl.full([BLOCK_M], 1.0, tl.float32) * score_scale
    if KEY_DTYPE == tl.float16:
        # Rows are moved into fp16's range by powers of two: bf16 queries may be far outside.
        down, up = _powers_below(amax)
        query_first *= down[:, None]
        query_second *= down[:, None]
        score_scale *= up
    query_first = query_first.to(KEY_DTYPE)
    query_second = query_second.to(KEY_DTYPE)

    KEY_ROW: tl.constexpr = KEY_DIM // 2 if KEY_PACKED else KEY_DIM
    VALUE_ROW: tl.constexpr = VALUE_DIM // 2 if VALUE_PACKED else VALUE_DIM
    key_codes += batch_head * max_len * KEY_ROW
    value_codes += batch_head * max_len * VALUE_ROW
    tiles = tl.cdiv(max_len, 32)
    if key_block_scale is not None:
        key_block_scale += batch_head * tiles * ((KEY_DIM + KEY_BLOCK - 1) // KEY_BLOCK * 32)
    if value_block_scale is not None:
        value_block_scale += batch_head * tiles * ((VALUE_DIM + VALUE_BLOCK - 1) // VALUE_BLOCK * 32)
    if mask is not None:
        mask += batch * mask_batch_stride
        mask_row = mask
        if MASK_HAS_ROWS:
            mask_row = mask + (head * mask_head_stride + token * mask_token_stride)[:, None]

    # fp16 probabilities are stored 2**15 times too large, which keeps those of long contexts out of its subnormals; the
    # factor leaves with the denominator.
    HEADROOM: tl.constexpr = 15.0 if VALUE_DTYPE == tl.float16 else 0.0
    SINK_WEIGHT: tl.constexpr = 2.0**HEADROOM
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        # A row's first share begins as if it had met a slot with the sink's score and a value of zero.
        sink = to_float32(tl.load(sinks + head, mask=is_row, other=0.0)) * LOG2_E
        sink = tl.where(split == 0, sink, -float("inf"))
        row_max = sink
        row_sum = tl.where(sink == -float("inf"), 0.0, SINK_WEIGHT)
    if score_offset is not None:
        offset_row = score_offset + (batch * kv_heads * GROUP + head) * length + token
        offset = tl.load(offset_row, mask=is_row, other=0.0) * LOG2_E
    acc_first = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    if VALUE_PACKED:
        acc_second = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)

    for start in tl.range(low, high, BLOCK_N):
        key_first, key_second = load_values(
            key_codes, key_block_scale, start, high,
            KEY_CODEC, KEY_BLOCK_SCALE, KEY_BLOCK, KEY_DIM, KEY_WIDTH, BLOCK_N, KEY_DTYPE, NATIVE,
        )  # fmt: skip
        if key_kept is not None:
            if start < KEEP:
                key_first, key_second = put_kept(
                    key_first, key_second, key_kept + batch_head * (KEEP * KEY_DIM), key_scale, kv_head, start, high,
                    KEY_CODEC, KEY_DIM, KEEP, KEY_DTYPE,
                )  # fmt: skip
        scores = tl.dot(query_first, tl.trans(key_first), input_precision=PRECISION)
        if KEY_PACKED:
            scores = tl.dot(query_second, tl.trans(key_second), scores, input_precision=PRECISION)
        scores *= score_scale[:, None]
        if score_offset is not None:
            scores += offset[:, None]
        if softcap is not None:
            # c tanh(s / c) with tanh(x) = 1 - 2 / (exp(2 x) + 1), and s in powers of two before and after.
            scores = (softcap * LOG2_E) * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0))

        slot = start + tl.arange(0, BLOCK_N)
        is_slot = slot < high
        if mask is not None:
            is_applied = True
            if survey is not None:
                is_applied = tl.load(survey_row + start // BLOCK_N) != _CHANGES_NOTHING
            if is_applied:
                scores = _masked(
                    scores, mask, mask_row, slot, mask_slot_stride, is_row, is_slot, MASK_IS_BOOL, MASK_HAS_ROWS
                )
        if IS_CAUSAL:
            scores = tl.where(slot[None, :] < tl.minimum(row_end, high)[:, None], scores, -float("inf"))
        else:
            scores = tl.where(is_slot[None, :], scores, -float("inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - finite_max)
        probability = tl.exp2(scores - (finite_max - HEADROOM)[:, None])
        row_sum = row_sum * rescale + tl.sum(probability, 1)
        row_max = new_max

        value_first, value_second = load_values(
            value_codes, value_block_scale, start, high,
            VALUE_CODEC, VALUE_BLOCK_SCALE, VALUE_BLOCK, VALUE_DIM, VALUE_WIDTH, BLOCK_N, VALUE_DTYPE, NATIVE,
        )  # fmt: skip
        if value_kept is not None:
            if start < KEEP:
                value_first, value_second = put_kept(
                    value_first, value_second, value_kept + batch_head * (KEEP * VALUE_DIM), value_scale, kv_head,
                    start, high, VALUE_CODEC, VALUE_DIM, KEEP, VALUE_DTYPE,
                )  # fmt: skip
        probability = probability.to(VALUE_DTYPE)
        acc_first = tl.dot(probability, value_first, acc_first * rescale[:, None], input_precision=PRECISION)
        if VALUE_PACKED:
            acc_second = tl.dot(probability, value_second, acc_second * rescale[:, None], input_precision=PRECISION)

    if VALUE_PACKED:
        result = tl.interleave(acc_first, acc_second)
        value_column = tl.arange(0, 2 * VALUE_WIDTH)[None, :]
    else:
        result = acc_first
        value_column = tl.arange(0, VALUE_WIDTH)[None, :]
    result *= 1.0 / code_factor(VALUE_CODEC, VALUE_DTYPE)
    if value_scale is not None:
        result *= tl.load(value_scale + kv_head)
    is_out = is_row[:, None] & (value_column < VALUE_DIM)
    if SPLITS == 1:
        result = result / row_sum[:, None]
        if value_centre is not None:
            result += tl.load(
                value_centre + kv_head * VALUE_DIM + value_column, mask=value_column < VALUE_DIM, other=0.0
            )
        result = tl.where((row_sum == 0.0)[:, None], 0.0, result)
        result = tl.where(runs_over, float("nan"), result)
        out_row = ((batch * kv_heads * GROUP + head) * length + token)[:, None] * VALUE_DIM
        tl.store(out + out_row + value_column, round_to(result, OUT_DTYPE), mask=is_out)
    else:
        partial_row = (batch_head * SPLITS + split) * rows + row
        tl.store(partial_max + partial_row, row_max, mask=is_row)
        tl.store(partial_sum + partial_row, row_sum, mask=is_row)
        # The first share has the sinks' part of the denominator, even where the mask leaves it no slot.
        if (low < high) | (split == 0):
            tl.store(out + partial_row[:, None] * VALUE_DIM + value_column, result, mask=is_out)


@triton.jit(do_not_specialize=["length", "limit"])
def _reduce_kernel(
    partial,
    partial_max,
    partial_sum,
    value_centre,
    positions,
    out,
    kv_heads,
    length,
    limit,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row of the output: the partial results of its splits, weighted by ``2 ** (its maximum - the largest)``."""
    rows = length * GROUP
    batch_head = (tl.program_id(0) // rows).to(tl.int64)
    row = tl.program_id(0) % rows
    split = tl.arange(0, SPLITS_PADDED)
    partial_row = (batch_head * SPLITS + split) * rows + row
    split_max = tl.load(partial_max + partial_row, mask=split < SPLITS, other=-float("inf"))
    split_sum = tl.load(partial_sum + partial_row, mask=split < SPLITS, other=0.0)
    largest = tl.max(split_max, 0)
    weight = tl.exp2(split_max - tl.where(largest == -float("inf"), 0.0, largest))
    total = tl.sum(weight * split_sum, 0)

    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    # A split without a visible slot may have written no sums.
    is_read = (split_sum != 0.0)[:, None] & (column < VALUE_DIM)[None, :]
    sums = tl.load(partial + partial_row[:, None] * VALUE_DIM + column[None, :], mask=is_read, other=0.0)
    result = tl.sum(sums * weight[:, None], 0)
    result = result / total
    if value_centre is not None:
        centre = value_centre + batch_head % kv_heads * VALUE_DIM
        result += tl.load(centre + column, mask=column < VALUE_DIM, other=0.0)
    result = tl.where(total == 0.0, 0.0, result)
    result = tl.where(tl.load(positions + length - 1) >= limit, float("nan"), result)
    out_row = (batch_head * GROUP + row % GROUP) * length + row // GROUP
    tl.store(out + out_row * VALUE_DIM + column, round_to(result, OUT_DTYPE), mask=column < VALUE_DIM)


class Configuration(NamedTuple):
    """How the attention kernel is launched.

    Attributes:
        block_m: Query rows of a program (positions times group).
        block_n: Slots of one step, a multiple of 32.
        num_warps, num_stages: Triton's.
        programs_per_sm: How many programs an SM holds at once, from which the number of splits follows.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# Decode (at most 16 rows) by (bits of the wider codec, largest head_dim). `programs_per_sm` follows from the registers
# and the shared memory that these compile to for sm_90; those of head_dim 128 in 4 and 8 bits were the fastest of eight
# tried on an H200.
_DECODE = {
    (4, 64): Configuration(16, 64, 4, 3, 5),
    (4, 128): Configuration(16, 128, 4, 3, 2),
    (4, 256): Configuration(16, 32, 4, 3, 3),
    (4, 512): Configuration(16, 32, 8, 3, 1),
    (8, 64): Configuration(16, 64, 4, 3, 6),
    (8, 128): Configuration(16, 128, 4, 3, 2),
    (8, 256): Configuration(16, 32, 4, 3, 2),
    (8, 512): Configuration(16, 32, 8, 3, 1),
    (16, 64): Configuration(16, 64, 4, 2, 8),
    (16, 128): Configuration(16, 64, 4, 2, 5),
    (16, 256): Configuration(16, 32, 4, 2, 5),
    (16, 512): Configuration(16, 32, 8, 2, 2),
}


def configuration(key: KVFormat, value: KVFormat, head_dim: int, rows: int, is_fp32: bool) -> Configuration:
    """The configuration for ``rows`` query rows of a KV head; ``head_dim`` is the larger of K's and V's."""
    if is_fp32:  # no tensor cores: whole rows of both operands in registers
        return Configuration(16, 32, 8 if head_dim > 128 else 4, 1, 2)
    bits = max(CODECS[key.codec].bits, CODECS[value.codec].bits)
    if rows > 16:
        block_m = 32 if rows <= 32 else 64
        if head_dim > 128:
            return Configuration(block_m, 32, 8, 2, 1)
        return Configuration(block_m, 64, 4, 2 if bits == 16 else 3, 2)
    return _DECODE[bits, max(64, triton.next_power_of_2(head_dim))]


@functools.cache
def _hopper() -> ModuleType | None:
    """The Hopper decode kernel's module; None where this triton's Gluon is not one it can be written in."""
    try:
        from kvpass.kernels import hopper_decode
    except (ImportError, AttributeError):
        return None
    return hopper_decode


def why_not_hopper(
    query: torch.Tensor,
    kv_heads: int,
    value_dim: int,
    mask: torch.Tensor | None,
    scale: float,
    key_format: str,
    value_format: str,
    keep: int,
    softcap: float,
    has_sinks: bool,
) -> str | None:
    """Why the Hopper kernel would not take a call of :func:`attention`; None if it would. Fake tensors will do."""
    if (hopper := _hopper()) is None:
        return f"triton {triton.__version__} has no usable Gluon"
    key, value = get_format(key_format), get_format(value_format)
    reason: str | None = hopper.supports_device(query.device)
    reason = reason or hopper.supports_shapes(query, kv_heads, value_dim, mask, scale, key, value)
    return reason or hopper.supports_form(mask, key, keep, softcap, has_sinks)


@functools.lru_cache
def _sm_count(device: torch.device) -> int:
    # The interpreter has no SMs; a few make it split.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.lru_cache(maxsize=4096)
def split_count(programs: int, slots: int, most: int) -> int:
    """Splits of each of ``programs`` so that a GPU with room for ``slots`` programs at once is well filled.

    The fewest, at most ``most``, that come within 5% of the best share of busy time: rounds of programs are whole.
    """

    def busy(splits: int) -> float:
        rounds = -(-programs * splits // slots)
        return programs * splits / (rounds * slots)

    # Beyond two rounds, more splits only make more to combine.
    candidates = range(1, max(1, min(most, 2 * slots // programs)) + 1)
    best = max(map(busy, candidates))
    return next(splits for splits in candidates if busy(splits) >= 0.95 * best)


def _compute_dtype(fmt: KVFormat, query: torch.dtype) -> torch.dtype:
    """The type a dot product with values of ``fmt`` is done in: every value is exact in it."""
    if query == torch.float32:
        return torch.float32
    if fmt.codec != "bf16" and fmt.block_scale != "e8m0":
        return torch.float16
    # Values of bf16's range; the interpreter multiplies bf16 as integers.
    return torch.bfloat16 if query == torch.bfloat16 and not interpreting() else torch.float32


def attention(
    query: torch.Tensor,
    key_codes: torch.Tensor,
    key_block_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    key_centre: torch.Tensor | None,
    key_kept: torch.Tensor | None,
    value_codes: torch.Tensor,
    value_block_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    value_centre: torch.Tensor | None,
    value_kept: torch.Tensor | None,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    key_format: str,
    value_format: str,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``query`` to the slots up to ``positions[-1]``, which is read on the device.

    Decode on a Hopper GPU goes to :mod:`kvpass.kernels.hopper_decode`, everything else to the kernel here.

    Args:
        query: ``[batch, heads, length, key_dim]`` bf16, fp16 or fp32, any strides; ``heads`` is a multiple of
            ``kv_heads``.
        key_codes ... value_kept: The buffers, contiguous (:class:`kvpass.formats.KVBuffers`).
        positions: ``[length]`` int64, ascending. If the last is outside the cache (or the mask), the output is NaN.
        mask: None, or ``[batch or 1, heads or 1, length or 1, slots]``, bool (True attends) or bf16, fp16 or fp32
            (added to the scaled scores); any strides.
        scale: Multiplies the scores.
        is_causal: Query ``i`` sees slots up to ``positions[i]`` only.
        key_format, value_format: Names of registered formats.
        softcap: 0 for none, else scaled scores ``s`` become ``softcap * tanh(s / softcap)`` before the mask.
        sinks: None, or ``[heads]`` bf16, fp16 or fp32: logits that join the softmax of every row of their head.

    Returns:
        ``[batch, heads, length, value_dim]`` in ``query.dtype``; rows that see nothing are zero.

    Raises:
        ValueError: A dtype or shape outside the above, or buffers that the format does not have.
        NotImplementedError: Sinks over a centred V: part of the softmax then weighs no value.
    """
    key, value = get_format(key_format), get_format(value_format)
    if value.centred and sinks is not None:
        raise NotImplementedError(f"attention sinks over V in {value_format!r}; use a format of V without '+centred'")
    key_buffers = KVBuffers(key_codes, key_block_scale, key_scale, key_centre, key_kept)
    value_buffers = KVBuffers(value_codes, value_block_scale, value_scale, value_centre, value_kept)
    check_buffers("key", key, key_buffers)
    check_buffers("value", value, value_buffers)
    batch, kv_heads, max_len, key_width = key_codes.shape
    _, heads, length, key_dim = query.shape
    value_dim = value.head_dim(value_codes.shape[3])
    _check(query, key.head_dim(key_width), key_codes, value_codes, positions)
    dtype, out_dtype = query.dtype, torch.float32 if value.rotated else query.dtype
    out = torch.empty((batch, heads, length, value_dim), dtype=out_dtype, device=query.device)
    if out.numel() == 0:
        return out.to(dtype)
    if mask is not None:
        _check_mask(mask, batch, heads, length)
    call = (positions, mask, scale, is_causal, key_format, value_format, softcap, sinks)
    hopper, group = _hopper(), heads // kv_heads
    takes_hopper = hopper is not None and hopper.supports(query, *key_buffers, *value_buffers, *call) is None
    score_offset = None
    if key_centre is not None and (softcap or sinks is not None):
        # Neither bears the shift of a row's scores that leaving out K's centre is.
        score_offset = scale * (query.float() * key_centre.repeat_interleave(group, 0)[:, None]).sum(-1)
    if key.rotated:
        query = rotate_rows(query, torch.float32, launches_early=takes_hopper)
    if value.rotated and value_centre is not None:  # the sums are rotated, and so must be what is added to them
        value_centre = rotate_rows(value_centre[None, :, None], torch.float32).view(kv_heads, value_dim)
        value_buffers = value_buffers._replace(centre=value_centre)
    if takes_hopper:
        hopper.attention(query, *key_buffers, *value_buffers, *call, out)
        return rotate_rows(out, dtype) if value.rotated else out
    if query.stride(3) != 1:
        query = query.contiguous()
    limit, mask_strides, mask_has_rows, mask_is_bool = max_len, (0, 0, 0, 0), False, False
    if mask is not None:
        limit = min(limit, mask.shape[3])
        mask_strides = tuple(0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True))
        mask_has_rows = mask_strides[1] != 0 or mask_strides[2] != 0
        mask_is_bool = mask.dtype == torch.bool
        if mask_is_bool:
            mask = mask.view(torch.uint8)

    rows = length * group
    key_dtype, value_dtype = _compute_dtype(key, dtype), _compute_dtype(value, dtype)
    config = configuration(key, value, max(key_dim, value_dim), rows, torch.float32 in (key_dtype, value_dtype))
    programs = batch * kv_heads * triton.cdiv(rows, config.block_m)
    slots = _sm_count(query.device) * config.programs_per_sm
    splits = split_count(programs, slots, min(256, triton.cdiv(max_len, config.block_n)))
    survey, survey_strides = None, (0, 0, 0)
    if mask is not None and rows > config.block_m:
        survey, survey_strides = _survey(mask, mask_strides, mask_is_bool, kv_heads, group, length, config)
    target, partial_max, partial_sum = out, None, None
    if splits > 1:
        partial_shape = (batch * kv_heads, splits, rows)
        target = torch.empty((*partial_shape, value_dim), dtype=torch.float32, device=query.device)
        partial_max, partial_sum = torch.empty((2, *partial_shape), dtype=torch.float32, device=query.device)
    with on_device(query):
        _attention_kernel[(programs, splits)](
            query,
            *query.stride()[:3],
            key_codes,
            key_block_scale,
            key_scale,
            key_kept,
            value_codes,
            value_block_scale,
            value_scale,
            value_centre,
            value_kept,
            positions,
            mask,
            *mask_strides,
            survey,
            *survey_strides,
            None if sinks is None else sinks.contiguous(),
            score_offset,
            target,
            partial_max,
            partial_sum,
            scale,
            softcap or None,
            kv_heads,
            length,
            max_len,
            limit,
            GROUP=group,
            KEY_DIM=key_dim,
            KEY_WIDTH=padded_width(key, key_dim),
            KEY_DTYPE=_DTYPES[key_dtype],
            **constexprs(key, "KEY_"),
            VALUE_DIM=value_dim,
            VALUE_WIDTH=padded_width(value, value_dim),
            VALUE_DTYPE=_DTYPES[value_dtype],
            **constexprs(value, "VALUE_"),
            KEEP=max(0 if b.kept is None else b.kept.shape[2] for b in (key_buffers, value_buffers)),
            OUT_DTYPE=_DTYPES[out_dtype],
            IS_CAUSAL=is_causal,
            MASK_IS_BOOL=mask_is_bool,
            MASK_HAS_ROWS=mask_has_rows,
            SPLITS=splits,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            NATIVE=native_float8(query.device),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if splits > 1:
            block_d = min(64, triton.next_power_of_2(value_dim))
            _reduce_kernel[(batch * kv_heads * rows, triton.cdiv(value_dim, block_d))](
                target,
                partial_max,
                partial_sum,
                value_centre,
                positions,
                out,
                kv_heads,
                length,
                limit,
                GROUP=group,
                VALUE_DIM=value_dim,
                OUT_DTYPE=_DTYPES[out_dtype],
                SPLITS=splits,
                SPLITS_PADDED=triton.next_power_of_2(splits),
                BLOCK_D=block_d,
                num_warps=4,
            )
    return rotate_rows(out, dtype) if value.rotated else out


def _survey(
    mask: torch.Tensor,
    strides: tuple[int, ...],
    is_bool: bool,
    kv_heads: int,
    group: int,
    length: int,
    config: Configuration,
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """What ``mask`` does in each tile of the attention kernel, int8, and the strides by which a program finds its row:
    of the batch, of the KV heads, and of tiles of rows."""
    batch, heads, _, slots = mask.shape
    row_tiles, tiles = triton.cdiv(length * group, config.block_m), triton.cdiv(slots, config.block_n)
    survey_heads = kv_heads if heads > 1 else 1
    survey = torch.empty(batch * survey_heads * row_tiles, tiles, dtype=torch.int8, device=mask.device)
    with on_device(mask):
        _survey_kernel[(len(survey), tiles)](
            mask,
            *strides,
            survey,
            survey_heads,
            length,
            slots,
            GROUP=group,
            IS_BOOL=is_bool,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            num_warps=4,
        )
    return survey, (survey_heads * row_tiles if batch > 1 else 0, row_tiles if heads > 1 else 0, tiles)


def _check(
    query: torch.Tensor, key_dim: int, key_codes: torch.Tensor, value_codes: torch.Tensor, positions: torch.Tensor
) -> None:
    if query.dtype not in _DTYPES:
        raise ValueError(f"query is {query.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    batch, heads, length, dim = query.shape
    kv_heads = key_codes.shape[1]
    if batch != key_codes.shape[0] or dim != key_dim or heads % kv_heads:
        raise ValueError(
            f"query is {tuple(query.shape)}; this cache takes [{key_codes.shape[0]}, a multiple of {kv_heads}, "
            f"length, {key_dim}]"
        )
    if value_codes.shape[:3] != key_codes.shape[:3]:
        raise ValueError(
            f"key codes are {tuple(key_codes.shape)} and value codes {tuple(value_codes.shape)}; "
            "they may differ in width only"
        )
    if positions.shape[0] != length:
        raise ValueError(f"positions hold {positions.shape[0]} slots for {length} query tokens; give one for each")


def _check_mask(mask: torch.Tensor, batch: int, heads: int, length: int) -> None:
    if mask.dtype not in _MASK_DTYPES:
        raise ValueError(f"mask is {mask.dtype}; allowed: {', '.join(map(str, _MASK_DTYPES))}")
    expected = (batch, heads, length)
    if mask.dim() != 4 or any(size not in (1, full) for size, full in zip(mask.shape[:3], expected, strict=True)):
        raise ValueError(
            f"mask is {tuple(mask.shape)}; each dimension but the last must be 1 or that of {expected}, "
            "the last holds the slots"
        )
