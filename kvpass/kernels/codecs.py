"""Device functions that encode and decode the values of every format, and the choice of instructions behind them.

What a code means is said in :mod:`kvpass.reference`; these functions give the same bits. A format reaches a kernel as
constexprs taken from its registry row (``CODEC``, ``BLOCK_SCALE``, ``BLOCK``), never by its name.

Encoding, and decoding on hardware without FP8 conversions, is integer arithmetic on the bits: GPUs before sm_89 have no
``float8e4nv`` in Triton, and Triton's interpreter rounds its float8 and bfloat16 casts another way.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import triton
import triton.language as tl

from kvpass.formats import KVFormat


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
def encode_float8(x, CODEC: tl.constexpr):
    """fp32 ``x`` as bytes of ``e4m3`` (fn) or ``e5m2``: nearest even, saturating, NaN is 0x7F."""
    if CODEC == "e4m3":
        MANTISSA: tl.constexpr = 3
        BIAS: tl.constexpr = 7
        LARGEST: tl.constexpr = 448.0
    else:
        MANTISSA: tl.constexpr = 2
        BIAS: tl.constexpr = 15
        LARGEST: tl.constexpr = 57344.0
    DROPPED: tl.constexpr = 23 - MANTISSA
    # Added to a subnormal code's value, this leaves the code in the lowest bits of the sum, rounded to nearest even.
    ALIGN: tl.constexpr = 2.0 ** (23 + 1 - BIAS - MANTISSA)
    ALIGN_BITS: tl.constexpr = (23 + 1 - BIAS - MANTISSA + 127) << 23
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    least = tl.where(is_nan, 0.0, tl.minimum(magnitude.to(tl.float32, bitcast=True), LARGEST))
    least_bits = least.to(tl.uint32, bitcast=True)
    rounded = least_bits + ((1 << (DROPPED - 1)) - 1) + ((least_bits >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    subnormal = (least + ALIGN).to(tl.uint32, bitcast=True) - ALIGN_BITS
    code = tl.where(least_bits < ((128 - BIAS) << 23), subnormal, normal)
    return tl.where(is_nan, 0x7F, code | sign).to(tl.uint8)


@triton.jit
def decode_float8(codes, CODEC: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of ``e4m3`` (fn) or ``e5m2`` as fp16, which holds every value of both."""
    if CODEC == "e5m2":  # fp16 without its low byte
        return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = codes.to(tl.uint16)
        magnitude = wide & 0x7F
        # Four exponent bits in the place of fp16's five are 2**-8 of the value: the biases are 7 and 15.
        value = (magnitude << 7).to(tl.float16, bitcast=True) * 256.0
        bits = tl.where(magnitude == 0x7F, 0x7E00, value.to(tl.uint16, bitcast=True)) | ((wide & 0x80) << 8)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def encode_e2m1(x, TIES_TO_EVEN: tl.constexpr):
    """Nearest e2m1 code of fp32 ``x``, saturating, sign in bit 3; ties to even or away from zero. int32."""
    magnitude = tl.abs(x)
    if TIES_TO_EVEN:  # the tie between codes n and n + 1 rises where n is odd
        code = (magnitude > 0.25).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
        code += (magnitude > 2.5).to(tl.int32) + (magnitude > 5.0).to(tl.int32)
    else:
        code = (magnitude >= 0.25).to(tl.int32) + (magnitude >= 1.25).to(tl.int32)
        code += (magnitude >= 2.5).to(tl.int32) + (magnitude >= 5.0).to(tl.int32)
    code += (magnitude >= 0.75).to(tl.int32) + (magnitude >= 1.75).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    return code | ((x < 0).to(tl.int32) << 3)


