"""The two kernels of Hopper decode: one warp a share of the slots, and the sum of the shares.

:mod:`kvpass.kernels.hopper_decode` explains them, and launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kvpass.kernels.hopper_layouts import (
    ACCUMULATOR,
    copy_layout,
    key_shared,
    output_layout,
    query_layout,
    scale_copy_layout,
    scale_shared,
    value_shared,
)
from kvpass.kernels.hopper_operands import (
    LOG2E,
    is_not_kept,
    lane_sum,
    leading_hidden_tiles,
    load_added,
    load_mask,
    load_row_scales,
    move_maximum,
    newest_tiles,
    query_operand,
    score_tile,
    slot_of,
    weigh_tile,
)
from kvpass.kernels.launch import remembered

UNPACKED = gl.constexpr(2.0**14)  # multiplies decoded e2m1 codes back
_NOTHING_SEEN = gl.constexpr(-1e30)  # the running maximum before any score
_start_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # renamed in 3.9


@gluon.jit
def _copy_rows(buffer, codes, tile, length, WORDS: gl.constexpr, HELD: gl.constexpr):
    """Start copying a tile of codes, of which the cache has HELD words a row. Other words, and rows from ``length`` on,
    become zero and are not read."""
    layout: gl.constexpr = copy_layout(WORDS)
    position = gl.arange(0, 32, gl.SliceLayout(1, layout))
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    # What differs between the copies of one lane is added last, so that it becomes part of the instruction.
    at = codes + tile * (32 * HELD) + (slot_of(position & 7) * HELD)[:, None] + word[None, :]
    at += ((position & 24) * HELD)[:, None]
    if (tile + 1) * 32 <= length:
        if HELD == WORDS:
            _start_copy(buffer, at)
        else:
            _start_copy(buffer, at, mask=(word < HELD)[None, :])
    else:
        _start_copy(buffer, at, mask=(tile * 32 + slot_of(position) < length)[:, None] & (word < HELD)[None, :])


@gluon.jit
def _copy_scales(buffer, scales, tile, BLOCKS: gl.constexpr, HELD: gl.constexpr):
    """Start copying a tile of block scales, HELD a row; other ones become zero."""
    layout: gl.constexpr = scale_copy_layout(BLOCKS)
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    word = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    at = scales + tile * (8 * HELD) + (block * 8 + pair * 2 + word)
    if HELD == BLOCKS:
        _start_copy(buffer, at)
    else:
        _start_copy(buffer, at, mask=block < HELD)


@gluon.jit
def _copy_tile(
    key, key_scales, value, value_scales, buffer, key_codes, key_block_scale, value_codes, value_block_scale,
    tile, length,
    HEAD_DIM: gl.constexpr, HELD: gl.constexpr,
    K_WORDS: gl.constexpr, K_BLOCKS: gl.constexpr, V_WORDS: gl.constexpr, V_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Start copying one tile of K, V and their scales into buffer 0 or 1, as one group."""
    _copy_rows(key.index(buffer), key_codes, tile, length, K_WORDS, K_WORDS * HELD // HEAD_DIM)
    _copy_rows(value.index(buffer), value_codes, tile, length, V_WORDS, V_WORDS * HELD // HEAD_DIM)
    if K_BLOCKS:
        _copy_scales(key_scales.index(buffer), key_block_scale, tile, K_BLOCKS, K_BLOCKS * HELD // HEAD_DIM)
    if V_BLOCKS:
        _copy_scales(value_scales.index(buffer), value_block_scale, tile, V_BLOCKS, V_BLOCKS * HELD // HEAD_DIM)
    async_copy.commit_group()


@gluon.jit
def _load_query(
    query, rows_used, row0, stride_head, stride_token,
    HEAD_DIM: gl.constexpr, HELD: gl.constexpr, COLUMNS: gl.constexpr, QUERY_LENGTH: gl.constexpr,
    WORDS: gl.constexpr, CODEC: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The query rows of this program as B operand, and [COLUMNS] fp32 powers of two that multiply their scores back."""
    layout: gl.constexpr = query_layout(WORDS, HEAD_DIM, COLUMNS)
    row = row0 + gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    start = (row // QUERY_LENGTH) * stride_head + (row % QUERY_LENGTH) * stride_token
    x = gl.load(
        query + start[:, None] + dim[None, :], mask=(row < rows_used)[:, None] & (dim < HELD)[None, :], other=0.0
    )
    if WIDE:
        x = x.to(gl.bfloat16)
        power = gl.full([COLUMNS], 1.0, gl.float32, gl.SliceLayout(1, layout))
    else:
        x = x.to(gl.float32)
        bits = gl.max(gl.abs(x), axis=1).to(gl.int32, bitcast=True) & 0x7F800000
        bits = gl.minimum(gl.maximum(bits, 0x00800000), 0x7E800000)
        power = bits.to(gl.float32, bitcast=True)
        x = (x * (0x7F000000 - bits).to(gl.float32, bitcast=True)[:, None]).to(gl.float16)
    return query_operand(x, WORDS, CODEC), gl.convert_layout(power, gl.SliceLayout(0, ACCUMULATOR))


@gluon.jit
def _store_part(
    partial, statistics, part, output, maximum, total, rows, row0,
    HEAD_DIM: gl.constexpr, CODEC: gl.constexpr,
):  # fmt: skip
    """Store what this program summed: [rows, HEAD_DIM] output, and its maximum and total per row."""
    COLUMNS: gl.constexpr = output.shape[1]
    if CODEC == "e2m1":  # word, byte bits 1 and 0, nibble; r; column
        x = gl.permute(gl.reshape(output, [HEAD_DIM // 64, 2, 2, 2, 8, COLUMNS]), [5, 4, 0, 1, 2, 3])
    else:  # word, byte bits 1 and 0; r; column
        x = gl.permute(gl.reshape(output, [HEAD_DIM // 32, 2, 2, 8, COLUMNS]), [4, 3, 0, 1, 2])
    layout: gl.constexpr = output_layout(HEAD_DIM, COLUMNS)
    x = gl.convert_layout(gl.reshape(x, [COLUMNS, HEAD_DIM]), layout, assert_trivial=True)
    base = part.to(gl.int64) * rows + row0
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    at = partial + base * HEAD_DIM + row[:, None] * HEAD_DIM + dim[None, :]
    gl.store(at, x, mask=(row0 + row < rows)[:, None])
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, ACCUMULATOR))
    total = gl.convert_layout(gl.sum(total, axis=0), gl.SliceLayout(0, ACCUMULATOR), assert_trivial=True)
    gl.store(statistics + (base + column) * 2, maximum, mask=row0 + column < rows)
    gl.store(statistics + (base + column) * 2 + 1, total, mask=row0 + column < rows)


@remembered
@gluon.jit(do_not_specialize=["splits"])
def decode_kernel(
    query, key_codes, key_block_scale, key_scale, value_codes, value_block_scale, kept_slots, positions, mask,
    partial, statistics, softmax_scale, softcap, max_len, splits, kv_heads,
    query_stride_batch, query_stride_head, query_stride_token,
    mask_stride_batch, mask_stride_head, mask_stride_token, mask_stride_slot,
    HEAD_DIM: gl.constexpr, HELD: gl.constexpr,
    GROUP: gl.constexpr, QUERY_LENGTH: gl.constexpr, COLUMNS: gl.constexpr,
    K_CODEC: gl.constexpr, K_SCALE: gl.constexpr, K_BLOCK: gl.constexpr, K_TENSOR_SCALE: gl.constexpr,
    V_CODEC: gl.constexpr, V_SCALE: gl.constexpr, V_BLOCK: gl.constexpr,
    MASK: gl.constexpr, CAUSAL: gl.constexpr, KEEP: gl.constexpr, ROTATED: gl.constexpr, RESERVED: gl.constexpr,
):  # fmt: skip
    """One warp: one KV head, one share of the slots, one tile of query rows. See :func:`attention` for the tensors.

    ``MASK`` is "none", "row" (one row of the mask for all columns) or "columns", or one of the latter two with "added"
    before it, where the mask is added to the scores. The cache has HELD dimensions; those up to HEAD_DIM, a power of
    two, are taken to be zero. The grid is (batch * kv_heads, splits, tiles of query rows).
    """
    if not ROTATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    K_WORDS: gl.constexpr = HEAD_DIM // 8 if K_CODEC == "e2m1" else HEAD_DIM // 4
    V_WORDS: gl.constexpr = HEAD_DIM // 8 if V_CODEC == "e2m1" else HEAD_DIM // 4
    K_BLOCKS: gl.constexpr = HEAD_DIM // K_BLOCK if K_BLOCK else 0
    V_BLOCKS: gl.constexpr = HEAD_DIM // V_BLOCK if V_BLOCK else 0
    K_WIDE: gl.constexpr = K_SCALE == "e8m0"
    ROWS: gl.constexpr = GROUP * QUERY_LENGTH
    IS_ADDED: gl.constexpr = MASK == "added row" or MASK == "added columns"
    ONE_ROW: gl.constexpr = MASK == "row" or MASK == "added row"
    head = gl.program_id(0)
    split = gl.program_id(1)
    row0 = gl.program_id(2) * COLUMNS
    if ONE_ROW:  # shares of one sequence, which may be longer than others, go to different schedulers
        head = (head + split * (gl.num_programs(0) * 5 // 8)) % gl.num_programs(0)

    length = (gl.load(positions + (QUERY_LENGTH - 1)) + 1).to(gl.int32)
    tiles = (length + 31) // 32
    used = gl.minimum(splits, tiles)
    mask_row = positions if MASK == "none" else mask + (head // kv_heads).to(gl.int64) * mask_stride_batch
    hidden = 0  # tiles at the start that are not read, such as those of left padding; each share keeps a tile
    if ONE_ROW:
        hidden = gl.minimum(leading_hidden_tiles(mask_row, mask_stride_slot, length, max_len), tiles - used)
    share = (tiles - hidden) // gl.maximum(used, 1)
    larger = tiles - hidden - share * used  # shares that have a tile more: the first ones
    start = hidden + split * share + gl.minimum(split, larger)
    stop = start + share + gl.where(split < larger, 1, 0)
    if (split < used) & (length <= max_len):
        # The first copies start before all else but that search.
        tile = start + (head * 5 + split * 11) % (stop - start)
        row = head.to(gl.int64) * max_len
        scale_tile = head.to(gl.int64) * ((max_len + 31) // 32)
        k_codes = key_codes.to(gl.pointer_type(gl.int32)) + row * (K_WORDS * HELD // HEAD_DIM)
        v_codes = value_codes.to(gl.pointer_type(gl.int32)) + row * (V_WORDS * HELD // HEAD_DIM)
        k_block_scale = key_block_scale.to(gl.pointer_type(gl.int32)) + scale_tile * (8 * K_BLOCKS * HELD // HEAD_DIM)
        v_block_scale = value_block_scale.to(gl.pointer_type(gl.int32)) + scale_tile * (8 * V_BLOCKS * HELD // HEAD_DIM)
        key = gl.allocate_shared_memory(gl.int32, [2, 32, K_WORDS], key_shared(K_WORDS))
        value = gl.allocate_shared_memory(gl.int32, [2, 32, V_WORDS], value_shared(V_WORDS))
        key_scales = key
        value_scales = value
        if K_BLOCKS:
            key_scales = gl.allocate_shared_memory(gl.int32, [2, K_BLOCKS, 4, 2], scale_shared())
        if V_BLOCKS:
            value_scales = gl.allocate_shared_memory(gl.int32, [2, V_BLOCKS, 4, 2], scale_shared())
        if RESERVED:  # kilobytes that nothing is read from: they leave room for fewer programs
            reserved = gl.allocate_shared_memory(gl.int32, [RESERVED, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        _copy_tile(
            key, key_scales, value, value_scales, 0, k_codes, k_block_scale, v_codes, v_block_scale,
            tile, length, HEAD_DIM, HELD, K_WORDS, K_BLOCKS, V_WORDS, V_BLOCKS,
        )  # fmt: skip

        if ROTATED:  # by a kernel that this one was launched behind, and that the next one may read the result of too
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        batch = head // kv_heads
        kv_head = head % kv_heads
        q, factor = _load_query(
            query + batch.to(gl.int64) * query_stride_batch + (kv_head * GROUP).to(gl.int64) * query_stride_head,
            ROWS, row0, query_stride_head, query_stride_token,
            HEAD_DIM, HELD, COLUMNS, QUERY_LENGTH, K_WORDS, K_CODEC, K_WIDE,
        )  # fmt: skip
        if K_CODEC == "e2m1" and not K_WIDE:
            softmax_scale = softmax_scale * UNPACKED
        if K_TENSOR_SCALE:
            softmax_scale = softmax_scale * gl.load(key_scale + kv_head)
        factor = gl.maximum(factor * (softmax_scale * LOG2E), 1e-37)  # never 0: it multiplies -inf
        inner = factor
        if softcap is not None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), of scores over the cap
            inner = factor * (2.0 / softcap)
            factor = gl.full([COLUMNS], 1.0, gl.float32, gl.SliceLayout(0, ACCUMULATOR)) * (softcap * LOG2E)
        outer = factor
        if IS_ADDED:  # then scores are brought to powers of two before the mask, not with the maximum
            factor = gl.full([COLUMNS], 1.0, gl.float32, gl.SliceLayout(0, ACCUMULATOR))

        # Column j is query row row0 + j: query head row // QUERY_LENGTH of the group, token row % QUERY_LENGTH.
        query_row = gl.minimum(row0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, ACCUMULATOR)), ROWS - 1)
        limit = gl.full([COLUMNS], 0, gl.int32, gl.SliceLayout(0, ACCUMULATOR)) + length
        open_until = length  # every column sees the slots before this one, as far as the mask lets it
        if CAUSAL:
            limit = (gl.load(positions + query_row % QUERY_LENGTH) + 1).to(gl.int32)
            open_until = (gl.load(positions) + 1).to(gl.int32)
        mask_column = gl.full([COLUMNS], 0, gl.int64, gl.SliceLayout(0, ACCUMULATOR))
        if MASK == "columns" or MASK == "added columns":
            mask_column += (kv_head * GROUP + query_row // QUERY_LENGTH).to(gl.int64) * mask_stride_head
            mask_column += (query_row % QUERY_LENGTH).to(gl.int64) * mask_stride_token
        slot = slot_of(gl.arange(0, 32, gl.SliceLayout(1, ACCUMULATOR)))
        lane_slot = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        seen = lane_slot  # of the mask of this tile, one slot a lane; loaded a tile ahead
        if MASK == "row":
            seen = load_mask(mask_row, mask_stride_slot, tile * 32 + lane_slot, length)
        added = slot
        if MASK == "added row":
            added = load_added(mask_row, mask_stride_slot, tile * 32 + slot, length)

        kept_tiles: gl.constexpr = (KEEP + 31) // 32  # those with the first slots; and, here, those with the newest
        kept_low = 0
        kept_high = 0
        if KEEP:
            kept_low, kept_high = newest_tiles(kept_slots, KEEP)

        # Scales of rows are loaded a tile ahead too. Half of one, times a probability, is within fp16.
        key_row_scales = key_block_scale + scale_tile * 32
        value_row_scales = value_block_scale + scale_tile * 32
        key_row_scale = slot
        value_row_scale = slot
        if K_CODEC == "int8":
            key_row_scale = load_row_scales(key_row_scales, tile, slot, length)
        if V_CODEC == "int8":
            value_row_scale = load_row_scales(value_row_scales, tile, slot, length) * 0.5

        output = gl.zeros([HEAD_DIM, COLUMNS], gl.float32, ACCUMULATOR)
        maximum = gl.full([COLUMNS], _NOTHING_SEEN, gl.float32, gl.SliceLayout(0, ACCUMULATOR))
        total = lane_sum(gl.zeros([32, COLUMNS], gl.float32, ACCUMULATOR))
        buffer = 0
        for step in range(start, stop):
            following = gl.where(tile + 1 == stop, start, tile + 1)
            async_copy.wait_group(0)
            if step + 1 < stop:
                _copy_tile(
                    key, key_scales, value, value_scales, 1 - buffer, k_codes, k_block_scale, v_codes, v_block_scale,
                    following, length, HEAD_DIM, HELD, K_WORDS, K_BLOCKS, V_WORDS, V_BLOCKS,
                )  # fmt: skip
            scores = score_tile(
                key.index(buffer), key_scales.index(buffer), q, HEAD_DIM, K_CODEC, K_SCALE, K_WORDS, K_BLOCKS
            )
            if K_CODEC == "int8":
                scores = scores * key_row_scale[:, None]
                key_row_scale = load_row_scales(key_row_scales, following, slot, length)
            if softcap is not None:
                scores = 1.0 - 2.0 / (gl.exp2(scores * inner[None, :]) + 1.0)
            if IS_ADDED:
                scores = scores * outer[None, :]

            whole = (tile + 1) * 32 <= open_until
            if MASK == "row":
                whole = whole & (gl.min(seen, axis=0) > 0)
                seen = load_mask(mask_row, mask_stride_slot, following * 32 + lane_slot, length)
            elif MASK == "added row":
                scores += added[:, None]
                added = load_added(mask_row, mask_stride_slot, following * 32 + slot, length)
            elif MASK == "columns" or MASK == "added columns":
                whole = tile < 0  # never
            if KEEP:
                whole = whole & (tile >= kept_tiles) & ((tile < kept_low) | (tile > kept_high))
            if not whole:
                at = tile * 32 + slot
                visible = at[:, None] < limit[None, :]
                if KEEP:
                    visible = visible & is_not_kept(at, kept_slots, KEEP)[:, None]
                if MASK == "row":
                    visible = visible & (load_mask(mask_row, mask_stride_slot, at, length) > 0)[:, None]
                elif MASK == "columns":
                    cell = mask_row + at.to(gl.int64)[:, None] * mask_stride_slot + mask_column[None, :]
                    visible = visible & (gl.load(cell, mask=visible, other=0) != 0)
                elif MASK == "added columns":
                    cell = mask_row + at.to(gl.int64)[:, None] * mask_stride_slot + mask_column[None, :]
                    scores += gl.load(cell, mask=visible, other=0).to(gl.float32) * LOG2E
                scores = gl.where(visible, scores, float("-inf"))

            output, maximum, total = move_maximum(scores, factor, output, maximum, total)
            p = gl.exp2(scores * factor[None, :] - maximum[None, :])
            total += lane_sum(p)
            if V_CODEC == "int8":
                p = p * value_row_scale[:, None]
                value_row_scale = load_row_scales(value_row_scales, following, slot, length) * 0.5
            output = weigh_tile(
                value.index(buffer), value_scales.index(buffer), p, output, length - tile * 32,
                HEAD_DIM, V_CODEC, V_SCALE, V_WORDS, V_BLOCKS,
            )  # fmt: skip
            tile = following
            buffer = 1 - buffer
        _store_part(partial, statistics, head * splits + split, output, maximum, total, ROWS, row0, HEAD_DIM, V_CODEC)
        if RESERVED:
            if length < 0:  # never, but that is not for the compiler to know
                reserved.index(0).store(gl.zeros([256], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    else:
        if ROTATED:  # no program ends before the rotation has
            tl.extra.cuda.gdc_wait()


# Adding the parts up --------------------------------------------------------------------------------------------------


@remembered
@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    partial, statistics, out, value_scale, value_centre, sinks, positions, max_len, splits, kv_heads, factor,
    query, key_kept, value_kept, kept_slots, mask, softmax_scale,
    query_stride_batch, query_stride_head, query_stride_token,
    mask_stride_batch, mask_stride_head, mask_stride_token, mask_stride_slot,
    QUERY_LENGTH: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HELD: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, BLOCK_DIM: tl.constexpr, TENSOR_SCALE: tl.constexpr,
    CAUSAL: tl.constexpr, KEEP: tl.constexpr, KEEP_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_DIM values of one query row, summed over the splits that had slots.

    ``out = factor * value_scale * sum_s(2^(m_s - m) partial_s) / (sum_s(2^(m_s - m) total_s) + 2^(sink - m))`` with
    ``m`` the largest of the ``m_s``, and the sink in powers of two, to which ``value_centre`` is added; NaN if the
    length does not fit the cache, 0 if no slot was visible. The KEEP slots that are kept in bf16 are one more split,
    worked out here from what is kept of them (``query`` and what follows).
    """
    head = tl.program_id(0) // ROWS
    row = tl.program_id(0) % ROWS
    length = (tl.load(positions + (QUERY_LENGTH - 1)) + 1).to(tl.int32)
    dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    kept_max = -1e30
    kept_total = 0.0
    kept_sum = tl.zeros([BLOCK_DIM], tl.float32)
    if KEEP:
        token = row % QUERY_LENGTH
        batch = (head // kv_heads).to(tl.int64)
        query_head = head % kv_heads * (ROWS // QUERY_LENGTH) + row // QUERY_LENGTH
        every = tl.arange(0, HEAD_DIM)
        start = batch * query_stride_batch + query_head * query_stride_head + token * query_stride_token
        q = tl.load(query + start + every, mask=every < HELD, other=0.0).to(tl.float32) * (
            softmax_scale * 1.4426950408889634
        )
        limit = (tl.load(positions + token) + 1).to(tl.int32) if CAUSAL else length
        for first in range(0, KEEP, KEEP_AT_ONCE):
            place = first + tl.arange(0, KEEP_AT_ONCE)
            slot = tl.load(kept_slots + place, mask=place < KEEP, other=-1)
            visible = (slot >= 0) & (slot < limit)
            if mask is not None:
                cell = mask + batch * mask_stride_batch + query_head * mask_stride_head + token * mask_stride_token
                visible &= tl.load(cell + slot.to(tl.int64) * mask_stride_slot, mask=visible, other=0) != 0
            kept = ((head.to(tl.int64) * KEEP + place) * HELD)[:, None]
            is_held = visible[:, None] & (every < HELD)[None, :]
            k = tl.load(key_kept + kept + every[None, :], mask=is_held, other=0.0).to(tl.float32)
            v = tl.load(value_kept + kept + dim[None, :], mask=visible[:, None], other=0.0).to(tl.float32)
            score = tl.where(visible, tl.sum(q[None, :] * k, axis=1), float("-inf"))
            raised = tl.maximum(kept_max, tl.max(score, axis=0))
            shrink = tl.exp2(kept_max - raised)
            p = tl.exp2(score - raised)
            kept_sum = kept_sum * shrink + tl.sum(p[:, None] * v, axis=0)
            kept_total = kept_total * shrink + tl.sum(p, axis=0)
            kept_max = raised
    tl.extra.cuda.gdc_wait()  # for what the decode kernel writes; it let this one start when all older was there
    used = tl.minimum(splits, (length + 31) // 32)
    if length > max_len:
        used = 0
    split = tl.arange(0, BLOCK_SPLITS)
    at = (head.to(tl.int64) * splits + split) * ROWS + row
    parts = tl.load(partial + at[:, None] * HEAD_DIM + dim[None, :], mask=(split < used)[:, None], other=0.0)
    maximum = tl.load(statistics + at * 2, mask=split < used, other=-1e30)
    total = tl.load(statistics + at * 2 + 1, mask=split < used, other=0.0)
    largest = tl.max(maximum, axis=0)
    if KEEP:
        largest = tl.maximum(largest, kept_max)
    weight = tl.exp2(maximum - largest)
    total = tl.sum(weight * total, axis=0)
    if sinks is not None:
        query_head = (head % kv_heads) * (ROWS // QUERY_LENGTH) + row // QUERY_LENGTH
        total += tl.exp2(tl.load(sinks + query_head).to(tl.float32) * 1.4426950408889634 - largest)
    result = tl.sum(weight[:, None] * parts, axis=0)
    if TENSOR_SCALE:
        factor = factor * tl.load(value_scale + head % kv_heads)
    if KEEP:
        kept_weight = tl.exp2(kept_max - largest)
        total += kept_weight * kept_total
        result += (kept_weight / factor) * kept_sum
    result = result * (factor / total)
    if value_centre is not None:
        result += tl.load(value_centre + head % kv_heads * HELD + dim)
    result = tl.where(total == 0.0, 0.0, result)
    result = tl.where(length > max_len, float("nan"), result)
    tl.store(out + tl.program_id(0).to(tl.int64) * HELD + dim, result.to(out.dtype.element_ty))
