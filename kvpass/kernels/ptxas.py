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
from types import ModuleType
from typing import Any

import triton

from kvpass.kernels.codecs import interpreting
from kvpass.tiles import Configuration

FIRST_SOUND = (12, 9)

_thread = threading.local()


def _is_sound(tool: Any) -> bool:
    return tuple(map(int, tool.version.split(".")[:2])) >= FIRST_SOUND


def is_suspect() -> bool:
    """Whether triton compiles for a Hopper GPU, the current one, with a ptxas that is older than what is known to be
    sound."""
    if interpreting():
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch // 10 == 9 and not _is_sound(triton.knobs.nvidia.ptxas)


@functools.cache
def _compiler() -> ModuleType | None:
    """Triton's compiler for NVIDIA, taught to take its other ptxas where a thread asks for it; None where that is not
    sound, or the compiler is not as this triton's was when this was written."""
    try:
        from triton.backends.nvidia import compiler

        if not _is_sound(triton.knobs.nvidia.ptxas_blackwell):
            return None
        own = compiler.get_ptxas
        compiler.get_ptxas_version(90)  # remembered, and part of the names of what is compiled: of its own ptxas
    except (ImportError, AttributeError, OSError, RuntimeError):
        return None

    def get_ptxas(arch: int) -> Any:
        return triton.knobs.nvidia.ptxas_blackwell if getattr(_thread, "takes_other", False) else own(arch)

    compiler.get_ptxas = get_ptxas
    return compiler


def _is_at_risk(config: Configuration) -> bool:
    """Whether triton has warpgroups compute the products, and what compiles them is suspect."""
    return config.block_m % 64 == 0 and config.num_warps % 4 == 0 and is_suspect()


def compilable(config: Configuration) -> Configuration:
    """``config``; with fewer rows, so that warps compute products by themselves, where no sound ptxas is there."""
    if _is_at_risk(config) and _compiler() is None:
        return config._replace(block_m=32)
    return config


@contextlib.contextmanager
def sound(config: Configuration) -> Iterator[dict[str, str]]:
    """Within, this thread compiles soundly what it launches with ``config`` and the options that are handed out."""
    if not (_is_at_risk(config) and _compiler()):
        yield {}
        return
    # They say nothing new to ptxas, and keep triton's cache from taking this kernel for one of the other ptxas.
    given = triton.knobs.nvidia.ptxas_options
    _thread.takes_other = True
    try:
        yield {"ptx_options": f"{given} --verbose -v" if given else "--verbose -v"}
    finally:
        _thread.takes_other = False
