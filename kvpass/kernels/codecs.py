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
def _least_above(divisor, MIDPOINT: tl.constexpr, TIE_RISES: tl.constexpr):
    """The least fp32 number at or above (``TIE_RISES``) or above ``MIDPOINT * divisor``, whose product is not rounded.

    A midpoint has at most three bits. So both parts of the product are exact, their sum is rounded once, and what it
    was rounded by is exact too, contracted to fused operations or not.
    """
    high = (divisor.to(tl.int32, bitcast=True) & -8).to(tl.float32, bitcast=True)
    low = divisor - high
    product = high * MIDPOINT + low * MIDPOINT
    excess = (high * MIDPOINT - product) + low * MIDPOINT
    is_below = excess > 0 if TIE_RISES else excess >= 0  # neither, where the product is infinite
    return (product.to(tl.int32, bitcast=True) + is_below.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(even, odd, divisor, TIES_TO_EVEN: tl.constexpr):
    """Nearest e2m1 codes of ``x / divisor``, saturating, sign in bit 3; ties to even or away from zero. int32.

    ``even`` and ``odd`` are two fp32 tiles ``[..., values]``, ``divisor`` is ``[...]``. A value is compared with
    midpoint times divisor, which is worked out once per block; a division per value made the store half as fast.
    """
    low = (even < 0).to(tl.int32) << 3
    high = (odd < 0).to(tl.int32) << 3
    # The tie between codes n and n + 1 rises, to even, where n is odd.
    low, high = _rise(low, high, even, odd, divisor, 0.25, not TIES_TO_EVEN)
    low, high = _rise(low, high, even, odd, divisor, 0.75, True)
    low, high = _rise(low, high, even, odd, divisor, 1.25, not TIES_TO_EVEN)
    low, high = _rise(low, high, even, odd, divisor, 1.75, True)
    low, high = _rise(low, high, even, odd, divisor, 2.5, not TIES_TO_EVEN)
    low, high = _rise(low, high, even, odd, divisor, 3.5, True)
    return _rise(low, high, even, odd, divisor, 5.0, not TIES_TO_EVEN)


@triton.jit
def _rise(low, high, even, odd, divisor, MIDPOINT: tl.constexpr, TIE_RISES: tl.constexpr):
    """The codes, one higher where the value lies beyond a midpoint."""
    least = _least_above(divisor, MIDPOINT, TIE_RISES)[:, :, None]
    return low + (tl.abs(even) >= least).to(tl.int32), high + (tl.abs(odd) >= least).to(tl.int32)


@triton.jit
def decode_e2m1(packed, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Packed e2m1 as its even and its odd values, times ``code_factor("e2m1", DTYPE)``.

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
def code_factor(CODEC: tl.constexpr, DTYPE: tl.constexpr) -> tl.constexpr:
    """What decoded values are left multiplied by: undone in the scores or the output, never per value. Moving the bits
    of e2m1 does it; for int8, which reaches 127 * 448, it leaves room in fp16 for larger values that are kept."""
    if DTYPE == tl.float16 and (CODEC == "e2m1" or CODEC == "int8"):
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
def _rule(amax, factor, wanted: tl.constexpr, BLOCK_SCALE: tl.constexpr, SCALE_RULE: tl.constexpr):
    """The e4m3 or e8m0 bits, int32, of the scale that brings ``amax`` to ``wanted`` (6 unless a search asks)."""
    if BLOCK_SCALE == "e4m3":
        part = tl.math.div_rn(amax, tl.full(amax.shape, wanted, tl.float32))
        return encode_float8(tl.math.div_rn(part, factor), "e4m3").to(tl.int32)
    elif SCALE_RULE == "floor":
        return tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 2, 0)
    else:
        sixth = tl.where(amax != amax, 0.0, tl.math.div_rn(amax, tl.full(amax.shape, wanted, tl.float32)))
        least = tl.minimum(tl.maximum(sixth, 1e-10), 1.7014118346046923e38).to(tl.int32, bitcast=True)
        # The exponent of the power of two at or above.
        return (least >> 23) + ((least & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def _step_scale(bits, amax, factor, BLOCK_SCALE: tl.constexpr, SEARCH: tl.constexpr):
    """Bits of a block scale within their range, uint8 and NaN where ``amax`` is; and what divides the values, fp32."""
    NAN_BITS: tl.constexpr = 0x7F if BLOCK_SCALE == "e4m3" else 0xFF
    bits = tl.minimum(tl.maximum(bits, 0), NAN_BITS - 1)
    if BLOCK_SCALE == "e4m3" and SEARCH != "none":
        bits = tl.where((bits == 0) & (amax != 0), 1, bits)
    bits = tl.where(amax != amax, NAN_BITS, bits).to(tl.uint8)
    return bits, decode_block_scale(bits, BLOCK_SCALE, tl.float32, False) * factor


@triton.jit
def _rounding_error(x, inverse, ALIGN: tl.constexpr):
    """What ``|x| * inverse`` is rounded by, as :mod:`kvpass.reference` has it: sums of its squares are exact."""
    scaled = (tl.abs(x) * inverse + ALIGN) - ALIGN
    power = (tl.maximum(scaled, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    rounded = tl.fma(power, -6291456.0, tl.fma(power, 6291456.0, scaled))
    return scaled - tl.minimum(rounded, 6.0)


@triton.jit
def _squared_error(even, odd, amax, divisor, BLOCK_SCALE: tl.constexpr):
    REACH: tl.constexpr = 8.0 if BLOCK_SCALE == "e4m3" else 16.0
    ALIGN: tl.constexpr = 49152.0 if BLOCK_SCALE == "e4m3" else 196608.0
    inverse = tl.math.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    first = _rounding_error(even, inverse[:, :, None], ALIGN)
    second = _rounding_error(odd, inverse[:, :, None], ALIGN)
    error = tl.sum(tl.fma(first, first, second * second), axis=2) * divisor * divisor
    return tl.where(amax * inverse > REACH, float("inf"), error)


@triton.jit
def choose_block_scale(
    even,
    odd,
    factor,
    BLOCK_SCALE: tl.constexpr,
    SCALE_RULE: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """The e4m3 or e8m0 bits of the scales of blocks, and what divides their values (NaN or 0: their codes are zero).

    Args:
        even, odd: ``[rows, blocks, values]`` fp32, the values of each block in two halves.
        factor: ``[rows, blocks]``, the tensor scale of each block (1 without one).
    """
    # As integers, the bits of magnitudes sort like their values, and a NaN above all of them.
    magnitude = tl.maximum(even.to(tl.int32, bitcast=True) & 0x7FFFFFFF, odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    amax = tl.max(magnitude, axis=2).to(tl.float32, bitcast=True)
    base = _rule(amax, factor, 6.0, BLOCK_SCALE, SCALE_RULE)
    bits, divisor = _step_scale(base, amax, factor, BLOCK_SCALE, SEARCH)
    if SEARCH != "none":
        FIRST: tl.constexpr = 0 if SEARCH == "4over6" else (-2 if BLOCK_SCALE == "e4m3" else -1)
        LAST: tl.constexpr = 0 if SEARCH == "4over6" else (6 if BLOCK_SCALE == "e4m3" else 1)
        if SEARCH == "4over6":
            base = _rule(amax, factor, 4.0, BLOCK_SCALE, SCALE_RULE)
        least = _squared_error(even, odd, amax, divisor, BLOCK_SCALE)
        for step in tl.static_range(FIRST, LAST + 1):
            if step != 0 or SEARCH == "4over6":
                other_bits, other_divisor = _step_scale(base + step, amax, factor, BLOCK_SCALE, SEARCH)
                error = _squared_error(even, odd, amax, other_divisor, BLOCK_SCALE)
                is_better = error < least
                least = tl.where(is_better, error, least)
                bits = tl.where(is_better, other_bits, bits)
                divisor = tl.where(is_better, other_divisor, divisor)
    return bits, divisor


@triton.jit
def encode_int8(x, factor):
    """Rows of fp32 ``[rows, values]`` as two's complement of one e4m3 scale a row, at or above what ``amax`` needs.

    ``factor`` is ``[rows]``, the tensor scale. Returns uint8 codes and the bits of the scales, ``[rows]``.
    """
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # sorts like the values, and NaN above all of them
    amax = tl.max(magnitude, axis=1).to(tl.float32, bitcast=True)
    wanted = tl.math.div_rn(tl.math.div_rn(amax, tl.full(amax.shape, 127.0, tl.float32)), factor)
    bits = encode_float8(wanted, "e4m3")
    is_below = decode_float8(bits, "e4m3", False).to(tl.float32) < wanted
    bits = tl.minimum(bits.to(tl.int32) + is_below.to(tl.int32), 0x7E)
    bits = tl.where(amax != amax, 0x7F, bits).to(tl.uint8)
    divisor = decode_float8(bits, "e4m3", False).to(tl.float32) * factor
    is_usable = (divisor > 0)[:, None]  # neither 0 nor NaN
    code = tl.math.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    code = tl.where(is_usable, tl.minimum(tl.maximum(code, -127.0), 127.0), 0.0)
    # A sum with this is rounded to an integer, which is in its lowest bits.
    rounded = (code + 12582912.0).to(tl.int32, bitcast=True)
    return (rounded & 0xFF).to(tl.uint8), bits


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
        Two ``[BLOCK_N, WIDTH]`` tiles in ``DTYPE``, times ``code_factor(CODEC, DTYPE)``: for e2m1 the even and the odd
        values of head_dim, otherwise twice the same tile.
    """
    ROW: tl.constexpr = HEAD_DIM // 2 if CODEC == "e2m1" else HEAD_DIM
    slots = start + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, WIDTH)
    is_slot = (slots < end)[:, None]
    is_read = is_slot
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
        scale_bits = tl.where(is_slot, scale_bits, 0)
        scale = decode_block_scale(scale_bits, BLOCK_SCALE, DTYPE, NATIVE)
        scale = tl.broadcast_to(scale[:, :, None], (BLOCK_N, BLOCKS_PADDED, PER_SCALE)).reshape(BLOCK_N, WIDTH)
        even, odd = decode_e2m1(packed, DTYPE, NATIVE)
        return even * scale, odd * scale
    elif CODEC == "int8":
        tile = tl.arange(0, BLOCK_N // 32)[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
        row_bits = untile(tl.load(block_scale + start + tile, mask=start + tile // 32 * 32 < end, other=0))
        row_scale = decode_block_scale(tl.where(is_slot, row_bits, 0), BLOCK_SCALE, DTYPE, NATIVE)
        # 7 and 4 bits, and multiples of 2**-15 at least: exact in fp16.
        value = packed.to(tl.int8, bitcast=True).to(DTYPE) * (row_scale * code_factor(CODEC, DTYPE)).to(DTYPE)
        return value, value
    elif CODEC == "bf16":
        if DTYPE == tl.bfloat16:
            return packed, packed
        else:
            value = to_float32(packed)
            return value, value
    else:
        value = decode_float8(packed, CODEC, NATIVE).to(DTYPE)
        return value, value


@triton.jit
def kept_rows(kept_slots, slots, end, KEEP: tl.constexpr, KEEP_PADDED: tl.constexpr):
    """The row of what is kept in bf16 for each of ``slots`` (``[n, 1]``): ``[n, 1]``, -1 where none is, or from ``end``
    on."""
    row = tl.arange(0, KEEP_PADDED)[None, :]
    held = tl.load(kept_slots + row, mask=row < KEEP, other=-1)
    return tl.max(tl.where((held == slots) & (slots < end), row, -1), 1)[:, None]


@triton.jit
def kept_range(kept_slots, KEEP: tl.constexpr, KEEP_PADDED: tl.constexpr):
    """The lowest and the highest slot from ``KEEP`` on that is kept."""
    row = tl.arange(0, KEEP_PADDED)
    held = tl.load(kept_slots + row, mask=row < KEEP, other=-1)
    return tl.min(tl.where(held >= KEEP, held, 2147483647), 0), tl.max(held, 0)


@triton.jit
def put_kept(
    first,
    second,
    kept,
    kept_slots,
    scale,
    head,
    start,
    end,
    CODEC: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEEP: tl.constexpr,
    KEEP_PADDED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What :func:`load_values` returned, with the slots (below ``end``) that are kept in bf16 as they are there.

    ``kept`` points to the head's rows. They are brought to where the decoded ones are, before the tensor scale.
    """
    slots = (start + tl.arange(0, first.shape[0]))[:, None]
    columns = tl.arange(0, first.shape[1])[None, :]
    row = kept_rows(kept_slots, slots, end, KEEP, KEEP_PADDED)
    is_kept = row >= 0
    factor = code_factor(CODEC, DTYPE)
    if scale is not None:
        factor = factor / tl.load(scale + head)
    PER_COLUMN: tl.constexpr = 2 if CODEC == "e2m1" else 1
    at = kept + row * HEAD_DIM + columns * PER_COLUMN
    is_read = is_kept & (columns * PER_COLUMN < HEAD_DIM)
    first = tl.where(is_kept, _scaled_to(tl.load(at, mask=is_read, other=0.0), factor, DTYPE), first)
    if CODEC == "e2m1":
        second = tl.where(is_kept, _scaled_to(tl.load(at + 1, mask=is_read, other=0.0), factor, DTYPE), second)
        return first, second
    else:
        return first, first


@triton.jit
def _scaled_to(x, factor, DTYPE: tl.constexpr):
    """``x * factor``, saturating in fp16."""
    x = to_float32(x) * factor
    if DTYPE == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(DTYPE)


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
def _has_float8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def native_float8(device: torch.device) -> bool:
    """Whether kernels on ``device`` may use the hardware's e4m3 conversions."""
    return device.type == "cuda" and not interpreting() and torch.version.hip is None and _has_float8(device)


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def check_buffers(what: str, fmt: KVFormat, buffers: KVBuffers) -> None:
    """Raise ``ValueError`` where the buffers of ``what`` ("key", "value") are not what the kernels address."""
    for name, needed in (("block_scale", fmt.block > 0), ("scale", fmt.tensor_scale), ("centre", fmt.centred)):
        if (getattr(buffers, name) is not None) != needed:
            state = "needed" if needed else "not part of this format"
            raise ValueError(f"{what}_{name} is {'missing' if needed else 'given'} and {state} ({fmt.name!r})")
    if not all(tensor.is_contiguous() for tensor in buffers.tensors()):
        raise ValueError(f"{what} buffers must be contiguous; codes have strides {buffers.codes.stride()}")
