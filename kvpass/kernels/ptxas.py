"""A ptxas that compiles products of warpgroups right.

ptxas 12.8, with which triton 3.6 compiles for Hopper, may lose the register that says where an operand of such a
product lies in shared memory. The kernel then reads what the register held before, and faults, or sums something else.
It was seen in attention of several rows with head_dims of 16, 32 and 64; which formats, tiles, masks and kept slots it
hits cannot be told from outside. 12.9 compiles the same PTX right, and triton 3.6 has it too, for Blackwell.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import triton

from kvpass.kernels.codecs import interpreting
from kvpass.tiles import Configuration

FIRST_SOUND = (12, 9)


def _is_sound(tool: Any) -> bool:
    return tuple(map(int, tool.version.split(".")[:2])) >= FIRST_SOUND


@functools.cache
def is_suspect() -> bool:
    """Whether triton's ptxas is older than what is known to be sound."""
    try:
        return not interpreting() and not _is_sound(triton.knobs.nvidia.ptxas)
    except (AttributeError, RuntimeError):  # no NVIDIA compiler here
        return False


@functools.cache
def sound_path() -> str | None:
    """Another ptxas that comes with triton and is sound; None where there is none."""
    try:
        tool = triton.knobs.nvidia.ptxas_blackwell
    except (AttributeError, RuntimeError):
        return None
    return tool.path if _is_sound(tool) else None


def _takes_warpgroups(config: Configuration) -> bool:
    return config.block_m % 64 == 0 and config.num_warps % 4 == 0


def compilable(config: Configuration) -> Configuration:
    """``config``; with fewer rows, so that warps compute products by themselves, where no sound ptxas is there."""
    if _takes_warpgroups(config) and is_suspect() and sound_path() is None:
        return config._replace(block_m=32)
    return config


_lock = threading.Lock()
_within = contextlib.ExitStack()
_count = 0


@contextlib.contextmanager
def sound(config: Configuration) -> Iterator[dict[str, str]]:
    """Within, triton compiles what is launched with ``config`` and the options that are handed out soundly. Several
    threads may be within at the same time; what others compile meanwhile, the same ptxas does."""
    global _count
    path = sound_path()
    if path is None or not (_takes_warpgroups(config) and is_suspect()):
        yield {}
        return
    with _lock:
        if not _count:
            _within.enter_context(triton.knobs.nvidia.scope())
            triton.knobs.nvidia.ptxas = path
        _count += 1
    try:
        # What ptxas does anyway: it keeps triton's cache from taking this kernel for one that the other compiled.
        yield {"ptx_options": "--opt-level 3"}
    finally:
        with _lock:
            _count -= 1
            if not _count:
                _within.close()
