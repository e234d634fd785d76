"""Device functions that decode values, as :mod:`kvpass.reference` does, and put in their place what is kept in bf16."""

from __future__ import annotations

import triton
import triton.language as tl

from kvpass.kernels.codecs import round_to, to_float32


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
