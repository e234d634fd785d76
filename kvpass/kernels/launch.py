"""Launch a kernel with less of the host's time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton

_MOST = 1024  # launches remembered of a kernel: every length of a prompt has its own


class Remembered:
    """A kernel that launches at once what it has launched before: ``kernel[grid](*arguments, **constants)``.

    Triton finds out at every launch which compiled form of a kernel takes its arguments, and that takes the host longer
    than the launch itself. What the arguments have to do with it is the key here: dtypes and alignment of tensors,
    whole numbers, what is None, constexprs, options and the device. What else triton compiles by, its knobs, and a
    kernel's ``pre_run_hooks`` count as they are at the first of such launches.

    Arguments are tensors, the first of them on the current device, numbers (no bools) and None, by place and all of
    them; constants are constexprs and options, by name.
    """

    def __init__(self, kernel: Any) -> None:
        functools.update_wrapper(self, kernel)
        self.kernel = kernel
        self._compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def warmup(self, *arguments: Any, **constants: Any) -> Any:
        """Compile without a launch: triton's own ``warmup``."""
        return self.kernel.warmup(*arguments, **constants)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        kinds = [
            x if (kind := type(x)) is int or x is None else float if kind is float else (x.dtype, x.data_ptr() % 16)
            for x in arguments
        ]
        key = (arguments[0].get_device(), *kinds, *constants, *constants.values())
        if (found := self._compiled.get(key)) is not None:
            compiled, constexprs = found
            compiled[(*grid, 1, 1)[:3]](*arguments, *constexprs)
            return
        compiled = self.kernel[grid](*arguments, **constants)
        if not isinstance(compiled, triton.compiler.CompiledKernel):
            return  # still being compiled, or not by triton
        if len(self._compiled) >= _MOST:
            self._compiled.clear()
        self._compiled[key] = compiled, tuple(constants[name] for name in self.kernel.arg_names[len(arguments) :])


def remembered(kernel: Any) -> Any:
    """``kernel`` as :class:`Remembered`; as it is where triton interprets it, and on AMD's GPUs, where its form depends
    on the size of tensors too."""
    return Remembered(kernel) if isinstance(kernel, triton.JITFunction) and torch.version.hip is None else kernel
