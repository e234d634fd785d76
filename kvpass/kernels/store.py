"""Quantize new K and V into the cache: one launch for both, whatever their formats."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kvpass.formats import KVBuffers, KVFormat, get_format
from kvpass.kernels.codecs import (
    check_buffers,
    constexprs,
    early_launch,
    load_groups,
    neighbours,
    on_device,
    padded_width,
    rotate,
    rotation_constexprs,
    round_to,
    scale_slot,
    to_float32,
)
from kvpass.kernels.encode import choose_block_scale, encode_e2m1, encode_float8, encode_int8
from kvpass.kernels.launch import remembered

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _source(row, batch, rows, kv_heads, length, BLOCK_ROWS: tl.constexpr, ONE_HEAD: tl.constexpr):
    """Batch, head and token of each ``row`` of the program's ``BLOCK_ROWS``, and whether there is such a token."""
    if ONE_HEAD:
        head = tl.program_id(1)
        token = tl.program_id(0) * BLOCK_ROWS + row
        return batch, head, token, token < length
    else:
        row += tl.program_id(0) * BLOCK_ROWS
        batch_head = row // length
        return batch_head // kv_heads, batch_head % kv_heads, row % length, row < rows


@triton.jit
def _slots(positions, token, is_row, max_len):
    """The slot of each ``token``, and whether it is stored."""
    slot = tl.load(positions + token, mask=is_row, other=-1)
    return slot, (slot >= 0) & (slot < max_len)


