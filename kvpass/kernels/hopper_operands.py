"""From packed bytes to the operands of the two products of the Hopper decode kernel, the products, and the softmax.

:mod:`kvpass.kernels.hopper_decode` explains the order of the fragments and the arithmetic.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kvpass.kernels.hopper_layouts import (
    ACCUMULATOR,
    OPERAND_A,
    OPERAND_B,
    key_layout,
    key_scale_layout,
    split_words,
    value_layout,
    value_scale_layout,
)

LOG2E = gl.constexpr(1.4426950408889634)
_LAG = gl.constexpr(8.0)  # how far scores may exceed the running maximum, in powers of two, before it is moved


# Decoders as PTX -----------------------------------------------------------------------------------------------------
# Each returns the text of an inline block whose outputs are pairs of 16-bit values in 32-bit registers.

_DECLARE = gl.constexpr("{.reg .b32 m,n,t,u,v,w,x,y,z; .reg .b16 p,q;\n")


@gluon.constexpr_function
def _decode_e2m1(word: str, outs: list[str], scale: str, wide: bool) -> str:
    """Eight e2m1 codes of ``word`` to four pairs, times ``scale``.

    The pairs are the low nibbles of bytes 0 and 1, those of bytes 2 and 3, then the high nibbles likewise; for bf16
    (``wide``) those of bytes 0 and 2, of bytes 1 and 3. For fp16 the sign, exponent and mantissa bits move to their
    places in the high byte, which gives the value times 2^-14. For bf16 one multiplication moves the three low bits up
    by 6 and the sign by 12, which gives the value times 2^-126 (the smallest of them subnormal) and is multiplied back.
    """
    text = ""
    if wide:
        text += f"shr.u32 t,{word},8;\n"
        for source, low, high in ((word, outs[0], outs[2]), ("t", outs[1], outs[3])):
            for nibbles, shifts, out in (("0x000F000F", "0x1040", low), ("0x00F000F0", "0x0104", high)):
                text += f"and.b32 x,{source},{nibbles}; mul.lo.u32 x,x,{shifts}; and.b32 x,x,0x81C081C0; "
                text += f"mul.bf16x2 x,x,u; mul.bf16x2 {out},x,{scale};\n"
        return "mov.b32 u,0x7E807E80; " + text
    for nibble in (0, 1):
        if nibble:
            text += f"shr.u32 t,{word},3; and.b32 t,t,0x0E0E0E0E; lop3.b32 x,{word},0x80808080,t,0xEA; "
        else:
            text += f"shl.b32 t,{word},1; and.b32 t,t,0x0E0E0E0E; shl.b32 u,{word},4; lop3.b32 x,u,0x80808080,t,0xEA; "
        text += f"prmt.b32 y,x,0,0x1404; mul.f16x2 {outs[2 * nibble]},y,{scale}; "
        text += f"prmt.b32 z,x,0,0x3424; mul.f16x2 {outs[2 * nibble + 1]},z,{scale};\n"
    return text


@gluon.constexpr_function
def _decode_bytes(word: str, outs: list[str], codec: str) -> str:
    """Four fp8 or int8 codes of ``word`` to two pairs of fp16: bytes 0 and 1, bytes 2 and 3."""
    if codec == "int8":  # with its top bit turned, a byte is 128 more; behind 0x64 it is the fp16 number 1024 more
        text = f"xor.b32 t,{word},0x80808080; mov.b32 u,0x64806480; prmt.b32 x,t,0x64646464,0x4140; "
        text += "prmt.b32 y,t,0x64646464,0x4342; "
        return text + f"sub.f16x2 {outs[0]},x,u; sub.f16x2 {outs[1]},y,u;\n"
    return f"mov.b32 {{p,q}},{word}; cvt.rn.f16x2.{codec}x2 {outs[0]},p; cvt.rn.f16x2.{codec}x2 {outs[1]},q;\n"


@gluon.constexpr_function
def _key_asm(codec, wide):
    """Two neighbouring words of one row (and their scales, as pairs of one value twice) to pairs of one row."""
    if codec == "e2m1":
        text, words = _DECLARE, ("$8", "$9")
        if wide:
            text, words = text + "prmt.b32 v,$8,0,0x3120; prmt.b32 w,$9,0,0x3120;\n", ("v", "w")
        text += _decode_e2m1(words[0], ["$0", "$1", "$2", "$3"], "$10", wide)
        return text + _decode_e2m1(words[1], ["$4", "$5", "$6", "$7"], "$11", wide) + "}"
    return _DECLARE + _decode_bytes("$4", ["$0", "$1"], codec) + _decode_bytes("$5", ["$2", "$3"], codec) + "}"


@gluon.constexpr_function
def _value_asm(codec, wide):
    """The same word of two neighbouring positions (and, twice, the pair of their scales) to pairs of one dimension."""
    mix = "prmt.b32 v,$%d,$%d,0x5140; prmt.b32 w,$%d,$%d,0x7362;\n"
    if wide:
        mix = "prmt.b32 v,$%d,$%d,0x5410; prmt.b32 w,$%d,$%d,0x7632;\n"
    if codec == "e2m1":
        text = _DECLARE + mix % (8, 9, 8, 9)
        text += _decode_e2m1("v", ["$0", "$2", "$1", "$3"], "$10", wide)
        return text + _decode_e2m1("w", ["$4", "$6", "$5", "$7"], "$10", wide) + "}"
    text = _DECLARE + mix % (4, 5, 4, 5)
    return text + _decode_bytes("v", ["$0", "$1"], codec) + _decode_bytes("w", ["$2", "$3"], codec) + "}"


@gluon.constexpr_function
def _asm_constraints(codec, scales):
    outputs = 8 if codec == "e2m1" else 4
    return "=&r," * outputs + "r," * (1 + scales) + "r"


@gluon.constexpr_function
def _decode_scales(word: str, low: str, high: str, kind: str) -> str:
    """Four block scales to two pairs, in fp16 (e4m3) or bf16 (e8m0, where 0 is the subnormal 2^-127 and 255 is NaN)."""
    if kind == "e4m3":
        return f"mov.b32 {{p,q}},{word}; cvt.rn.f16x2.e4m3x2 {low},p; cvt.rn.f16x2.e4m3x2 {high},q;\n"
    text = ""
    for selector, out in ((0x4140, low), (0x4342, high)):
        # Bit 8 of t is set unless the byte is 0 or 255; both of those have 0x40 in place of a missing mantissa.
        text += f"prmt.b32 x,{word},0,{selector}; add.u32 t,x,0x00010001; and.b32 t,t,0x00FE00FE; "
        text += "add.u32 t,t,0x00FE00FE; not.b32 t,t; shr.u32 t,t,2; and.b32 t,t,0x00400040; shl.b32 x,x,7; "
        text += f"or.b32 {out},x,t;\n"
    return text


@gluon.constexpr_function
def _key_scale_asm(kind):
    """Two words and the byte selector of the lane to the scales of positions r, r + 8, r + 16, r + 24, each twice."""
    text = _DECLARE + "prmt.b32 m,$4,$5,$6;\n" + _decode_scales("m", "y", "z", kind)
    text += "prmt.b32 $0,y,y,0x1010; prmt.b32 $1,y,y,0x3232; prmt.b32 $2,z,z,0x1010; prmt.b32 $3,z,z,0x3232;"
    return text + "}"


@gluon.constexpr_function
def _value_scale_asm(kind):
    """Two words to four pairs (position, position + 1): those of 0 and 16, then those of 8 and 24."""
    return _DECLARE + _decode_scales("$4", "$0", "$2", kind) + _decode_scales("$5", "$1", "$3", kind) + "}"


@gluon.jit
def _decode(ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, args, COUNT: gl.constexpr, WIDE: gl.constexpr):
    """Run a decoder on pairs of elements: COUNT tensors of fp16, or of bf16 if WIDE."""
    if WIDE:
        return gl.inline_asm_elementwise(ASM, CONSTRAINTS, args, [gl.bfloat16] * COUNT, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise(ASM, CONSTRAINTS, args, [gl.float16] * COUNT, is_pure=True, pack=2)


# Operands ------------------------------------------------------------------------------------------------------------


@gluon.jit
def slot_of(position):
    """The slot of its tile that a position stands for (its own inverse)."""
    return (position & ~3) | ((position & 1) << 1) | ((position >> 1) & 1)


@gluon.jit
def _key_scales(buffer, WORDS: gl.constexpr, BLOCKS: gl.constexpr, KIND: gl.constexpr):
    """Tiled scales [BLOCKS, 4, 2] in shared memory -> [32, WORDS] int32, the scale of every word as a pair, twice."""
    layout: gl.constexpr = key_scale_layout(WORDS, BLOCKS)
    packed = gl.expand_dims(buffer.load(gl.SliceLayout(2, layout)), 2)
    parity = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    selector = (0x6420 + 0x1111 * parity)[None, None, :, None]
    low, high = gl.inline_asm_elementwise(
        _key_scale_asm(KIND), "=&r,=&r,=&r,=&r,r,r,r,r", [packed, selector], [gl.int32] * 2, is_pure=True, pack=2
    )
    scales = gl.permute(gl.join(low, high), [4, 3, 1, 2, 0])  # position bits 4, 3, 2 and 1, 0; block
    return _per_word(gl.reshape(scales, [32, BLOCKS]), key_layout(WORDS), WORDS, BLOCKS)


@gluon.jit
def _value_scales(buffer, hidden_from, WORDS: gl.constexpr, BLOCKS: gl.constexpr, KIND: gl.constexpr):
    """Tiled scales [BLOCKS, 4, 2] in shared memory -> [32, WORDS] int32, for every word the scales of its pair of
    positions; 0 from slot ``hidden_from`` on."""
    packed = buffer.load(value_scale_layout(WORDS, BLOCKS))
    low, high = gl.inline_asm_elementwise(
        _value_scale_asm(KIND), "=&r,=&r,=&r,=&r,r,r", [packed], [gl.int32] * 2, is_pure=True, pack=2
    )
    scales = gl.join(low, high)  # block; position bits 2 and 1, 4, 3
    scales = gl.reshape(gl.permute(scales, [2, 3, 1, 0]), [16, BLOCKS])
    if hidden_from < 32:  # a NaN past the length would survive a probability of zero
        slot = slot_of(2 * gl.arange(0, 16, gl.SliceLayout(1, scales.type.layout)))
        seen = gl.where(slot < hidden_from, 0xFFFF, 0) | gl.where(slot + 2 < hidden_from, -0x10000, 0)
        scales = scales & seen[:, None]
    scales = gl.permute(gl.join(scales, scales), [0, 2, 1])
    return _per_word(gl.reshape(scales, [32, BLOCKS]), value_layout(WORDS, True), WORDS, BLOCKS)


@gluon.jit
def _per_word(scales, LAYOUT: gl.constexpr, WORDS: gl.constexpr, BLOCKS: gl.constexpr):
    """[32, BLOCKS] -> [32, WORDS] in LAYOUT: every word gets the scale of its block; registers are renamed only."""
    split: gl.constexpr = split_words(LAYOUT, WORDS, BLOCKS)
    scales = gl.convert_layout(scales, gl.SliceLayout(2, split), assert_trivial=True)
    scales, _ = gl.broadcast(gl.expand_dims(scales, 2), gl.zeros([32, BLOCKS, WORDS // BLOCKS], scales.dtype, split))
    return gl.convert_layout(gl.reshape(scales, [32, WORDS]), LAYOUT, assert_trivial=True)


@gluon.jit
def _key_operand(words, scales, HEAD_DIM: gl.constexpr, CODEC: gl.constexpr, WIDE: gl.constexpr):
    """Packed [32, WORDS] and its scales -> [32, HEAD_DIM] A operand, dimensions in the order of the query."""
    WORDS: gl.constexpr = words.shape[1]
    RUN: gl.constexpr = min(4, WORDS // 4)
    if CODEC == "e2m1":
        o = _decode(_key_asm(CODEC, WIDE), _asm_constraints(CODEC, 2), (words, scales), 8, WIDE)
        x = gl.join(
            gl.join(gl.join(o[0], o[4]), gl.join(o[2], o[6])), gl.join(gl.join(o[1], o[5]), gl.join(o[3], o[7]))
        )
        # slot; repeat, c, run, byte bit 0; word, nibble, byte bit 1
        x = gl.reshape(x, [32, WORDS // (4 * RUN), 4, RUN // 2, 2, 2, 2, 2])
        x = gl.permute(x, [0, 1, 3, 5, 6, 7, 2, 4])
    else:
        o = _decode(_key_asm(CODEC, WIDE), _asm_constraints(CODEC, 0), (words,), 4, WIDE)
        x = gl.join(gl.join(o[0], o[2]), gl.join(o[1], o[3]))
        # slot; repeat, c, run, byte bit 0; word, byte bit 1
        x = gl.reshape(x, [32, WORDS // (4 * RUN), 4, RUN // 2, 2, 2, 2])
        x = gl.permute(x, [0, 1, 3, 5, 6, 2, 4])
    return gl.convert_layout(gl.reshape(x, [32, HEAD_DIM]), OPERAND_A, assert_trivial=True)


@gluon.jit
def query_operand(query, WORDS: gl.constexpr, CODEC: gl.constexpr):
    """[COLUMNS, HEAD_DIM] in `query_layout` -> [HEAD_DIM, COLUMNS] B operand, in the order of `_key_operand`."""
    COLUMNS: gl.constexpr = query.shape[0]
    HEAD_DIM: gl.constexpr = query.shape[1]
    RUN: gl.constexpr = min(4, WORDS // 4)
    if CODEC == "e2m1":  # column; repeat, c, run, word, byte bits 1 and 0, nibble
        x = gl.reshape(query, [COLUMNS, WORDS // (4 * RUN), 4, RUN // 2, 2, 2, 2, 2])
        x = gl.permute(x, [1, 3, 4, 7, 5, 2, 6, 0])
    else:  # column; repeat, c, run, word, byte bits 1 and 0
        x = gl.reshape(query, [COLUMNS, WORDS // (4 * RUN), 4, RUN // 2, 2, 2, 2])
        x = gl.permute(x, [1, 3, 4, 5, 2, 6, 0])
    return gl.convert_layout(gl.reshape(x, [HEAD_DIM, COLUMNS]), OPERAND_B, assert_trivial=True)


@gluon.jit
def _value_operand(words, scales, HEAD_DIM: gl.constexpr, CODEC: gl.constexpr, WIDE: gl.constexpr):
    """Packed [32, WORDS] and its scales -> [HEAD_DIM, 32] A operand, dimensions in the order of `store_part`."""
    WORDS: gl.constexpr = words.shape[1]
    words = gl.convert_layout(words, value_layout(WORDS, True), assert_trivial=True)
    if CODEC == "e2m1":
        o = _decode(_value_asm(CODEC, WIDE), _asm_constraints(CODEC, 2), (words, scales), 8, WIDE)
        x = gl.join(
            gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3])), gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
        )
        x = gl.reshape(x, [32, 8, WORDS // 8, 2, 2, 2])  # slot; r, word; nibble, byte bits 0 and 1
        x = gl.permute(x, [2, 5, 4, 3, 1, 0])
    else:
        o = _decode(_value_asm(CODEC, WIDE), _asm_constraints(CODEC, 0), (words,), 4, WIDE)
        x = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
        x = gl.reshape(x, [32, 8, WORDS // 8, 2, 2])  # slot; r, word; byte bits 0 and 1
        x = gl.permute(x, [2, 4, 3, 1, 0])
    return gl.convert_layout(gl.reshape(x, [HEAD_DIM, 32]), OPERAND_A, assert_trivial=True)


@gluon.jit
def _probability_operand(p, WIDE: gl.constexpr):
    """[32, COLUMNS] fp32 accumulator fragment -> B operand."""
    COLUMNS: gl.constexpr = p.shape[1]
    p = p.to(gl.bfloat16) if WIDE else p.to(gl.float16)
    y = _decode("movmatrix.sync.aligned.m8n8.trans.b16 $0,$1;", "=r,r", (p,), 1, WIDE)[0]
    y = gl.permute(gl.reshape(y, [4, 8, COLUMNS // 8, 8]), [0, 3, 2, 1])
    return gl.convert_layout(gl.reshape(y, [32, COLUMNS]), OPERAND_B, assert_trivial=True)


# Softmax -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _lane_max(scores):
    """[32, COLUMNS] -> [8, COLUMNS], the largest of a lane's four rows."""
    return gl.max(gl.reshape(scores, [4, 8, scores.shape[1]]), axis=0)


