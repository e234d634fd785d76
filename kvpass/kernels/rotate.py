"""Rotate rows: the query of an attention over rotated K, and its output over rotated V."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpass.formats import rotation_block
from kvpass.kernels.codecs import early_launch, load_groups, neighbours, on_device, rotate, round_to, to_float32
from kvpass.kernels.launch import remembered

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_BLOCK_ROWS = 4


@remembered
@triton.jit(do_not_specialize=["rows", "length"])
def _rotate_kernel(
    x,
    batch_stride,
    head_stride,
    token_stride,
    out,
    rows,
    heads,
    length,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ROTATION: tl.constexpr,
    NORM: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    LAUNCHES_EARLY: tl.constexpr,
):
    if LAUNCHES_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ROW_GROUPS: tl.constexpr = WIDTH // GROUP
    group = tl.arange(0, BLOCK_ROWS * ROW_GROUPS)
    row = (tl.program_id(0) * BLOCK_ROWS + group // ROW_GROUPS).to(tl.int64)
    start = row // (heads * length) * batch_stride + row // length % heads * head_stride + row % length * token_stride
    column = group % ROW_GROUPS * GROUP
    value = to_float32(load_groups(x + start + column, column, row < rows, HEAD_DIM, GROUP))
    value = rotate(value, ROTATION, NORM, GROUP)
    column = column[:, None] + tl.arange(0, GROUP)[None, :]
    is_value = (row < rows)[:, None] & (column < HEAD_DIM)
    tl.store(out + (row * HEAD_DIM)[:, None] + column, round_to(value, OUT_DTYPE), mask=is_value)


def rotate_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x @ R`` (:func:`kvpass.reference.rotate`) with fp32 arithmetic.

    Args:
        x: ``[batch, heads, length, head_dim]`` bf16, fp16 or fp32, any strides.
        dtype: Of the result; one of these.
    """
    x = x if x.stride(3) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows, head_dim = x.shape[:3].numel(), x.shape[3]
    if rows == 0:
        return out
    size, width = rotation_block(head_dim), triton.next_power_of_2(head_dim)
    with on_device(x):
        _rotate_kernel[(triton.cdiv(rows, _BLOCK_ROWS),)](
            x,
            *x.stride()[:3],
            out,
            rows,
            x.shape[1],
            x.shape[2],
            HEAD_DIM=head_dim,
            WIDTH=width,
            GROUP=neighbours(_BLOCK_ROWS * width, num_warps=1),
            ROTATION=size,
            NORM=size**-0.5,
            OUT_DTYPE=_DTYPES[dtype],
            BLOCK_ROWS=_BLOCK_ROWS,
            **early_launch(x.device),
            num_warps=1,
        )
    return out
