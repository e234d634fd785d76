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
def load_groups(address, column, is_read, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr):
    """``GROUP`` neighbours (2 to 16) from each ``address`` (``[groups]``) on, as ``[groups, GROUP]``.

    Where there are as many threads as groups, the compiler gives each thread a group. Sixteen bf16 values it would give
    to two threads, which load eight each, so that these are two loads.

    Args:
        column: ``[groups]``, the first of the neighbours within its row. What is beyond ``HEAD_DIM`` is zero.
        is_read: ``[groups]`` bool; zero where it is not set.
    """
    GROUPS: tl.constexpr = address.shape[0]
    PART: tl.constexpr = min(GROUP, 8)
    near = tl.arange(0, PART)[None, :]
    address = address[:, None] + near
    column = column[:, None] + near
    first = tl.load(address, mask=is_read[:, None] & (column < HEAD_DIM), other=0.0)
    if GROUP == PART:
        return first
    else:
        second = tl.load(address + PART, mask=is_read[:, None] & (column + PART < HEAD_DIM), other=0.0)
        return tl.join(first, second).permute(0, 2, 1).reshape(GROUPS, GROUP)


@triton.jit
def rotate(x, BLOCK: tl.constexpr, NORM: tl.constexpr, GROUP: tl.constexpr):
    """Rows of fp32 ``[rows, values]`` times the rotation of :func:`kvpass.reference.rotate`, in the same order of sums.

    ``BLOCK`` is :func:`kvpass.formats.rotation_block` of head_dim, ``NORM`` its inverse square root, and ``GROUP`` how
    many neighbours (2 to 16) a thread has. The first rounds are among these: each adds pairs and deals the results out
    to the two halves, which brings the next bit of the index to the end. In the others, lanes of a warp exchange their
    values. So no round goes through shared memory, and the values stay with their threads.
    """
    SHAPE: tl.constexpr = (x.shape[0], x.shape[1])
    NEAR: tl.constexpr = min(BLOCK, GROUP)
    LANES: tl.constexpr = BLOCK // NEAR
    GROUPS: tl.constexpr = x.shape[0] * x.shape[1] // NEAR
    x = x.reshape(GROUPS, NEAR)
    for bit in tl.static_range(4):
        if 2**bit < NEAR:
            first, second = tl.split(x.reshape(GROUPS, NEAR // 2, 2))
            x = tl.join(first + second, first - second).permute(0, 2, 1).reshape(GROUPS, NEAR)
    if LANES > 1:
        x = x.reshape(GROUPS // LANES, LANES, NEAR)
        lane = tl.broadcast_to(tl.arange(0, LANES)[None, :, None], (GROUPS // LANES, LANES, NEAR))
        for bit in tl.static_range(7):
            if 2**bit < LANES:
                other = tl.gather(x, lane ^ 2**bit, 1)
                # An exact product: the sum or, in the second of the two, the difference.
                x = tl.fma(x, tl.where((lane & 2**bit) != 0, -1.0, 1.0), other)
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


def neighbours(values: int, num_warps: int, most: int = 16) -> int:
    """``GROUP`` of :func:`load_groups` and :func:`rotate`: how many values of a tile a thread has, up to ``most``."""
    return max(2, min(most, values // (32 * num_warps)))


@functools.lru_cache
def padded_width(fmt: KVFormat, head_dim: int) -> int:
    """``code_width`` as the power of two, at least 16, that a tile has."""
    return max(16, triton.next_power_of_2(fmt.code_width(head_dim)))


def interpreting() -> bool:
    """Whether Triton runs the kernels in its interpreter."""
    return bool(triton.knobs.runtime.interpret)


@functools.lru_cache
def _compiles_for(device: torch.device, capability: tuple[int, int]) -> bool:
    """Whether kernels on ``device`` are compiled, for an NVIDIA GPU of at least this compute capability."""
    if device.type != "cuda" or interpreting() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= capability


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
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def check_buffers(what: str, fmt: KVFormat, buffers: KVBuffers) -> None:
    """Raise ``ValueError`` where the buffers of ``what`` ("key", "value") are not what the kernels address."""
    given = buffers.block_scale is not None, buffers.scale is not None, buffers.centre is not None
    needed = fmt.block > 0, fmt.tensor_scale, fmt.centred
    if given != needed:
        wrong = next(i for i in range(3) if given[i] != needed[i])
        state = "missing and needed" if needed[wrong] else "given and not part of this format"
        raise ValueError(f"{what}_{KVBuffers._fields[1 + wrong]} is {state} ({fmt.name!r})")
    kept, kept_slots = buffers.kept, buffers.kept_slots
    if kept is not None or kept_slots is not None:
        rows = [None if t is None else t.shape[axis] for t, axis in ((kept, 2), (kept_slots, 0))]
        if rows[0] != rows[1] or (kept_slots is not None and kept_slots.dtype != torch.int32):
            raise ValueError(
                f"{what}_kept has {rows[0]} rows, and {what}_kept_slots {rows[1]}; as many int32 are needed"
            )
    for tensor in buffers:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{what} buffers must be contiguous; codes have strides {buffers.codes.stride()}")