@triton.jit
def decode_e2m1(packed, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Packed e2m1 as its even and its odd values, times ``e2m1_factor(DTYPE)``.

    Two half tiles: putting them in order again would move every value between registers, and a dot product does not
    ask for order as long as the other side has the same.
    """
    if NATIVE and DTYPE == tl.float16:
        # Four codes at a time: moved into the bits of e4m3 they are 2**-6 of their value (the biases are 1 and 7), and
        # e4m3 to fp16 is one instruction for two of them.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; .reg .b16 a, b; "
            "shl.b32 t, $4, 2; and.b32 t, t, 0x1C1C1C1C; shl.b32 u, $4, 4; lop3.b32 u, u, 0x80808080, t, 0xEA; "
            "mov.b32 {a, b}, u; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; "
            "shr.b32 t, $4, 2; and.b32 t, t, 0x1C1C1C1C; lop3.b32 u, $4, 0x80808080, t, 0xEA; "
            "mov.b32 {a, b}, u; cvt.rn.f16x2.e4m3x2 $2, a; cvt.rn.f16x2.e4m3x2 $3, b; }",
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = packed.to(tl.uint16)
        return _e2m1_value(wide & 0xF, DTYPE), _e2m1_value(wide >> 4, DTYPE)


@triton.jit
def e2m1_factor(DTYPE: tl.constexpr) -> tl.constexpr:
    """What :func:`decode_e2m1` leaves its values multiplied by: undone in the scores or the output, never per value."""
    if DTYPE == tl.float16:
        return 0.015625
    else:
        return 1.0


@triton.jit
def _e2m1_value(code, DTYPE: tl.constexpr):
    sign = (code & 8) << 12
    magnitude = code & 7
    if DTYPE == tl.bfloat16:
        # Codes from 2 up are bf16 bits of another bias; 0.5 is a subnormal of e2m1 only.
        bits = tl.where(magnitude < 2, magnitude * 0x3F00, (magnitude << 6) + 0x3F00) | sign
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        # As fp16 bits the code is 2**-14 of its value, a subnormal included.
        half = ((magnitude << 9) | sign).to(tl.uint16).to(tl.float16, bitcast=True)
        if DTYPE == tl.float16:
            return half * 256.0
        else:
            return half.to(tl.float32) * 16384.0


@triton.jit
def decode_block_scale(bits, BLOCK_SCALE: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of an ``e4m3`` or ``e8m0`` block scale in ``DTYPE``: exact wherever the kernels use it."""
    if BLOCK_SCALE == "e4m3":
        scale = decode_float8(bits, "e4m3", NATIVE)
        if DTYPE == tl.float16:
            return scale
        else:
            return round_to(scale.to(tl.float32), DTYPE)
    else:
        # 2 ** (bits - 127); 0 is a subnormal and 255 is NaN. The lower half of these fp32 bits is zero: it is bf16 too.
        exponent = bits.to(tl.uint32)
        power = tl.where(exponent == 0, 0x00400000, exponent << 23)
        power = tl.where(exponent == 255, 0x7FC00000, power)
        if DTYPE == tl.bfloat16:
            return (power >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            return power.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def encode_block_scale(amax, factor, BLOCK_SCALE: tl.constexpr):
    """The e4m3 or e8m0 bits of the scale of blocks with ``amax`` (NaN where a value is), and what divides their values.

    ``factor`` is the tensor scale of each block (1 without one).
    """
    sixth = tl.math.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    if BLOCK_SCALE == "e4m3":
        bits = encode_float8(tl.math.div_rn(sixth, factor), "e4m3")
        return bits, decode_float8(bits, "e4m3", False).to(tl.float32) * factor
    else:
        is_nan = amax != amax
        least = tl.where(is_nan, 0.0, sixth)
        least = tl.minimum(tl.maximum(least, 1e-10), 1.7014118346046923e38).to(tl.uint32, bitcast=True)
        # The exponent of the power of two at or above.
        exponent = (least >> 23) + ((least & 0x7FFFFF) != 0).to(tl.uint32)
        divisor = (exponent << 23).to(tl.float32, bitcast=True)
        return tl.where(is_nan, 0xFF, exponent).to(tl.uint8), divisor


@triton.jit
def scale_slot(slots):
    """Where a slot's block scales lie in a tile of 32: ``kvpass.formats.SCALE_ORDER[slots % 32]``."""
    high = ((slots >> 2) & 1) << 4 | (slots & 1) << 3 | ((slots >> 4) & 1) << 2
    return high | ((slots >> 3) & 1) << 1 | ((slots >> 1) & 1)


@triton.jit
def untile(tiles):
    """``[n, blocks, 32]`` as stored to ``[n * 32, blocks]`` in the order of the slots."""
    bits = tiles.reshape(tiles.shape[0], tiles.shape[1], 2, 2, 2, 2, 2)  # b2 b0 b4 b3 b1 of the slot
    return bits.permute(0, 4, 5, 2, 6, 3, 1).reshape(tiles.shape[0] * 32, tiles.shape[1])


@triton.jit
def load_values(
    codes,
    block_scale,
    start,
    end,
    CODEC: tl.constexpr,
    BLOCK_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Slots ``start`` to ``start + BLOCK_N`` of one head without their tensor scale; zero from slot ``end`` on.

    Args:
        codes, block_scale: Pointers to the head's buffers, laid out as :class:`kvpass.formats.KVBuffers` says.
        start: A multiple of 32.
        WIDTH: Codes per slot, rounded up to a power of two; what is beyond the row is zero.

    Returns:
        Two ``[BLOCK_N, WIDTH]`` tiles in ``DTYPE``: for e2m1 the even and the odd values of head_dim, times
        ``e2m1_factor(DTYPE)``; otherwise twice the same tile.
    """
    ROW: tl.constexpr = HEAD_DIM // 2 if CODEC == "e2m1" else HEAD_DIM
    slots = start + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, WIDTH)
    is_read = (slots < end)[:, None]
    if ROW != WIDTH:
        is_read &= (columns < ROW)[None, :]
    packed = tl.load(codes + (slots[:, None] * ROW + columns[None, :]), mask=is_read, other=0)
    if CODEC == "e2m1":
        PER_SCALE: tl.constexpr = BLOCK // 2
        BLOCKS: tl.constexpr = HEAD_DIM // BLOCK
        BLOCKS_PADDED: tl.constexpr = WIDTH // PER_SCALE
        TILES: tl.constexpr = BLOCK_N // 32
        tile = start // 32 + tl.arange(0, TILES)[:, None, None]
        block = tl.arange(0, BLOCKS_PADDED)[None, :, None]
        # Whole tiles, also the one that `end` cuts, so that the mask never splits a vector of bytes.
        is_tile = (tile * 32 < end) & (block < BLOCKS) & (tl.arange(0, 32)[None, None, :] >= 0)
        scale_bits = tl.load(
            block_scale + (tile * (BLOCKS * 32) + block * 32 + tl.arange(0, 32)[None, None, :]), mask=is_tile, other=0
        )
        scale_bits = untile(scale_bits)
        scale_bits = tl.where((slots < end)[:, None], scale_bits, 0)
        scale = decode_block_scale(scale_bits, BLOCK_SCALE, DTYPE, NATIVE)
        scale = tl.broadcast_to(scale[:, :, None], (BLOCK_N, BLOCKS_PADDED, PER_SCALE)).reshape(BLOCK_N, WIDTH)
        even, odd = decode_e2m1(packed, DTYPE, NATIVE)
        return even * scale, odd * scale
    elif CODEC == "bf16":
        if DTYPE == tl.bfloat16:
            return packed, packed
        else:
            value = to_float32(packed)
            return value, value
    else:
        value = decode_float8(packed, CODEC, NATIVE).to(DTYPE)
        return value, value


def constexprs(fmt: KVFormat, prefix: str) -> dict[str, object]:
    """The row's constexprs of a kernel, named ``{prefix}CODEC`` and so on."""
    return {f"{prefix}CODEC": fmt.codec, f"{prefix}BLOCK_SCALE": fmt.block_scale, f"{prefix}BLOCK": fmt.block}


def padded_width(fmt: KVFormat, head_dim: int) -> int:
    """``code_width`` as the power of two, at least 16, that a tile has."""
    return max(16, triton.next_power_of_2(fmt.code_width(head_dim)))


def interpreting() -> bool:
    """Whether Triton runs the kernels in its interpreter."""
    return bool(triton.knobs.runtime.interpret)


@functools.lru_cache
def _has_float8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def native_float8(device: torch.device) -> bool:
    """Whether kernels on ``device`` may use the hardware's e4m3 conversions."""
    return device.type == "cuda" and not interpreting() and torch.version.hip is None and _has_float8(device)


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def check_buffers(
    what: str, fmt: KVFormat, codes: torch.Tensor, block_scale: torch.Tensor | None, scale: torch.Tensor | None
) -> None:
    """Raise ``ValueError`` where the buffers of ``what`` ("key", "value") are not what the kernels address."""
    for name, tensor, needed in (
        ("block_scale", block_scale, fmt.block > 0),
        ("scale", scale, fmt.tensor_scale),
    ):
        if (tensor is not None) != needed:
            state = "needed" if needed else "not part of this format"
            raise ValueError(f"{what}_{name} is {'missing' if needed else 'given'} and {state} ({fmt.name!r})")
    if not (codes.is_contiguous() and (block_scale is None or block_scale.is_contiguous())):
        raise ValueError(f"{what} buffers must be contiguous; codes have strides {codes.stride()}")
