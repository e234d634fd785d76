"""Quantize new K and V into the cache: one launch for both, whatever their formats."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpass.formats import KVFormat, get_format
from kvpass.kernels.codecs import (
    check_buffers,
    constexprs,
    encode_block_scale,
    encode_e2m1,
    encode_float8,
    on_device,
    padded_width,
    round_to,
    scale_slot,
    to_float32,
)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _store_rows(
    x,
    batch_stride,
    head_stride,
    token_stride,
    positions,
    codes,
    block_scale,
    scale,
    rows,
    kv_heads,
    length,
    max_len,
    HEAD_DIM: tl.constexpr,
    CODEC: tl.constexpr,
    BLOCK_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Quantize ``BLOCK_ROWS`` of the ``batch * kv_heads * length`` rows of one of K and V."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = row % length
    batch_head = (row // length).to(tl.int64)
    head = batch_head % kv_heads
    slot = tl.load(positions + token, mask=row < rows, other=-1).to(tl.int64)
    is_stored = ((slot >= 0) & (slot < max_len))[:, None]
    x_row = (batch_head // kv_heads) * batch_stride + head * head_stride + token.to(tl.int64) * token_stride

    VALUES: tl.constexpr = 2 * WIDTH if CODEC == "e2m1" else WIDTH
    column = tl.arange(0, VALUES)[None, :]
    raw = tl.load(x + x_row[:, None] + column, mask=is_stored & (column < HEAD_DIM), other=0)
    value = to_float32(raw)

    ROW: tl.constexpr = HEAD_DIM // 2 if CODEC == "e2m1" else HEAD_DIM
    code_column = tl.arange(0, WIDTH)[None, :]
    out = codes + (batch_head * max_len + slot)[:, None] * ROW + code_column
    is_code = is_stored & (code_column < ROW)
    if CODEC == "bf16":
        tl.store(out, raw if raw.dtype == tl.bfloat16 else round_to(value, tl.bfloat16), mask=is_code)
    elif CODEC == "e2m1":
        PER_SCALE: tl.constexpr = BLOCK // 2  # values of a block in each of the halves below
        BLOCKS: tl.constexpr = HEAD_DIM // BLOCK
        BLOCKS_PADDED: tl.constexpr = WIDTH // PER_SCALE
        even, odd = tl.split(value.reshape(BLOCK_ROWS, WIDTH, 2))
        even = even.reshape(BLOCK_ROWS, BLOCKS_PADDED, PER_SCALE)
        odd = odd.reshape(BLOCK_ROWS, BLOCKS_PADDED, PER_SCALE)
        # As integers, the bits of magnitudes sort like their values, and a NaN above all of them.
        magnitude = tl.maximum(
            even.to(tl.int32, bitcast=True) & 0x7FFFFFFF, odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        )
        amax = tl.max(magnitude, axis=2).to(tl.float32, bitcast=True)
        factor = tl.full([BLOCK_ROWS, BLOCKS_PADDED], 1.0, tl.float32)
        if scale is not None:
            factor *= tl.load(scale + head)[:, None]
        scale_bits, divisor = encode_block_scale(amax, factor, BLOCK_SCALE)

        is_zero = ((divisor == 0) | (amax != amax))[:, :, None]
        divisor = tl.broadcast_to(divisor[:, :, None], even.shape)
        TIES_TO_EVEN: tl.constexpr = BLOCK_SCALE == "e4m3"
        low = encode_e2m1(tl.where(is_zero, 0.0, tl.math.div_rn(even, divisor)), TIES_TO_EVEN)
        high = encode_e2m1(tl.where(is_zero, 0.0, tl.math.div_rn(odd, divisor)), TIES_TO_EVEN)
        tl.store(out, (low | high << 4).reshape(BLOCK_ROWS, WIDTH).to(tl.uint8), mask=is_code)

        tiles = tl.cdiv(max_len, 32)
        block = tl.arange(0, BLOCKS_PADDED)[None, :]
        tile_offset = (batch_head * tiles + slot // 32) * (BLOCKS * 32) + scale_slot(slot)
        tl.store(block_scale + tile_offset[:, None] + block * 32, scale_bits, mask=is_stored & (block < BLOCKS))
    else:
        if scale is not None:
            value = tl.math.div_rn(value, tl.broadcast_to(tl.load(scale + head)[:, None], value.shape))
        tl.store(out, encode_float8(value, CODEC), mask=is_code)


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
    value_codes,
    value_block_scale,
    value_scale,
    rows,
    kv_heads,
    length,
    max_len,
    KEY_DIM: tl.constexpr,
    KEY_CODEC: tl.constexpr,
    KEY_BLOCK_SCALE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_CODEC: tl.constexpr,
    VALUE_BLOCK_SCALE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _store_rows(
            key, key_batch_stride, key_head_stride, key_token_stride,
            positions, key_codes, key_block_scale, key_scale, rows, kv_heads, length, max_len,
            KEY_DIM, KEY_CODEC, KEY_BLOCK_SCALE, KEY_BLOCK, KEY_WIDTH, BLOCK_ROWS,
        )  # fmt: skip
    else:
        _store_rows(
            value, value_batch_stride, value_head_stride, value_token_stride,
            positions, value_codes, value_block_scale, value_scale, rows, kv_heads, length, max_len,
            VALUE_DIM, VALUE_CODEC, VALUE_BLOCK_SCALE, VALUE_BLOCK, VALUE_WIDTH, BLOCK_ROWS,
        )  # fmt: skip


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    key_codes: torch.Tensor,
    key_block_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_codes: torch.Tensor,
    value_block_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    key_format: str,
    value_format: str,
) -> None:
    """Quantize K and V into the slots ``positions``.

    Args:
        key, value: ``[batch, kv_heads, length, head_dim]`` bf16, fp16 or fp32, any strides; ``head_dim`` may differ.
        positions: ``[length]`` int64. A token whose slot is outside the cache is not stored.
        key_codes ... value_scale: The buffers, contiguous (:class:`kvpass.formats.KVBuffers`).
        key_format, value_format: Names of registered formats.

    Raises:
        ValueError: A dtype or shape that does not fit the buffers, or buffers that the format does not have.
    """
    key_row, value_row = get_format(key_format), get_format(value_format)
    _check("key", key, key_row, positions, key_codes)
    _check("value", value, value_row, positions, value_codes)
    check_buffers("key", key_row, key_codes, key_block_scale, key_scale)
    check_buffers("value", value_row, value_codes, value_block_scale, value_scale)
    batch, kv_heads, length, key_dim = key.shape
    if value.shape[:3] != key.shape[:3] or value_codes.shape[2] != key_codes.shape[2]:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)}, in caches of {key_codes.shape[2]} and "
            f"{value_codes.shape[2]} slots, may differ in head_dim only"
        )
    value_dim = value.shape[3]
    rows = batch * kv_heads * length
    if rows == 0:
        return
    key = key if key.stride(3) == 1 else key.contiguous()
    value = value if value.stride(3) == 1 else value.contiguous()
    block_rows = 16 if rows >= 4096 else 4  # few rows: spread them, the launch is all latency
    with on_device(key):
        _store_kernel[(triton.cdiv(rows, block_rows), 2)](
            key,
            *key.stride()[:3],
            value,
            *value.stride()[:3],
            positions,
            key_codes,
            key_block_scale,
            key_scale,
            value_codes,
            value_block_scale,
            value_scale,
            rows,
            kv_heads,
            length,
            key_codes.shape[2],
            KEY_DIM=key_dim,
            KEY_WIDTH=padded_width(key_row, key_dim),
            **constexprs(key_row, "KEY_"),
            VALUE_DIM=value_dim,
            VALUE_WIDTH=padded_width(value_row, value_dim),
            **constexprs(value_row, "VALUE_"),
            BLOCK_ROWS=block_rows,
            num_warps=4 if block_rows == 16 else 2,
        )


def _check(what: str, x: torch.Tensor, fmt: KVFormat, positions: torch.Tensor, codes: torch.Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise ValueError(f"{what} is {x.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    batch, kv_heads, _, width = codes.shape
    expected = (batch, kv_heads, positions.shape[0], fmt.head_dim(width))
    if x.shape != expected:
        raise ValueError(
            f"{what} is {tuple(x.shape)}; its {fmt.name!r} buffer and {positions.shape[0]} positions hold {expected}"
        )
