"""What the kernels share: exact conversions, the rotation, places of block scales, and what a launcher needs to know.

A format reaches a kernel as constexprs taken from its registry row (``CODEC``, ``BLOCK_SCALE``, ``BLOCK``), never by
its name. What its codes mean is said in :mod:`kvpass.reference`; :mod:`kvpass.kernels.encode` and
:mod:`kvpass.kernels.decode` give the same bits.

Encoding, and decoding on hardware without FP8 conversions, is integer arithmetic on the bits: GPUs before sm_89 have no
``float8e4nv`` in Triton, and Triton's interpreter rounds its float8 and bfloat16 casts another way.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import triton
import triton.language as tl

from kvpass.formats import KVBuffers, KVFormat, rotation_block


@triton.jit
def to_float32(x):
    """``x`` as fp32. bf16 goes through its bits: exact for subnormals everywhere."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """fp32 ``x`` rounded to nearest even in ``DTYPE`` (fp32, fp16 or bf16)."""
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def rotate(x, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Rows of fp32 ``[rows, values]`` times the rotation of :func:`kvpass.reference.rotate`, in the same order of sums.

    ``BLOCK`` is :func:`kvpass.formats.rotation_block` of head_dim, ``NORM`` its inverse square root. Each round adds
    neighbours and deals the results out to the two halves, which brings the next bit of the index to the end.
    """
    ROWS: tl.constexpr = x.shape[0] * x.shape[1] // BLOCK
    SHAPE: tl.constexpr = (x.shape[0], x.shape[1])
    x = x.reshape(ROWS, BLOCK)
    for bit in tl.static_range(8):
        if 2**bit < BLOCK:
            first, second = tl.split(x.reshape(ROWS, BLOCK // 2, 2))
            x = tl.join(first + second, first - second).permute(0, 2, 1).reshape(ROWS, BLOCK)
    return x.reshape(SHAPE) * NORM


@triton.jit
def scale_slot(slots):
    """Where a slot's block scales lie in a tile of 32: ``kvpass.formats.SCALE_ORDER[slots % 32]``."""
    high = ((slots >> 2) & 1) << 4 | (slots & 1) << 3 | ((slots >> 4) & 1) << 2
    return high | ((slots >> 3) & 1) << 1 | ((slots >> 1) & 1)


def constexprs(fmt: KVFormat, prefix: str) -> dict[str, object]:
    """The row's constexprs of a kernel, named ``{prefix}CODEC`` and so on."""
    return {f"{prefix}CODEC": fmt.codec, f"{prefix}BLOCK_SCALE": fmt.block_scale, f"{prefix}BLOCK": fmt.block}


def rotation_constexprs(fmt: KVFormat, head_dim: int, prefix: str) -> dict[str, object]:
    """Constexprs of :func:`rotate`, ``{prefix}ROTATION`` (1: none) and ``{prefix}NORM``."""
    size = rotation_block(head_dim) if fmt.rotated else 1
    return {f"{prefix}ROTATION": size, f"{prefix}NORM": size**-0.5}


def padded_width(fmt: KVFormat, head_dim: int) -> int:
    """``code_width`` as the power of two, at least 16, that a tile has."""
    return max(16, triton.next_power_of_2(fmt.code_width(head_dim)))


def interpreting() -> bool:
    """Whether Triton runs the kernels in its interpreter."""
    return bool(triton.knobs.runtime.interpret)


@functools.lru_cache
def _is_at_least(device: torch.device, capability: tuple[int, int]) -> bool:
    return torch.cuda.get_device_capability(device) >= capability


def _compiles_for(device: torch.device, capability: tuple[int, int]) -> bool:
    """Whether kernels on ``device`` are compiled, for an NVIDIA GPU of at least this compute capability."""
    is_compiled = device.type == "cuda" and not interpreting() and torch.version.hip is None
    return is_compiled and _is_at_least(device, capability)


def native_float8(device: torch.device) -> bool:
    """Whether kernels on ``device`` may use the hardware's e4m3 conversions."""
    return _compiles_for(device, (8, 9))


def early_launch(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that waits by itself for the one before it, and so may be launched while that one ends: from
    Hopper on it is (programmatic dependent launch)."""
    if _compiles_for(device, (9, 0)):
        return {"LAUNCHES_EARLY": True, "launch_pdl": True}
    return {"LAUNCHES_EARLY": False}


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def check_buffers(what: str, fmt: KVFormat, buffers: KVBuffers) -> None:
    """Raise ``ValueError`` where the buffers of ``what`` ("key", "value") are not what the kernels address."""
    for name, needed in (("block_scale", fmt.block > 0), ("scale", fmt.tensor_scale), ("centre", fmt.centred)):
        if (getattr(buffers, name) is not None) != needed:
            state = "needed" if needed else "not part of this format"
            raise ValueError(f"{what}_{name} is {'missing' if needed else 'given'} and {state} ({fmt.name!r})")
    kept, kept_slots = buffers.kept, buffers.kept_slots
    rows = [None if t is None else t.shape[axis] for t, axis in ((kept, 2), (kept_slots, 0))]
    if rows[0] != rows[1] or (kept_slots is not None and kept_slots.dtype != torch.int32):
        raise ValueError(f"{what}_kept has {rows[0]} rows, and {what}_kept_slots {rows[1]}; as many int32 are needed")
    if not all(tensor.is_contiguous() for tensor in buffers.tensors()):
        raise ValueError(f"{what} buffers must be contiguous; codes have strides {buffers.codes.stride()}")
