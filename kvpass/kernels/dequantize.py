"""Decode a whole buffer: what attention reads wherever it is not fused with the decoding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpass.formats import KVBuffers, get_format
from kvpass.kernels.codecs import (
    check_buffers,
    constexprs,
    native_float8,
    on_device,
    padded_width,
    rotate,
    rotation_constexprs,
    round_to,
    to_float32,
)
from kvpass.kernels.decode import kept_rows, load_values
from kvpass.kernels.launch import remembered

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_BLOCK_N = 32


@remembered
@triton.jit(do_not_specialize=["length", "max_len"])
def _dequantize_kernel(
    codes,
    block_scale,
    scale,
    centre,
    kept,
    kept_slots,
    positions,
    length,
    out,
    kv_heads,
    max_len,
    HEAD_DIM: tl.constexpr,
    CODEC: tl.constexpr,
    BLOCK_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATION: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    KEEP_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    batch_head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * BLOCK_N
    last = tl.load(positions + length - 1)
    end = tl.minimum(last + 1, max_len).to(tl.int32)

    ROW: tl.constexpr = HEAD_DIM // 2 if CODEC == "e2m1" else HEAD_DIM
    codes += batch_head * max_len * ROW
    if block_scale is not None:
        block_scale += batch_head * tl.cdiv(max_len, 32) * ((HEAD_DIM + BLOCK - 1) // BLOCK * 32)
    first, second = load_values(
        codes, block_scale, start, end, CODEC, BLOCK_SCALE, BLOCK, HEAD_DIM, WIDTH, BLOCK_N, tl.float32, NATIVE
    )
    value = tl.interleave(first, second) if CODEC == "e2m1" else first
    if scale is not None:
        value *= tl.load(scale + batch_head % kv_heads)
    slots = (start + tl.arange(0, BLOCK_N))[:, None]
    VALUES: tl.constexpr = 2 * WIDTH if CODEC == "e2m1" else WIDTH
    columns = tl.arange(0, VALUES)[None, :]
    if kept is not None:
        row = kept_rows(kept_slots, slots, end, KEEP, KEEP_PADDED)
        is_kept = row >= 0
        at = kept + (batch_head * KEEP + row) * HEAD_DIM + columns
        exact = to_float32(tl.load(at, mask=is_kept & (columns < HEAD_DIM), other=0.0))
        value = tl.where(is_kept, exact, value)
    if ROTATION > 1:
        value = rotate(value, ROTATION, NORM, 16)
    if centre is not None:
        centre += batch_head % kv_heads * HEAD_DIM
        value += tl.load(centre + columns, mask=columns < HEAD_DIM, other=0.0)
    value = tl.where(slots < end, value, 0.0)
    value = tl.where(last < max_len, value, float("nan"))

    address = out + (batch_head * max_len + slots) * HEAD_DIM + columns
    tl.store(address, round_to(value, DTYPE), mask=(slots < max_len) & (columns < HEAD_DIM))


def dequantize(
    codes: torch.Tensor,
    block_scale: torch.Tensor | None,
    scale: torch.Tensor | None,
    centre: torch.Tensor | None,
    kept: torch.Tensor | None,
    kept_slots: torch.Tensor | None,
    positions: torch.Tensor,
    format: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Decode a buffer up to slot ``positions[-1]``.

    Args:
        codes ... kept_slots: The buffers, contiguous (:class:`kvpass.formats.KVBuffers`).
        positions: ``[length]`` int64, ascending; read on the device.
        format: Name of a registered format.
        dtype: fp32, fp16 or bf16. The arithmetic is fp32.

    Returns:
        ``[batch, kv_heads, max_len, head_dim]``: zero past ``positions[-1]``, and NaN throughout if that slot is
        outside the cache.

    Raises:
        ValueError: Another dtype, or buffers that the format does not have.
    """
    fmt = get_format(format)
    if dtype not in _DTYPES:
        raise ValueError(f"cannot dequantize to {dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    check_buffers("cache", fmt, KVBuffers(codes, block_scale, scale, centre, kept, kept_slots))
    batch, kv_heads, max_len, width = codes.shape
    head_dim = fmt.head_dim(width)
    out = torch.empty((batch, kv_heads, max_len, head_dim), dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    with on_device(codes):
        _dequantize_kernel[(triton.cdiv(max_len, _BLOCK_N), batch * kv_heads)](
            codes,
            block_scale,
            scale,
            centre,
            kept,
            kept_slots,
            positions,
            positions.shape[0],
            out,
            kv_heads,
            max_len,
            HEAD_DIM=head_dim,
            WIDTH=padded_width(fmt, head_dim),
            **constexprs(fmt, ""),
            **rotation_constexprs(fmt, head_dim, ""),
            KEEP=0 if kept is None else kept.shape[2],
            KEEP_PADDED=1 if kept is None else triton.next_power_of_2(kept.shape[2]),
            BLOCK_N=_BLOCK_N,
            DTYPE=_DTYPES[dtype],
            NATIVE=native_float8(codes.device),
            enable_fp_fusion=False,  # every rounding as in the reference
        )
    return out