@gluon.jit
def lane_sum(p):
    """[32, COLUMNS] -> [8, COLUMNS], the sum of a lane's four rows."""
    return gl.sum(gl.reshape(p, [4, 8, p.shape[1]]), axis=0)


@gluon.jit
def move_maximum(scores, factor, output, maximum, total):
    """Raise the running maximum, and rescale what was summed under it, if a score exceeds it by more than 2^_LAG.

    Most tiles leave it alone: exact softmax does not need the maximum, only exponents within range. ``total`` holds
    partial sums per lane.
    """
    best = _lane_max(scores)
    rows: gl.constexpr = gl.SliceLayout(0, best.type.layout)
    best = best * gl.convert_layout(factor, rows, assert_trivial=True)[None, :]
    exceeds = best > gl.convert_layout(maximum, rows, assert_trivial=True)[None, :] + _LAG
    if gl.max(gl.reshape(gl.where(exceeds, 1, 0), [8 * scores.shape[1]]), axis=0) > 0:
        raised = gl.convert_layout(gl.max(best, axis=0), gl.SliceLayout(0, ACCUMULATOR), assert_trivial=True)
        raised = gl.maximum(maximum, raised)
        shrink = gl.exp2(maximum - raised)
        output = output * shrink[None, :]
        total = total * gl.convert_layout(shrink, gl.SliceLayout(0, total.type.layout), assert_trivial=True)[None, :]
        maximum = raised
    return output, maximum, total


