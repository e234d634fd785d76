"""Device functions that encode values, and choose block scales, as :mod:`kvpass.reference` does: the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from kvpass.kernels.decode import decode_block_scale, decode_float8


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
def _raised(x, is_raised):
    """The next number above ``x`` (fp32, not negative) where ``is_raised``; what is not finite stays."""
    is_raised &= x < float("inf")
    return (x.to(tl.int32, bitcast=True) + is_raised.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _product(divisor, MIDPOINT: tl.constexpr, TIE_RISES: tl.constexpr):
    """``MIDPOINT * divisor`` in fp32, and whether the least number at or above the product that is not rounded
    (``TIE_RISES``), or above it, is the next one: :func:`_raised`. So it is with twice the midpoint and the product.

    A midpoint has at most three bits. So both parts of the product are exact, their sum is rounded once, and what is
    left of the larger part is exact too, contracted to fused operations or not.
    """
    high = (divisor.to(tl.int32, bitcast=True) & -8).to(tl.float32, bitcast=True)
    low = (divisor - high) * MIDPOINT
    product = high * MIDPOINT + low
    rest = product - high * MIDPOINT
    return product, low > rest if TIE_RISES else low >= rest


@triton.jit
def encode_e2m1(even, odd, divisor, TIES_TO_EVEN: tl.constexpr):
    """Nearest e2m1 codes of ``x / divisor``, saturating, sign in bit 3; ties to even or away from zero. Those of
    ``even`` in bits 0 to 3 and those of ``odd`` in bits 4 to 7 of int32; 0 where the divisor is 0 or NaN.

    ``even`` and ``odd`` are two fp32 tiles ``[blocks, values]``, ``divisor`` is ``[blocks]``: ``2**-124`` or more, or a
    power of two. A value is compared with midpoint times divisor, which is worked out once per block; a division per
    value made the store half as fast.
    """
    # Nothing is above NaN. (That zero is one too keeps the signs from being found early, and from taking registers.)
    divisor = tl.where(divisor > 0, divisor, float("nan"))
    zero = tl.where(divisor > 0, 0.0, float("nan"))[:, None]
    # The tie between codes n and n + 1 rises, to even, where n is odd. A quarter of the divisor is exact.
    to_1 = _raised(divisor * 0.25, (divisor > 0) & TIES_TO_EVEN)[:, None]
    product, is_below = _product(divisor, 0.75, True)
    to_2 = _raised(product, is_below)[:, None]
    product, is_below = _product(divisor, 1.25, not TIES_TO_EVEN)
    to_3 = _raised(product, is_below)[:, None]
    to_5 = _raised(2 * product, is_below)[:, None]
    to_7 = _raised(4 * product, is_below)[:, None]
    product, is_below = _product(divisor, 1.75, True)
    to_4 = _raised(product, is_below)[:, None]
    to_6 = _raised(2 * product, is_below)[:, None]
    codes = tl.zeros(even.shape, tl.int32)
    codes = _add_code(codes, even, zero, to_1, to_2, to_3, to_4, to_5, to_6, to_7, 1)
    return _add_code(codes, odd, zero, to_1, to_2, to_3, to_4, to_5, to_6, to_7, 16)


@triton.jit
def _add_code(codes, x, zero, to_1, to_2, to_3, to_4, to_5, to_6, to_7, UNIT: tl.constexpr):
    """``codes``, and in units of ``UNIT`` how many of seven ascending numbers ``|x|`` reaches, found by halves, and 8
    where ``x`` is negative.

    What a comparison decides is selected at once: few predicates live at a time, and a GPU has seven.
    """
    magnitude = tl.abs(x)
    is_above = magnitude >= to_4
    codes = tl.where(is_above, codes + 4 * UNIT, codes)
    middle = tl.where(is_above, to_6, to_2)
    lower = tl.where(is_above, to_5, to_1)
    upper = tl.where(is_above, to_7, to_3)
    is_above = magnitude >= middle
    codes = tl.where(is_above, codes + 2 * UNIT, codes)
    codes = tl.where(magnitude >= tl.where(is_above, upper, lower), codes + UNIT, codes)
    return tl.where(x < zero, codes + 8 * UNIT, codes)


@triton.jit
def _rule(amax, factor, wanted: tl.constexpr, BLOCK_SCALE: tl.constexpr, SCALE_RULE: tl.constexpr):
    """The e4m3 or e8m0 bits, int32, of the scale that brings ``amax`` to ``wanted`` (6 unless a search asks)."""
    if BLOCK_SCALE == "e4m3":
        # A quarter is exact, or rounded in the same way.
        part = amax * 0.25 if wanted == 4.0 else tl.math.div_rn(amax, tl.full(amax.shape, wanted, tl.float32))
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
    """What ``|x| * inverse`` is rounded by, as :mod:`kvpass.reference` has it: sums of its squares are exact.

    All is shifted by ``ALIGN``, a multiple of every step. The power is of the quotient before it is put on the grid:
    where that lifts it to the next power, it is a code of both steps.
    """
    quotient = tl.abs(x) * inverse
    scaled = quotient + ALIGN
    power = (tl.maximum(quotient, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    rounded = tl.fma(power, -6291456.0, tl.fma(power, 6291456.0, scaled))
    return scaled - tl.minimum(rounded, ALIGN + 6.0)


@triton.jit
def _squared_error(even, odd, amax, divisor, BLOCK_SCALE: tl.constexpr):
    REACH: tl.constexpr = 8.0 if BLOCK_SCALE == "e4m3" else 16.0
    ALIGN: tl.constexpr = 49152.0 if BLOCK_SCALE == "e4m3" else 196608.0
    inverse = tl.math.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    first = _rounding_error(even, inverse[:, None], ALIGN)
    second = _rounding_error(odd, inverse[:, None], ALIGN)
    error = tl.sum(tl.fma(first, first, second * second), axis=1) * divisor * divisor
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
        even, odd: ``[blocks, values]`` fp32, the values of each block in two halves.
        factor: ``[blocks]``, the tensor scale of each block (1 without one).
    """
    magnitude = tl.maximum(tl.abs(even), tl.abs(odd), propagate_nan=tl.PropagateNan.ALL)
    # As integers, the bits of magnitudes sort like their values, and a NaN above all of them.
    amax = tl.max(magnitude.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
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