@triton.jit
def _store_rows(
    batch,
    x,
    batch_stride,
    head_stride,
    token_stride,
    positions,
    codes,
    block_scale,
    scale,
    centre,
    kept,
    kept_slots,
    rows,
    kv_heads,
    length,
    max_len,
    HEAD_DIM: tl.constexpr,
    CODEC: tl.constexpr,
    BLOCK_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_RULE: tl.constexpr,
    SEARCH: tl.constexpr,
    ROTATION: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    KEEP_FIRST: tl.constexpr,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ONE_HEAD: tl.constexpr,
):
    """Quantize ``BLOCK_ROWS`` of the ``batch * kv_heads * length`` rows of one of K and V: if ``ONE_HEAD``, which saves
    divisions, all of one head and of ``batch``. Tiles are ``[groups, GROUP]``, with ``GROUP`` values to a thread."""
    ROW_GROUPS: tl.constexpr = VALUES // GROUP
    GROUPS: tl.constexpr = BLOCK_ROWS * ROW_GROUPS
    group = tl.arange(0, GROUPS)
    of_batch, head, token, is_row = _source(group // ROW_GROUPS, batch, rows, kv_heads, length, BLOCK_ROWS, ONE_HEAD)
    slot, is_inside = _slots(positions, token, is_row, max_len)
    column = group % ROW_GROUPS * GROUP
    x_row = of_batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
    raw = load_groups(x + x_row + column, column, is_row, HEAD_DIM, GROUP)
    value = to_float32(raw)
    if centre is not None:
        value -= load_groups(centre + (head * HEAD_DIM + column), column, is_row, HEAD_DIM, GROUP)
    if ROTATION > 1:
        value = rotate(value, ROTATION, NORM, GROUP)
    batch_head = tl.zeros([GROUPS], tl.int64) + (of_batch * kv_heads + head)
    value_column = column[:, None] + tl.arange(0, GROUP)[None, :]
    if kept is not None:
        kept_row = slot.to(tl.int32)
        is_kept = kept_row < KEEP_FIRST
        if KEEP > KEEP_FIRST:  # the rules of kvpass.reference.kept_rows
            last = tl.load(positions + length - 1)
            last = tl.minimum(tl.maximum(last, KEEP_FIRST - 1), max_len - 1).to(tl.int32)
            age = (last - kept_row + max_len - KEEP_FIRST) % (max_len - KEEP_FIRST)
            kept_row = tl.where(is_kept, kept_row, KEEP_FIRST + (kept_row - KEEP_FIRST) % (KEEP - KEEP_FIRST))
            is_kept |= age < KEEP - KEEP_FIRST
        is_kept &= is_inside
        writes_slot = (column == 0) & (batch_head == 0)
        if KEEP > KEEP_FIRST:
            if length > 1:  # a single token takes its slot's row
                # Where slots are consecutive, a row that is not taken by its slot's new token is taken by a later one.
                # Elsewhere it may hold the old token: then it is of no slot any more.
                is_lost = (is_kept == 0) & is_inside & writes_slot
                held = tl.load(kept_slots + kept_row, mask=is_lost, other=-1)
                is_lost &= held == slot
                if tl.max(is_lost.to(tl.int32), 0) > 0:
                    nothing = tl.full([GROUPS], -1, tl.int32)
                    tl.atomic_cas(kept_slots + tl.where(is_lost, kept_row, 0), tl.where(is_lost, held, -2), nothing)
        at = kept + ((batch_head * KEEP + kept_row) * HEAD_DIM)[:, None] + value_column
        tl.store(at, round_to(value, tl.bfloat16), mask=is_kept[:, None] & (value_column < HEAD_DIM))
        tl.store(kept_slots + kept_row, slot.to(tl.int32), mask=is_kept & writes_slot)

    ROW: tl.constexpr = HEAD_DIM // 2 if CODEC == "e2m1" else HEAD_DIM
    out = codes + (batch_head * max_len + slot) * ROW
    is_value = is_inside[:, None] & (value_column < HEAD_DIM)
    if CODEC == "bf16":
        raw = raw if raw.dtype == tl.bfloat16 else round_to(value, tl.bfloat16)
        tl.store(out[:, None] + value_column, raw, mask=is_value)
    elif CODEC == "e2m1":
        BLOCKS: tl.constexpr = HEAD_DIM // BLOCK
        ROW_BLOCKS: tl.constexpr = VALUES // BLOCK
        TILE: tl.constexpr = BLOCK_ROWS * ROW_BLOCKS
        even, odd = tl.split(value.reshape(TILE, BLOCK // 2, 2))
        block = tl.arange(0, TILE)
        of_batch, head, token, is_row = _source(
            block // ROW_BLOCKS, batch, rows, kv_heads, length, BLOCK_ROWS, ONE_HEAD
        )
        factor = tl.full([TILE], 1.0, tl.float32)
        if scale is not None:
            factor *= tl.load(scale + head)
        scale_bits, divisor = choose_block_scale(even, odd, factor, BLOCK_SCALE, SCALE_RULE, SEARCH)
        packed = encode_e2m1(even, odd, divisor, BLOCK_SCALE == "e4m3" or SCALE_RULE == "floor")
        code_column = (column // 2)[:, None] + tl.arange(0, GROUP // 2)[None, :]
        is_code = (is_inside & (column < HEAD_DIM))[:, None]
        tl.store(out[:, None] + code_column, packed.reshape(GROUPS, GROUP // 2).to(tl.uint8), mask=is_code)

        slot, is_inside = _slots(positions, token, is_row, max_len)
        tile = (of_batch * kv_heads + head).to(tl.int64) * tl.cdiv(max_len, 32) + slot // 32
        block = block % ROW_BLOCKS
        address = block_scale + (tile * (BLOCKS * 32) + scale_slot(slot) + block * 32)
        tl.store(address, scale_bits, mask=is_inside & (block < BLOCKS))
    elif CODEC == "int8":
        of_batch, head, token, is_row = _source(
            tl.arange(0, BLOCK_ROWS), batch, rows, kv_heads, length, BLOCK_ROWS, ONE_HEAD
        )
        factor = tl.full([BLOCK_ROWS], 1.0, tl.float32)
        if scale is not None:
            factor *= tl.load(scale + head)
        row_codes, row_bits = encode_int8(value.reshape(BLOCK_ROWS, VALUES), factor)
        tl.store(out[:, None] + value_column, row_codes.reshape(GROUPS, GROUP), mask=is_value)
        slot, is_inside = _slots(positions, token, is_row, max_len)
        tile = (of_batch * kv_heads + head).to(tl.int64) * tl.cdiv(max_len, 32) + slot // 32
        tl.store(block_scale + (tile * 32 + scale_slot(slot)), row_bits, mask=is_inside)
    else:
        if scale is not None:
            factor = tl.full([GROUPS], 1.0, tl.float32) * tl.load(scale + head)
            value = tl.math.div_rn(value, tl.broadcast_to(factor[:, None], value.shape))
        tl.store(out[:, None] + value_column, encode_float8(value, CODEC), mask=is_value)


@remembered
@triton.jit(do_not_specialize=["rows", "length", "max_len"])
def _store_kernel(
    key,
    key_batch_stride,
    key_head_stride,
    key_token_stride,
    value,
    value_batch_stride,
    value_head_stride,
    value_token_stride,
    positions,
    key_codes,
    key_block_scale,
    key_scale,
    key_centre,
    key_kept,
    key_kept_slots,
    value_codes,
    value_block_scale,
    value_scale,
    value_centre,
    value_kept,
    value_kept_slots,
    rows,
    kv_heads,
    length,
    max_len,
    KEY_DIM: tl.constexpr,
    KEY_CODEC: tl.constexpr,
    KEY_BLOCK_SCALE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_SCALE_RULE: tl.constexpr,
    KEY_SEARCH: tl.constexpr,
    KEY_ROTATION: tl.constexpr,
    KEY_NORM: tl.constexpr,
    KEY_KEEP: tl.constexpr,
    KEY_VALUES: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_CODEC: tl.constexpr,
    VALUE_BLOCK_SCALE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_SCALE_RULE: tl.constexpr,
    VALUE_SEARCH: tl.constexpr,
    VALUE_ROTATION: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    VALUE_KEEP: tl.constexpr,
    VALUE_VALUES: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    KEEP_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ONE_HEAD: tl.constexpr,
    LAUNCHES_EARLY: tl.constexpr,
):
    if LAUNCHES_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    batches = tl.num_programs(2) // 2
    if tl.program_id(2) < batches:
        _store_rows(
            tl.program_id(2), key, key_batch_stride, key_head_stride, key_token_stride,
            positions, key_codes, key_block_scale, key_scale, key_centre, key_kept, key_kept_slots,
            rows, kv_heads, length, max_len,
            KEY_DIM, KEY_CODEC, KEY_BLOCK_SCALE, KEY_BLOCK, KEY_SCALE_RULE, KEY_SEARCH, KEY_ROTATION, KEY_NORM,
            KEY_KEEP, KEEP_FIRST, KEY_VALUES, KEY_GROUP, BLOCK_ROWS, ONE_HEAD,
        )  # fmt: skip
    else:
        _store_rows(
            tl.program_id(2) - batches, value, value_batch_stride, value_head_stride, value_token_stride,
            positions, value_codes, value_block_scale, value_scale, value_centre, value_kept, value_kept_slots,
            rows, kv_heads, length, max_len,
            VALUE_DIM, VALUE_CODEC, VALUE_BLOCK_SCALE, VALUE_BLOCK, VALUE_SCALE_RULE, VALUE_SEARCH, VALUE_ROTATION,
            VALUE_NORM, VALUE_KEEP, KEEP_FIRST, VALUE_VALUES, VALUE_GROUP, BLOCK_ROWS, ONE_HEAD,
        )  # fmt: skip


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    key_codes: torch.Tensor,
    key_block_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    key_centre: torch.Tensor | None,
    key_kept: torch.Tensor | None,
    key_kept_slots: torch.Tensor | None,
    value_codes: torch.Tensor,
    value_block_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    value_centre: torch.Tensor | None,
    value_kept: torch.Tensor | None,
    value_kept_slots: torch.Tensor | None,
    key_format: str,
    value_format: str,
    keep_first: int = 0,
) -> None:
    """Quantize K and V into the slots ``positions``.

    Args:
        key, value: ``[batch, kv_heads, length, head_dim]`` bf16, fp16 or fp32, any strides; ``head_dim`` may differ.
        positions: ``[length]`` int64, no two alike. A token whose slot is outside the cache is not stored.
        key_codes ... value_kept_slots: The buffers, contiguous (:class:`kvpass.formats.KVBuffers`).
        key_format, value_format: Names of registered formats.
        keep_first: Slots below it are kept in bf16, and the newest in the rows that this leaves
            (:func:`kvpass.reference.kept_rows`).

    Raises:
        ValueError: A dtype or shape that does not fit the buffers, or buffers that the format does not have.
    """
    key_row, value_row = get_format(key_format), get_format(value_format)
    _check("key", key, key_row, positions, key_codes)
    _check("value", value, value_row, positions, value_codes)
    key_buffers = KVBuffers(key_codes, key_block_scale, key_scale, key_centre, key_kept, key_kept_slots)
    check_buffers("key", key_row, key_buffers)
    value_buffers = KVBuffers(value_codes, value_block_scale, value_scale, value_centre, value_kept, value_kept_slots)
    check_buffers("value", value_row, value_buffers)
    batch, kv_heads, length, key_dim = key.shape
    if value.shape[:3] != key.shape[:3] or value_codes.shape[2] != key_codes.shape[2]:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)}, in caches of {key_codes.shape[2]} and "
            f"{value_codes.shape[2]} slots, may differ in head_dim only"
        )
    rows = batch * kv_heads * length
    if rows == 0:
        return
    key = key if key.stride(3) == 1 else key.contiguous()
    value = value if value.stride(3) == 1 else value.contiguous()
    keep = (0 if key_kept is None else key_kept.shape[2]), (0 if value_kept is None else value_kept.shape[2])
    grid, constants = _launch(
        key_format, value_format, key_dim, value.shape[3], *keep, keep_first, batch, kv_heads, length
    )
    with on_device(key):
        _store_kernel[grid](
            key,
            *key.stride()[:3],
            value,
            *value.stride()[:3],
            positions,
            key_codes,
            key_block_scale,
            key_scale,
            key_centre,
            key_kept,
            key_kept_slots,
            value_codes,
            value_block_scale,
            value_scale,
            value_centre,
            value_kept,
            value_kept_slots,
            rows,
            kv_heads,
            length,
            key_codes.shape[2],
            **constants,
            **early_launch(key.device),
            enable_fp_fusion=False,  # every rounding as in the reference
        )


@functools.lru_cache(maxsize=256)
def _launch(
    key_format: str,
    value_format: str,
    key_dim: int,
    value_dim: int,
    key_keep: int,
    value_keep: int,
    keep_first: int,
    batch: int,
    kv_heads: int,
    length: int,
) -> tuple[tuple[int, int, int], dict[str, object]]:
    """The grid, and constexprs and options. All layers have the same: to work them out takes as long as to launch."""
    key, value = get_format(key_format), get_format(value_format)
    key_values, value_values = _padded(key, key_dim), _padded(value, value_dim)
    rows = batch * kv_heads * length
    # Few rows: spread them, a warp each, the launch is all latency. Many: sixteen values a thread, whole blocks of most
    # formats, whose scales are then worked out once.
    num_warps = 1 if rows < 1024 else 4
    block_rows = 1 if num_warps == 1 else max(1, 2048 // max(key_values, value_values))
    one_head = length >= block_rows and max(2 * batch, kv_heads) < 2**16
    grid = (triton.cdiv(length, block_rows), kv_heads, 2 * batch) if one_head else (triton.cdiv(rows, block_rows), 1, 2)
    return grid, {
        "KEY_DIM": key_dim,
        "KEY_VALUES": key_values,
        "KEY_GROUP": _group(key, key_values, block_rows, num_warps),
        "KEY_KEEP": key_keep,
        **_constexprs(key, key_dim, "KEY_"),
        "VALUE_DIM": value_dim,
        "VALUE_VALUES": value_values,
        "VALUE_GROUP": _group(value, value_values, block_rows, num_warps),
        "VALUE_KEEP": value_keep,
        **_constexprs(value, value_dim, "VALUE_"),
        "KEEP_FIRST": min(keep_first, max(key_keep, value_keep)),
        "BLOCK_ROWS": block_rows,
        "ONE_HEAD": one_head,
        "num_warps": num_warps,
    }


def _padded(fmt: KVFormat, head_dim: int) -> int:
    return fmt.head_dim(padded_width(fmt, head_dim))


def _group(fmt: KVFormat, values: int, block_rows: int, num_warps: int) -> int:
    """Neighbours that a thread gets, of a tile of ``block_rows`` rows of ``values``; at most 16 bytes to store."""
    return neighbours(block_rows * values, num_warps, most=8 if fmt.codec == "bf16" else 16)


def _constexprs(fmt: KVFormat, head_dim: int, prefix: str) -> dict[str, object]:
    return {
        **constexprs(fmt, prefix),
        **rotation_constexprs(fmt, head_dim, prefix),
        f"{prefix}SCALE_RULE": fmt.scale_rule,
        f"{prefix}SEARCH": fmt.search,
    }


def _check(what: str, x: torch.Tensor, fmt: KVFormat, positions: torch.Tensor, codes: torch.Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise ValueError(f"{what} is {x.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    batch, kv_heads, _, width = codes.shape
    expected = (batch, kv_heads, positions.shape[0], fmt.head_dim(width))
    if x.shape != expected:
        raise ValueError(
            f"{what} is {tuple(x.shape)}; its {fmt.name!r} buffer and {positions.shape[0]} positions hold {expected}"
        )