@gluon.jit
def score_tile(
    buffer, scale_buffer, q,
    HEAD_DIM: gl.constexpr, CODEC: gl.constexpr, SCALE: gl.constexpr, WORDS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """``K q^T`` of one tile: [32, COLUMNS] fp32."""
    words = buffer.load(key_layout(WORDS))
    scales = words
    if BLOCKS:
        scales = _key_scales(scale_buffer, WORDS, BLOCKS, SCALE)
    k = _key_operand(words, scales, HEAD_DIM, CODEC, SCALE == "e8m0")
    return mma_v2(k, q, gl.zeros([32, q.shape[1]], gl.float32, ACCUMULATOR))


@gluon.jit
def weigh_tile(
    buffer, scale_buffer, p, output, hidden_from,
    HEAD_DIM: gl.constexpr, CODEC: gl.constexpr, SCALE: gl.constexpr, WORDS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """``output + V^T p`` of one tile."""
    words = buffer.load(value_layout(WORDS, False))
    scales = words
    if BLOCKS:
        scales = _value_scales(scale_buffer, hidden_from, WORDS, BLOCKS, SCALE)
    v = _value_operand(words, scales, HEAD_DIM, CODEC, SCALE == "e8m0")
    return mma_v2(v, _probability_operand(p, SCALE == "e8m0"), output)


@gluon.jit
def load_mask(row, stride, slot, length):
    """One row of the mask at ``slot``, as int32; 0 from ``length`` on."""
    return gl.load(row + slot * stride, mask=slot < length, other=0).to(gl.int32)


@gluon.jit
def load_added(row, stride, slot, length):
    """One row of an added mask at ``slot``, in powers of two; 0 from ``length`` on."""
    return gl.load(row + slot * stride, mask=slot < length, other=0).to(gl.float32) * LOG2E


@gluon.jit
def _first_seen(row, stride, begin, max_len, COUNT: gl.constexpr):
    """The first of COUNT slots from ``begin`` on that one row of the mask does not hide; their end if it hides all."""
    slot = begin + gl.arange(0, COUNT, gl.BlockedLayout([min(16, COUNT // 32)], [32], [1], [0]))
    cell = gl.load(row + slot * stride, mask=slot < max_len, other=0)
    if row.dtype.element_ty.is_floating():
        seen = cell > -1e30
    else:
        seen = cell != 0
    return gl.min(gl.where(seen, slot, begin + COUNT), axis=0)


@gluon.jit
def leading_hidden_tiles(row, stride, length, max_len):
    """How many tiles one row of the mask hides altogether before the first that it does not."""
    end = 128  # of what was looked at: little at first, since most rows hide nothing
    first = _first_seen(row, stride, 0, max_len, 128)
    while (first == end) & (end < length):
        first = _first_seen(row, stride, end, max_len, 1024)
        end += 1024
    return first // 32


@gluon.jit
def newest_tiles(kept_slots, KEEP: gl.constexpr):
    """The first and the last tile with a slot from ``KEEP`` on that is kept in bf16."""
    row = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
    slot = gl.load(kept_slots + row, mask=row < KEEP, other=-1)
    return gl.min(gl.where(slot >= KEEP, slot, 0x7FFFFFFF), axis=0) // 32, gl.max(slot, axis=0) // 32


@gluon.jit
def is_not_kept(slot, kept_slots, KEEP: gl.constexpr):
    """Whether each of ``slot`` is none of those that are kept in bf16."""
    result = slot >= 0
    for row in range(KEEP):
        result = result & (slot != gl.load(kept_slots + row))
    return result


@gluon.jit
def load_row_scales(scales, tile, slot, length):
    """The e4m3 scales of whole rows, of a tile's slots, as fp32; 0 from ``length`` on."""
    place = ((slot >> 2) & 1) << 4 | (slot & 1) << 3 | ((slot >> 4) & 1) << 2 | ((slot >> 3) & 1) << 1 | (slot >> 1) & 1
    bits = gl.load(scales + tile * 32 + place, mask=tile * 32 + slot < length, other=0)
    return bits.to(gl.float8e4nv, bitcast=True).to(gl.float32)
