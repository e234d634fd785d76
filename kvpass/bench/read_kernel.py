# mypy: ignore-errors
"""A Triton kernel that does nothing but read: its bandwidth is the ceiling of kernels that read a cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Configuration(NamedTuple):
    block: int
    steps: int
    num_warps: int


# All are tried; which is the fastest depends on the GPU.
CONFIGURATIONS = (
    Configuration(2048, 1, 4),
    Configuration(4096, 4, 8),
    Configuration(8192, 4, 8),
    Configuration(8192, 1, 8),
    Configuration(4096, 8, 4),
)


@triton.jit
def _read_kernel(source, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Add up ``BLOCK * STEPS`` neighbouring int32 with 16-byte loads, all of which may be under way at once."""
    first = tl.program_id(0) * (BLOCK * STEPS)
    total = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        total += tl.load(source + first + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read(source: torch.Tensor, config: Configuration) -> torch.Tensor:
    """Sums (int32, wrapping) of each program's share of ``source`` (int32, a multiple of ``block * steps`` long)."""
    programs, rest = divmod(source.numel(), config.block * config.steps)
    if rest:
        raise ValueError(f"{source.numel()} values are not a multiple of {config.block * config.steps}")
    sums = torch.empty(programs, dtype=torch.int32, device=source.device)
    _read_kernel[(programs,)](source, sums, BLOCK=config.block, STEPS=config.steps, num_warps=config.num_warps)
    return sums
