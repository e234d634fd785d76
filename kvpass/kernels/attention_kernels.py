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

import triton
import triton.language as tl

from kvpass.kernels.codecs import round_to, to_float32
from kvpass.kernels.decode import code_factor, kept_range, load_values, put_kept
from kvpass.kernels.launch import remembered


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


@remembered
@triton.jit(do_not_specialize=["length", "slots", "heads"])
def survey_kernel(
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


@remembered
@triton.jit(do_not_specialize=["length", "max_len", "limit", "survey_tiles"])
def attention_kernel(
    query,
    query_batch_stride,
    query_head_stride,
    query_token_stride,
    key_codes,
    key_block_scale,
    key_scale,
    key_kept,
    key_kept_slots,
    value_codes,
    value_block_scale,
    value_scale,
    value_centre,
    value_kept,
    value_kept_slots,
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
    KEEP_PADDED: tl.constexpr,
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

    if key_kept is not None:
        kept_low, kept_high = kept_range(key_kept_slots, KEEP, KEEP_PADDED)
    elif value_kept is not None:
        kept_low, kept_high = kept_range(value_kept_slots, KEEP, KEEP_PADDED)

    for start in tl.range(low, high, BLOCK_N):
        key_first, key_second = load_values(
            key_codes, key_block_scale, start, high,
            KEY_CODEC, KEY_BLOCK_SCALE, KEY_BLOCK, KEY_DIM, KEY_WIDTH, BLOCK_N, KEY_DTYPE, NATIVE,
        )  # fmt: skip
        if key_kept is not None:
            if (start < KEEP) | ((start <= kept_high) & (start + BLOCK_N > kept_low)):
                key_first, key_second = put_kept(
                    key_first, key_second, key_kept + batch_head * (KEEP * KEY_DIM), key_kept_slots, key_scale, kv_head,
                    start, high, KEY_CODEC, KEY_DIM, KEEP, KEEP_PADDED, KEY_DTYPE,
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
            if (start < KEEP) | ((start <= kept_high) & (start + BLOCK_N > kept_low)):
                value_first, value_second = put_kept(
                    value_first, value_second, value_kept + batch_head * (KEEP * VALUE_DIM), value_kept_slots,
                    value_scale, kv_head, start, high, VALUE_CODEC, VALUE_DIM, KEEP, KEEP_PADDED, VALUE_DTYPE,
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


@remembered
@triton.jit(do_not_specialize=["length", "limit"])
def reduce_kernel(
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
