"""Decode attention on Hopper: quantized K and V go from their packed bytes straight into tensor-core fragments.

Written in Triton's Gluon dialect, because plain Triton moves dequantized tiles through shared memory, and at the
bandwidth of an H200 that traffic alone is more than a multiprocessor can do. One warp is one program; a program takes
tiles of 32 slots of one KV head, and all its query rows (GQA group times query length, padded to 8 or 16) are the
columns of the matrix product. :func:`supports` says which calls this module takes.

Fragment order
--------------
An ``m16n8k16`` product has its A operand spread over a warp so that lane ``(r, c)``, number ``4 r + c``, holds rows
``r`` and ``r + 8`` and, of every 16 columns, ``2 c``, ``2 c + 1``, ``2 c + 8`` and ``2 c + 9``. Both products take the
cache as A:

* Scores, ``S^T = K q^T``: rows are slots, columns of A are dimensions. The sum over dimensions may run in any order, so
  lane ``(r, c)`` simply reads its share of the packed row (16 bytes in one piece: 32 e2m1 or 16 wider codes; 8 bytes
  when the row is shorter) and calls them its columns. The query is brought into that order once (:func:`_load_query`).
* Output, ``O^T = V^T P^T``: rows are dimensions, columns of A are slots. Lane ``(r, c)`` reads the ``r``-th eighth of
  the rows of slots ``2 c, 2 c + 1`` (and 8, 16, 24 later), and interleaves the bytes of two neighbouring slots before
  decoding, which gives pairs (slot, slot + 1) of one dimension. Which dimension a row stands for is undone when the
  output is stored.

The scores leave the first product as accumulators, lane ``(r, c)`` holding slot ``r``, columns ``2 c, 2 c + 1``, and
the second product wants probabilities as B operand, slots ``2 c, 2 c + 1`` of column ``r``: ``movmatrix`` transposes
them. Nothing else crosses lanes. In the code the same is said with linear layouts; ``reshape`` and ``permute`` only
rename registers, and ``convert_layout(assert_trivial=True)`` is the compiler's proof of that.

Slots and positions
-------------------
Inside a tile everything is indexed by *position* ``p``, which stands for slot ``_slot_of(p)``: the two low bits are
exchanged. K, V, their scales, the probabilities and the mask all use it. Tiled block scales
(:data:`kvpass.formats.SCALE_ORDER`) have the scale of block ``b``, position ``p`` in byte
``32 b + 8 (p >> 1 & 3) + 2 (p >> 3) + (p & 1)``, so that the scales a lane needs for V are 8 neighbouring bytes, and
those it needs for K are every other byte of 8.

Arithmetic
----------
Codes are decoded to fp16 and multiplied by their e4m3 block scale there, which is exact; e2m1 comes out as value times
2^-14, the bits being moved and nothing converted. int8 has one scale for a slot's whole row, which multiplies its
scores, or its probabilities. e8m0 block scales reach exponents that only bf16 holds, so there the
products run in bf16. Sums and softmax are fp32. Query rows are scaled by a power of two into [1, 2) before fp16, and
every factor that is common to a head (tensor scales, 2^14, softmax scale, log2 e) multiplies scores and output only.
A softcap takes the place of that factor of the scores; attention sinks join in the second kernel, with the parts.

Splits
------
The slots of one head are divided among ``splits`` programs, a number that depends on shapes and the device only; the
length is read on the device. A program reads its share in order but starts somewhere inside it: programs that walked
the cache in step, a power of two apart, made the memory 6% slower. A second kernel adds the parts up, always in the
same order; it is launched early (programmatic dependent launch), so that launching it costs nothing.

While a program works on one tile, asynchronous copies bring the next one into its other buffer, packed as it is. More
buffers did not help: what hides latency is programs, and 16 of them fit a multiprocessor.

A rotated query comes from a small kernel just before. This one is launched early too, and waits for it only when its
own first copies are on their way.

Slots that are kept in bf16, the first and the newest, are hidden from these programs; the second kernel, which is
launched before it has something to add up, weighs them meanwhile.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvpass.formats import WHOLE_HEAD, KVFormat, get_format

TESTED_TRITON = ("3.6",)
TRITON = ".".join(triton.__version__.split(".")[:2])

TILE = 32
MIN_TILES_PER_SPLIT = 4
MAX_SPLITS = 1024
MASK_DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32)
# What a multiprocessor of a Hopper GPU has; a program takes 1 KB of shared memory beyond what it asks for.
SHARED_BYTES, SHARED_BYTES_PER_PROGRAM = 228 * 1024, 1024
REGISTERS = 65536

_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # renamed in 3.9

_LOG2E = gl.constexpr(1.4426950408889634)
_NOTHING_SEEN = gl.constexpr(-1e30)  # the running maximum before any score
_UNPACKED = gl.constexpr(2.0**14)  # multiplies decoded e2m1 codes back
_LAG = gl.constexpr(8.0)  # how far scores may exceed the running maximum, in powers of two, before it is moved

_ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
_OPERAND_A = gl.constexpr(gl.DotOperandLayout(0, _ACCUMULATOR.value, 2))
_OPERAND_B = gl.constexpr(gl.DotOperandLayout(1, _ACCUMULATOR.value, 2))


# Layouts -------------------------------------------------------------------------------------------------------------
# A tile of codes is [32 positions, words] of 32-bit words. A tile of block scales is [blocks, 4, 2] words: the block,
# bits 2 and 1 of the position, bit 4; the byte in the word has bits 3 and 0.


@gluon.constexpr_function
def _bits(unit: int, count: int) -> list[int]:
    """``unit, 2 unit, 4 unit, ...``: the basis vectors that count to ``count`` in steps of ``unit``."""
    return [unit << i for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def _linear(registers: list[list[int]], lanes: list[list[int]], shape: list[int]) -> gl.DistributedLinearLayout:
    return gl.DistributedLinearLayout(registers, lanes, [], [], shape)


@gluon.constexpr_function
def _key_words(words: int) -> tuple[list[int], list[int]]:
    """Bits of the word index that count a lane's registers, and those that count ``c``, for K."""
    run = min(4, words // 4)
    return _bits(1, run) + _bits(4 * run, words // (4 * run)), _bits(run, 4)


@gluon.constexpr_function
def _value_words(words: int) -> tuple[list[int], list[int]]:
    """Bits of the word index that count a lane's registers, and those that count ``r``, for V."""
    return _bits(1, words // 8), _bits(words // 8, 8)


@gluon.constexpr_function
def _key_layout(words):
    registers, lanes = _key_words(words)
    return _linear(
        [[0, w] for w in registers] + [[8, 0], [16, 0]],
        [[0, w] for w in lanes] + [[1, 0], [2, 0], [4, 0]],
        [TILE, words],
    )


@gluon.constexpr_function
def _value_layout(words, pairs_first):
    """``pairs_first``: two neighbouring positions are neighbouring registers, as the decoder takes them."""
    registers, lanes = _value_words(words)
    row, pair = [[0, w] for w in registers], [[1, 0]]
    return _linear(
        (pair + row if pairs_first else row + pair) + [[8, 0], [16, 0]],
        [[2, 0], [4, 0]] + [[0, w] for w in lanes],
        [TILE, words],
    )


@gluon.constexpr_function
def _copy_layout(words):
    """16 bytes a lane; neighbouring lanes take neighbouring bytes of the cache."""
    bits = [[0, w] for w in _bits(4, words // 4)] + [[2, 0], [1, 0], [4, 0], [8, 0], [16, 0]]
    return _linear([[0, 1], [0, 2]] + bits[5:], bits[:5], [TILE, words])


@gluon.constexpr_function
def _key_shared(words):
    """Rows of K in shared memory; where two rows do not fit 128 bytes, odd rows have their 64-byte halves exchanged."""
    if words < 32:
        return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = [[1, 16], [2, 0], [4, 0], [8, 0], [16, 0]]
    return gl.SharedLinearLayout([[0, w] for w in _bits(1, words)] + rows)


@gluon.constexpr_function
def _value_shared(words):
    """Rows of V in shared memory, swizzled so that the positions 0, 2, 4, 6 that four lanes read lie in other banks."""
    swizzle = {8: (0, 0), 16: (0, 8), 32: (8, 16), 64: (4, 16)}[words]
    rows = [[2, swizzle[0]], [4, swizzle[1]], [1, 0], [8, 0], [16, 0]]
    return gl.SharedLinearLayout([[0, w] for w in _bits(1, words)] + rows)


@gluon.constexpr_function
def _scale_copy_layout(blocks):
    bits = [[0, 0, 1], [0, 1, 0], [0, 2, 0]] + [[b, 0, 0] for b in _bits(1, blocks)]
    own = (blocks // 4).bit_length() - 1
    return _linear(bits[:own], bits[own:], [blocks, 4, 2])


@gluon.constexpr_function
def _scale_shared():
    return gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])


@gluon.constexpr_function
def _key_scale_layout(words, blocks):
    """[blocks, bits 1 and 2 of the position, bit 0, word]: a lane's K words say which blocks it needs."""
    registers, lanes = _key_words(words)
    run = words // blocks
    return _linear(
        [[0, 0, 0, 1]] + [[w // run, 0, 0, 0] for w in registers if w >= run],
        [[w // run, 0, 0, 0] for w in lanes] + [[0, 0, 1, 0], [0, 1, 0, 0], [0, 2, 0, 0]],
        [blocks, 4, 2, 2],
    )


@gluon.constexpr_function
def _value_scale_layout(words, blocks):
    registers, lanes = _value_words(words)
    run = words // blocks
    return _linear(
        [[0, 0, 1]] + [[w // run, 0, 0] for w in registers if w >= run],
        [[0, 1, 0], [0, 2, 0]] + [[w // run, 0, 0] for w in lanes],
        [blocks, 4, 2],
    )


@gluon.constexpr_function
def _split_words(layout, words, blocks):
    """``layout`` of [32, words] as a layout of [32, blocks, words // blocks]."""
    run = words // blocks

    def split(bases):
        return [[p, w // run, w % run] for p, w in bases]

    return _linear(split(layout.reg_bases), split(layout.lane_bases), [TILE, blocks, run])


@gluon.constexpr_function
def _query_layout(words, head_dim, columns):
    """[columns, head_dim]: lane ``(r, c)`` holds the dimensions of its K words, of column ``r``."""
    registers, lanes = _key_words(words)
    values = head_dim // words
    return _linear(
        [[0, d] for d in _bits(1, values)]
        + [[0, values * w] for w in registers]
        + [[n, 0] for n in _bits(8, columns // 8)],
        [[0, values * w] for w in lanes] + [[1, 0], [2, 0], [4, 0]],
        [columns, head_dim],
    )


@gluon.constexpr_function
def _output_layout(head_dim, columns):
    """[columns, head_dim]: lane ``(r, c)`` holds the ``r``-th eighth of columns ``2 c, 2 c + 1``."""
    return _linear(
        [[0, d] for d in _bits(1, head_dim // 8)] + [[1, 0]] + [[n, 0] for n in _bits(8, columns // 8)],
        [[2, 0], [4, 0]] + [[0, d] for d in _bits(head_dim // 8, 8)],
        [columns, head_dim],
    )


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
def _slot_of(position):
    """The slot of its tile that a position stands for (its own inverse)."""
    return (position & ~3) | ((position & 1) << 1) | ((position >> 1) & 1)


@gluon.jit
def _key_scales(buffer, WORDS: gl.constexpr, BLOCKS: gl.constexpr, KIND: gl.constexpr):
    """Tiled scales [BLOCKS, 4, 2] in shared memory -> [32, WORDS] int32, the scale of every word as a pair, twice."""
    layout: gl.constexpr = _key_scale_layout(WORDS, BLOCKS)
    packed = gl.expand_dims(buffer.load(gl.SliceLayout(2, layout)), 2)
    parity = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    selector = (0x6420 + 0x1111 * parity)[None, None, :, None]
    low, high = gl.inline_asm_elementwise(
        _key_scale_asm(KIND), "=&r,=&r,=&r,=&r,r,r,r,r", [packed, selector], [gl.int32] * 2, is_pure=True, pack=2
    )
    scales = gl.permute(gl.join(low, high), [4, 3, 1, 2, 0])  # position bits 4, 3, 2 and 1, 0; block
    return _per_word(gl.reshape(scales, [32, BLOCKS]), _key_layout(WORDS), WORDS, BLOCKS)


@gluon.jit
def _value_scales(buffer, hidden_from, WORDS: gl.constexpr, BLOCKS: gl.constexpr, KIND: gl.constexpr):
    """Tiled scales [BLOCKS, 4, 2] in shared memory -> [32, WORDS] int32, for every word the scales of its pair of
    positions; 0 from slot ``hidden_from`` on."""
    packed = buffer.load(_value_scale_layout(WORDS, BLOCKS))
    low, high = gl.inline_asm_elementwise(
        _value_scale_asm(KIND), "=&r,=&r,=&r,=&r,r,r", [packed], [gl.int32] * 2, is_pure=True, pack=2
    )
    scales = gl.join(low, high)  # block; position bits 2 and 1, 4, 3
    scales = gl.reshape(gl.permute(scales, [2, 3, 1, 0]), [16, BLOCKS])
    if hidden_from < 32:  # a NaN past the length would survive a probability of zero
        slot = _slot_of(2 * gl.arange(0, 16, gl.SliceLayout(1, scales.type.layout)))
        seen = gl.where(slot < hidden_from, 0xFFFF, 0) | gl.where(slot + 2 < hidden_from, -0x10000, 0)
        scales = scales & seen[:, None]
    scales = gl.permute(gl.join(scales, scales), [0, 2, 1])
    return _per_word(gl.reshape(scales, [32, BLOCKS]), _value_layout(WORDS, True), WORDS, BLOCKS)


@gluon.jit
def _per_word(scales, LAYOUT: gl.constexpr, WORDS: gl.constexpr, BLOCKS: gl.constexpr):
    """[32, BLOCKS] -> [32, WORDS] in LAYOUT: every word gets the scale of its block; registers are renamed only."""
    split: gl.constexpr = _split_words(LAYOUT, WORDS, BLOCKS)
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
    return gl.convert_layout(gl.reshape(x, [32, HEAD_DIM]), _OPERAND_A, assert_trivial=True)


@gluon.jit
def _query_operand(query, WORDS: gl.constexpr, CODEC: gl.constexpr):
    """[COLUMNS, HEAD_DIM] in `_query_layout` -> [HEAD_DIM, COLUMNS] B operand, in the order of `_key_operand`."""
    COLUMNS: gl.constexpr = query.shape[0]
    HEAD_DIM: gl.constexpr = query.shape[1]
    RUN: gl.constexpr = min(4, WORDS // 4)
    if CODEC == "e2m1":  # column; repeat, c, run, word, byte bits 1 and 0, nibble
        x = gl.reshape(query, [COLUMNS, WORDS // (4 * RUN), 4, RUN // 2, 2, 2, 2, 2])
        x = gl.permute(x, [1, 3, 4, 7, 5, 2, 6, 0])
    else:  # column; repeat, c, run, word, byte bits 1 and 0
        x = gl.reshape(query, [COLUMNS, WORDS // (4 * RUN), 4, RUN // 2, 2, 2, 2])
        x = gl.permute(x, [1, 3, 4, 5, 2, 6, 0])
    return gl.convert_layout(gl.reshape(x, [HEAD_DIM, COLUMNS]), _OPERAND_B, assert_trivial=True)


@gluon.jit
def _value_operand(words, scales, HEAD_DIM: gl.constexpr, CODEC: gl.constexpr, WIDE: gl.constexpr):
    """Packed [32, WORDS] and its scales -> [HEAD_DIM, 32] A operand, dimensions in the order of `_store_part`."""
    WORDS: gl.constexpr = words.shape[1]
    words = gl.convert_layout(words, _value_layout(WORDS, True), assert_trivial=True)
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
    return gl.convert_layout(gl.reshape(x, [HEAD_DIM, 32]), _OPERAND_A, assert_trivial=True)


@gluon.jit
def _probability_operand(p, WIDE: gl.constexpr):
    """[32, COLUMNS] fp32 accumulator fragment -> B operand."""
    COLUMNS: gl.constexpr = p.shape[1]
    p = p.to(gl.bfloat16) if WIDE else p.to(gl.float16)
    y = _decode("movmatrix.sync.aligned.m8n8.trans.b16 $0,$1;", "=r,r", (p,), 1, WIDE)[0]
    y = gl.permute(gl.reshape(y, [4, 8, COLUMNS // 8, 8]), [0, 3, 2, 1])
    return gl.convert_layout(gl.reshape(y, [32, COLUMNS]), _OPERAND_B, assert_trivial=True)


# Softmax -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _lane_max(scores):
    """[32, COLUMNS] -> [8, COLUMNS], the largest of a lane's four rows."""
    return gl.max(gl.reshape(scores, [4, 8, scores.shape[1]]), axis=0)


@gluon.jit
def _lane_sum(p):
    """[32, COLUMNS] -> [8, COLUMNS], the sum of a lane's four rows."""
    return gl.sum(gl.reshape(p, [4, 8, p.shape[1]]), axis=0)


@gluon.jit
def _move_maximum(scores, factor, output, maximum, total):
    """Raise the running maximum, and rescale what was summed under it, if a score exceeds it by more than 2^_LAG.

    Most tiles leave it alone: exact softmax does not need the maximum, only exponents within range. ``total`` holds
    partial sums per lane.
    """
    best = _lane_max(scores)
    rows: gl.constexpr = gl.SliceLayout(0, best.type.layout)
    best = best * gl.convert_layout(factor, rows, assert_trivial=True)[None, :]
    exceeds = best > gl.convert_layout(maximum, rows, assert_trivial=True)[None, :] + _LAG
    if gl.max(gl.reshape(gl.where(exceeds, 1, 0), [8 * scores.shape[1]]), axis=0) > 0:
        raised = gl.convert_layout(gl.max(best, axis=0), gl.SliceLayout(0, _ACCUMULATOR), assert_trivial=True)
        raised = gl.maximum(maximum, raised)
        shrink = gl.exp2(maximum - raised)
        output = output * shrink[None, :]
        total = total * gl.convert_layout(shrink, gl.SliceLayout(0, total.type.layout), assert_trivial=True)[None, :]
        maximum = raised
    return output, maximum, total


@gluon.jit
def _scores(
    buffer, scale_buffer, q,
    HEAD_DIM: gl.constexpr, CODEC: gl.constexpr, SCALE: gl.constexpr, WORDS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """``K q^T`` of one tile: [32, COLUMNS] fp32."""
    words = buffer.load(_key_layout(WORDS))
    scales = words
    if BLOCKS:
        scales = _key_scales(scale_buffer, WORDS, BLOCKS, SCALE)
    k = _key_operand(words, scales, HEAD_DIM, CODEC, SCALE == "e8m0")
    return mma_v2(k, q, gl.zeros([32, q.shape[1]], gl.float32, _ACCUMULATOR))


@gluon.jit
def _weigh(
    buffer, scale_buffer, p, output, hidden_from,
    HEAD_DIM: gl.constexpr, CODEC: gl.constexpr, SCALE: gl.constexpr, WORDS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """``output + V^T p`` of one tile."""
    words = buffer.load(_value_layout(WORDS, False))
    scales = words
    if BLOCKS:
        scales = _value_scales(scale_buffer, hidden_from, WORDS, BLOCKS, SCALE)
    v = _value_operand(words, scales, HEAD_DIM, CODEC, SCALE == "e8m0")
    return mma_v2(v, _probability_operand(p, SCALE == "e8m0"), output)


@gluon.jit
def _load_mask(row, stride, slot, length):
    """One row of the mask at ``slot``, as int32; 0 from ``length`` on."""
    return gl.load(row + slot * stride, mask=slot < length, other=0).to(gl.int32)


@gluon.jit
def _load_added(row, stride, slot, length):
    """One row of an added mask at ``slot``, in powers of two; 0 from ``length`` on."""
    return gl.load(row + slot * stride, mask=slot < length, other=0).to(gl.float32) * _LOG2E


@gluon.jit
def _kept_tiles(kept_slots, KEEP: gl.constexpr):
    """The first and the last tile with a slot from ``KEEP`` on that is kept in bf16."""
    row = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
    slot = gl.load(kept_slots + row, mask=row < KEEP, other=-1)
    return gl.min(gl.where(slot >= KEEP, slot, 0x7FFFFFFF), axis=0) // 32, gl.max(slot, axis=0) // 32


@gluon.jit
def _is_not_kept(slot, kept_slots, KEEP: gl.constexpr):
    """Whether each of ``slot`` is none of those that are kept in bf16."""
    result = slot >= 0
    for row in range(KEEP):
        result = result & (slot != gl.load(kept_slots + row))
    return result


@gluon.jit
def _load_row_scales(scales, tile, slot, length):
    """The e4m3 scales of whole rows, of a tile's slots, as fp32; 0 from ``length`` on."""
    place = ((slot >> 2) & 1) << 4 | (slot & 1) << 3 | ((slot >> 4) & 1) << 2 | ((slot >> 3) & 1) << 1 | (slot >> 1) & 1
    bits = gl.load(scales + tile * 32 + place, mask=tile * 32 + slot < length, other=0)
    return bits.to(gl.float8e4nv, bitcast=True).to(gl.float32)


# Decode kernel -------------------------------------------------------------------------------------------------------


@gluon.jit
def _copy_rows(buffer, codes, tile, length, WORDS: gl.constexpr):
    """Start copying a tile of codes; rows from ``length`` on become zero and are not read."""
    layout: gl.constexpr = _copy_layout(WORDS)
    position = gl.arange(0, 32, gl.SliceLayout(1, layout))
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    # What differs between the copies of one lane is added last, so that it becomes part of the instruction.
    at = codes + tile * (32 * WORDS) + (_slot_of(position & 7) * WORDS)[:, None] + word[None, :]
    at += ((position & 24) * WORDS)[:, None]
    if (tile + 1) * 32 <= length:
        _async_load(buffer, at)
    else:
        _async_load(buffer, at, mask=(tile * 32 + _slot_of(position) < length)[:, None])


@gluon.jit
def _copy_scales(buffer, scales, tile, BLOCKS: gl.constexpr):
    """Start copying a tile of block scales."""
    layout: gl.constexpr = _scale_copy_layout(BLOCKS)
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    word = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    _async_load(buffer, scales + tile * (8 * BLOCKS) + (block * 8 + pair * 2 + word))


@gluon.jit
def _copy_tile(
    key, key_scales, value, value_scales, buffer, key_codes, key_block_scale, value_codes, value_block_scale,
    tile, length,
    K_WORDS: gl.constexpr, K_BLOCKS: gl.constexpr, V_WORDS: gl.constexpr, V_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Start copying one tile of K, V and their scales into buffer 0 or 1, as one group."""
    _copy_rows(key.index(buffer), key_codes, tile, length, K_WORDS)
    _copy_rows(value.index(buffer), value_codes, tile, length, V_WORDS)
    if K_BLOCKS:
        _copy_scales(key_scales.index(buffer), key_block_scale, tile, K_BLOCKS)
    if V_BLOCKS:
        _copy_scales(value_scales.index(buffer), value_block_scale, tile, V_BLOCKS)
    async_copy.commit_group()


@gluon.jit
def _load_query(
    query, rows_used, row0, stride_head, stride_token,
    HEAD_DIM: gl.constexpr, COLUMNS: gl.constexpr, QUERY_LENGTH: gl.constexpr, WORDS: gl.constexpr,
    CODEC: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The query rows of this program as B operand, and [COLUMNS] fp32 powers of two that multiply their scores back."""
    layout: gl.constexpr = _query_layout(WORDS, HEAD_DIM, COLUMNS)
    row = row0 + gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    start = (row // QUERY_LENGTH) * stride_head + (row % QUERY_LENGTH) * stride_token
    x = gl.load(query + start[:, None] + dim[None, :], mask=(row < rows_used)[:, None], other=0.0)
    if WIDE:
        x = x.to(gl.bfloat16)
        power = gl.full([COLUMNS], 1.0, gl.float32, gl.SliceLayout(1, layout))
    else:
        x = x.to(gl.float32)
        bits = gl.max(gl.abs(x), axis=1).to(gl.int32, bitcast=True) & 0x7F800000
        bits = gl.minimum(gl.maximum(bits, 0x00800000), 0x7E800000)
        power = bits.to(gl.float32, bitcast=True)
        x = (x * (0x7F000000 - bits).to(gl.float32, bitcast=True)[:, None]).to(gl.float16)
    return _query_operand(x, WORDS, CODEC), gl.convert_layout(power, gl.SliceLayout(0, _ACCUMULATOR))


@gluon.jit
def _store_part(
    partial, statistics, part, output, maximum, total, rows, row0,
    HEAD_DIM: gl.constexpr, CODEC: gl.constexpr,
):  # fmt: skip
    """Store what this program summed: [rows, HEAD_DIM] output, and its maximum and total per row."""
    COLUMNS: gl.constexpr = output.shape[1]
    if CODEC == "e2m1":  # word, byte bits 1 and 0, nibble; r; column
        x = gl.permute(gl.reshape(output, [HEAD_DIM // 64, 2, 2, 2, 8, COLUMNS]), [5, 4, 0, 1, 2, 3])
    else:  # word, byte bits 1 and 0; r; column
        x = gl.permute(gl.reshape(output, [HEAD_DIM // 32, 2, 2, 8, COLUMNS]), [4, 3, 0, 1, 2])
    layout: gl.constexpr = _output_layout(HEAD_DIM, COLUMNS)
    x = gl.convert_layout(gl.reshape(x, [COLUMNS, HEAD_DIM]), layout, assert_trivial=True)
    base = part.to(gl.int64) * rows + row0
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    at = partial + base * HEAD_DIM + row[:, None] * HEAD_DIM + dim[None, :]
    gl.store(at, x, mask=(row0 + row < rows)[:, None])
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, _ACCUMULATOR))
    total = gl.convert_layout(gl.sum(total, axis=0), gl.SliceLayout(0, _ACCUMULATOR), assert_trivial=True)
    gl.store(statistics + (base + column) * 2, maximum, mask=row0 + column < rows)
    gl.store(statistics + (base + column) * 2 + 1, total, mask=row0 + column < rows)


@gluon.jit(do_not_specialize=["splits"])
def _decode_kernel(
    query, key_codes, key_block_scale, key_scale, value_codes, value_block_scale, kept_slots, positions, mask,
    partial, statistics, softmax_scale, softcap, max_len, splits, kv_heads,
    query_stride_batch, query_stride_head, query_stride_token,
    mask_stride_batch, mask_stride_head, mask_stride_token, mask_stride_slot,
    HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, QUERY_LENGTH: gl.constexpr, COLUMNS: gl.constexpr,
    K_CODEC: gl.constexpr, K_SCALE: gl.constexpr, K_BLOCK: gl.constexpr, K_TENSOR_SCALE: gl.constexpr,
    V_CODEC: gl.constexpr, V_SCALE: gl.constexpr, V_BLOCK: gl.constexpr,
    MASK: gl.constexpr, CAUSAL: gl.constexpr, KEEP: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """One warp: one KV head, one share of the slots, one tile of query rows. See :func:`attention` for the tensors.

    ``MASK`` is "none", "row" (one row of the mask for all columns) or "columns", or one of the latter two with "added"
    before it, where the mask is added to the scores. The grid is (batch * kv_heads, splits, tiles of query rows).
    """
    if not ROTATED:
        tl.extra.cuda.gdc_launch_dependents()
    K_WORDS: gl.constexpr = HEAD_DIM // 8 if K_CODEC == "e2m1" else HEAD_DIM // 4
    V_WORDS: gl.constexpr = HEAD_DIM // 8 if V_CODEC == "e2m1" else HEAD_DIM // 4
    K_BLOCKS: gl.constexpr = HEAD_DIM // K_BLOCK if K_BLOCK else 0
    V_BLOCKS: gl.constexpr = HEAD_DIM // V_BLOCK if V_BLOCK else 0
    K_WIDE: gl.constexpr = K_SCALE == "e8m0"
    ROWS: gl.constexpr = GROUP * QUERY_LENGTH
    IS_ADDED: gl.constexpr = MASK == "added row" or MASK == "added columns"
    head = gl.program_id(0)
    split = gl.program_id(1)
    row0 = gl.program_id(2) * COLUMNS

    length = (gl.load(positions + (QUERY_LENGTH - 1)) + 1).to(gl.int32)
    tiles = (length + 31) // 32
    share = (tiles + splits - 1) // splits
    start = split * share
    stop = gl.minimum(start + share, tiles)
    if (start < stop) & (length <= max_len):
        # The first copies start before anything else.
        tile = start + (head * 5 + split * 11) % (stop - start)
        row = head.to(gl.int64) * max_len
        scale_tile = head.to(gl.int64) * ((max_len + 31) // 32)
        k_codes = key_codes.to(gl.pointer_type(gl.int32)) + row * K_WORDS
        v_codes = value_codes.to(gl.pointer_type(gl.int32)) + row * V_WORDS
        k_block_scale = key_block_scale.to(gl.pointer_type(gl.int32)) + scale_tile * (8 * K_BLOCKS)
        v_block_scale = value_block_scale.to(gl.pointer_type(gl.int32)) + scale_tile * (8 * V_BLOCKS)
        key = gl.allocate_shared_memory(gl.int32, [2, 32, K_WORDS], _key_shared(K_WORDS))
        value = gl.allocate_shared_memory(gl.int32, [2, 32, V_WORDS], _value_shared(V_WORDS))
        key_scales = key
        value_scales = value
        if K_BLOCKS:
            key_scales = gl.allocate_shared_memory(gl.int32, [2, K_BLOCKS, 4, 2], _scale_shared())
        if V_BLOCKS:
            value_scales = gl.allocate_shared_memory(gl.int32, [2, V_BLOCKS, 4, 2], _scale_shared())
        _copy_tile(
            key, key_scales, value, value_scales, 0, k_codes, k_block_scale, v_codes, v_block_scale,
            tile, length, K_WORDS, K_BLOCKS, V_WORDS, V_BLOCKS,
        )  # fmt: skip

        if ROTATED:  # by a kernel that this one was launched behind, and that the next one may read the result of too
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        batch = head // kv_heads
        kv_head = head % kv_heads
        q, factor = _load_query(
            query + batch.to(gl.int64) * query_stride_batch + (kv_head * GROUP).to(gl.int64) * query_stride_head,
            ROWS, row0, query_stride_head, query_stride_token,
            HEAD_DIM, COLUMNS, QUERY_LENGTH, K_WORDS, K_CODEC, K_WIDE,
        )  # fmt: skip
        if K_CODEC == "e2m1" and not K_WIDE:
            softmax_scale = softmax_scale * _UNPACKED
        if K_TENSOR_SCALE:
            softmax_scale = softmax_scale * gl.load(key_scale + kv_head)
        factor = gl.maximum(factor * (softmax_scale * _LOG2E), 1e-37)  # never 0: it multiplies -inf
        inner = factor
        if softcap is not None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), of scores over the cap
            inner = factor * (2.0 / softcap)
            factor = gl.full([COLUMNS], 1.0, gl.float32, gl.SliceLayout(0, _ACCUMULATOR)) * (softcap * _LOG2E)
        outer = factor
        if IS_ADDED:  # then scores are brought to powers of two before the mask, not with the maximum
            factor = gl.full([COLUMNS], 1.0, gl.float32, gl.SliceLayout(0, _ACCUMULATOR))

        # Column j is query row row0 + j: query head row // QUERY_LENGTH of the group, token row % QUERY_LENGTH.
        query_row = gl.minimum(row0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, _ACCUMULATOR)), ROWS - 1)
        limit = gl.full([COLUMNS], 0, gl.int32, gl.SliceLayout(0, _ACCUMULATOR)) + length
        open_until = length  # every column sees the slots before this one, as far as the mask lets it
        if CAUSAL:
            limit = (gl.load(positions + query_row % QUERY_LENGTH) + 1).to(gl.int32)
            open_until = (gl.load(positions) + 1).to(gl.int32)
        mask_row = positions if MASK == "none" else mask + batch.to(gl.int64) * mask_stride_batch
        mask_column = gl.full([COLUMNS], 0, gl.int64, gl.SliceLayout(0, _ACCUMULATOR))
        if MASK == "columns" or MASK == "added columns":
            mask_column += (kv_head * GROUP + query_row // QUERY_LENGTH).to(gl.int64) * mask_stride_head
            mask_column += (query_row % QUERY_LENGTH).to(gl.int64) * mask_stride_token
        slot = _slot_of(gl.arange(0, 32, gl.SliceLayout(1, _ACCUMULATOR)))
        lane_slot = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        seen = lane_slot  # of the mask of this tile, one slot a lane; loaded a tile ahead
        if MASK == "row":
            seen = _load_mask(mask_row, mask_stride_slot, tile * 32 + lane_slot, length)
        added = slot
        if MASK == "added row":
            added = _load_added(mask_row, mask_stride_slot, tile * 32 + slot, length)

        kept_tiles: gl.constexpr = (KEEP + 31) // 32  # those with the first slots; and, here, those with the newest
        kept_low = 0
        kept_high = 0
        if KEEP:
            kept_low, kept_high = _kept_tiles(kept_slots, KEEP)

        # Scales of rows are loaded a tile ahead too. Half of one, times a probability, is within fp16.
        key_row_scales = key_block_scale + scale_tile * 32
        value_row_scales = value_block_scale + scale_tile * 32
        key_row_scale = slot
        value_row_scale = slot
        if K_CODEC == "int8":
            key_row_scale = _load_row_scales(key_row_scales, tile, slot, length)
        if V_CODEC == "int8":
            value_row_scale = _load_row_scales(value_row_scales, tile, slot, length) * 0.5

        output = gl.zeros([HEAD_DIM, COLUMNS], gl.float32, _ACCUMULATOR)
        maximum = gl.full([COLUMNS], _NOTHING_SEEN, gl.float32, gl.SliceLayout(0, _ACCUMULATOR))
        total = _lane_sum(gl.zeros([32, COLUMNS], gl.float32, _ACCUMULATOR))
        buffer = 0
        for step in range(start, stop):
            following = gl.where(tile + 1 == stop, start, tile + 1)
            async_copy.wait_group(0)
            if step + 1 < stop:
                _copy_tile(
                    key, key_scales, value, value_scales, 1 - buffer, k_codes, k_block_scale, v_codes, v_block_scale,
                    following, length, K_WORDS, K_BLOCKS, V_WORDS, V_BLOCKS,
                )  # fmt: skip
            scores = _scores(
                key.index(buffer), key_scales.index(buffer), q, HEAD_DIM, K_CODEC, K_SCALE, K_WORDS, K_BLOCKS
            )
            if K_CODEC == "int8":
                scores = scores * key_row_scale[:, None]
                key_row_scale = _load_row_scales(key_row_scales, following, slot, length)
            if softcap is not None:
                scores = 1.0 - 2.0 / (gl.exp2(scores * inner[None, :]) + 1.0)
            if IS_ADDED:
                scores = scores * outer[None, :]

            whole = (tile + 1) * 32 <= open_until
            if MASK == "row":
                whole = whole & (gl.min(seen, axis=0) > 0)
                seen = _load_mask(mask_row, mask_stride_slot, following * 32 + lane_slot, length)
            elif MASK == "added row":
                scores += added[:, None]
                added = _load_added(mask_row, mask_stride_slot, following * 32 + slot, length)
            elif MASK == "columns" or MASK == "added columns":
                whole = tile < 0  # never
            if KEEP:
                whole = whole & (tile >= kept_tiles) & ((tile < kept_low) | (tile > kept_high))
            if not whole:
                at = tile * 32 + slot
                visible = at[:, None] < limit[None, :]
                if KEEP:
                    visible = visible & _is_not_kept(at, kept_slots, KEEP)[:, None]
                if MASK == "row":
                    visible = visible & (_load_mask(mask_row, mask_stride_slot, at, length) > 0)[:, None]
                elif MASK == "columns":
                    cell = mask_row + at.to(gl.int64)[:, None] * mask_stride_slot + mask_column[None, :]
                    visible = visible & (gl.load(cell, mask=visible, other=0) != 0)
                elif MASK == "added columns":
                    cell = mask_row + at.to(gl.int64)[:, None] * mask_stride_slot + mask_column[None, :]
                    scores += gl.load(cell, mask=visible, other=0).to(gl.float32) * _LOG2E
                scores = gl.where(visible, scores, float("-inf"))

            output, maximum, total = _move_maximum(scores, factor, output, maximum, total)
            p = gl.exp2(scores * factor[None, :] - maximum[None, :])
            total += _lane_sum(p)
            if V_CODEC == "int8":
                p = p * value_row_scale[:, None]
                value_row_scale = _load_row_scales(value_row_scales, following, slot, length) * 0.5
            output = _weigh(
                value.index(buffer), value_scales.index(buffer), p, output, length - tile * 32,
                HEAD_DIM, V_CODEC, V_SCALE, V_WORDS, V_BLOCKS,
            )  # fmt: skip
            tile = following
            buffer = 1 - buffer
        _store_part(partial, statistics, head * splits + split, output, maximum, total, ROWS, row0, HEAD_DIM, V_CODEC)
    else:
        if ROTATED:  # no program ends before the rotation has
            tl.extra.cuda.gdc_wait()


# Adding the parts up --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial, statistics, out, value_scale, value_centre, sinks, positions, max_len, splits, kv_heads, factor,
    query, key_kept, value_kept, kept_slots, mask, softmax_scale,
    query_stride_batch, query_stride_head, query_stride_token,
    mask_stride_batch, mask_stride_head, mask_stride_token, mask_stride_slot,
    QUERY_LENGTH: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, BLOCK_DIM: tl.constexpr, TENSOR_SCALE: tl.constexpr,
    CAUSAL: tl.constexpr, KEEP: tl.constexpr, KEEP_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_DIM values of one query row, summed over the splits that had slots.

    ``out = factor * value_scale * sum_s(2^(m_s - m) partial_s) / (sum_s(2^(m_s - m) total_s) + 2^(sink - m))`` with
    ``m`` the largest of the ``m_s``, and the sink in powers of two, to which ``value_centre`` is added; NaN if the
    length does not fit the cache, 0 if no slot was visible. The KEEP slots that are kept in bf16 are one more split,
    worked out here from what is kept of them (``query`` and what follows).
    """
    head = tl.program_id(0) // ROWS
    row = tl.program_id(0) % ROWS
    length = (tl.load(positions + (QUERY_LENGTH - 1)) + 1).to(tl.int32)
    dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    kept_max = -1e30
    kept_total = 0.0
    kept_sum = tl.zeros([BLOCK_DIM], tl.float32)
    if KEEP:
        token = row % QUERY_LENGTH
        batch = (head // kv_heads).to(tl.int64)
        query_head = head % kv_heads * (ROWS // QUERY_LENGTH) + row // QUERY_LENGTH
        every = tl.arange(0, HEAD_DIM)
        start = batch * query_stride_batch + query_head * query_stride_head + token * query_stride_token
        q = tl.load(query + start + every).to(tl.float32) * (softmax_scale * 1.4426950408889634)
        limit = (tl.load(positions + token) + 1).to(tl.int32) if CAUSAL else length
        for first in range(0, KEEP, KEEP_AT_ONCE):
            place = first + tl.arange(0, KEEP_AT_ONCE)
            slot = tl.load(kept_slots + place, mask=place < KEEP, other=-1)
            visible = (slot >= 0) & (slot < limit)
            if mask is not None:
                cell = mask + batch * mask_stride_batch + query_head * mask_stride_head + token * mask_stride_token
                visible &= tl.load(cell + slot.to(tl.int64) * mask_stride_slot, mask=visible, other=0) != 0
            kept = ((head.to(tl.int64) * KEEP + place) * HEAD_DIM)[:, None]
            k = tl.load(key_kept + kept + every[None, :], mask=visible[:, None], other=0.0).to(tl.float32)
            v = tl.load(value_kept + kept + dim[None, :], mask=visible[:, None], other=0.0).to(tl.float32)
            score = tl.where(visible, tl.sum(q[None, :] * k, axis=1), float("-inf"))
            raised = tl.maximum(kept_max, tl.max(score, axis=0))
            shrink = tl.exp2(kept_max - raised)
            p = tl.exp2(score - raised)
            kept_sum = kept_sum * shrink + tl.sum(p[:, None] * v, axis=0)
            kept_total = kept_total * shrink + tl.sum(p, axis=0)
            kept_max = raised
    tl.extra.cuda.gdc_wait()  # for what the decode kernel writes; everything older was there before that one started
    tiles = (length + 31) // 32
    share = tl.maximum((tiles + splits - 1) // splits, 1)
    used = (tiles + share - 1) // share
    if length > max_len:
        used = 0
    split = tl.arange(0, BLOCK_SPLITS)
    at = (head.to(tl.int64) * splits + split) * ROWS + row
    parts = tl.load(partial + at[:, None] * HEAD_DIM + dim[None, :], mask=(split < used)[:, None], other=0.0)
    maximum = tl.load(statistics + at * 2, mask=split < used, other=-1e30)
    total = tl.load(statistics + at * 2 + 1, mask=split < used, other=0.0)
    largest = tl.max(maximum, axis=0)
    if KEEP:
        largest = tl.maximum(largest, kept_max)
    weight = tl.exp2(maximum - largest)
    total = tl.sum(weight * total, axis=0)
    if sinks is not None:
        query_head = (head % kv_heads) * (ROWS // QUERY_LENGTH) + row // QUERY_LENGTH
        total += tl.exp2(tl.load(sinks + query_head).to(tl.float32) * 1.4426950408889634 - largest)
    result = tl.sum(weight[:, None] * parts, axis=0)
    if TENSOR_SCALE:
        factor = factor * tl.load(value_scale + head % kv_heads)
    if KEEP:
        kept_weight = tl.exp2(kept_max - largest)
        total += kept_weight * kept_total
        result += (kept_weight / factor) * kept_sum
    result = result * (factor / total)
    if value_centre is not None:
        result += tl.load(value_centre + head % kv_heads * HEAD_DIM + dim)
    result = tl.where(total == 0.0, 0.0, result)
    result = tl.where(length > max_len, float("nan"), result)
    tl.store(out + tl.program_id(0).to(tl.int64) * HEAD_DIM + dim, result.to(out.dtype.element_ty))


# Launcher ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _device(index: int) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count


def _tile_bytes(fmt: KVFormat, head_dim: int) -> int:
    """Bytes of codes and block scales in one tile."""
    return TILE * (fmt.code_width(head_dim) + fmt.scale_width(head_dim))


def _factor_left(value: KVFormat) -> float:
    """What multiplies the sums of the first kernel back."""
    if value.codec == "int8":
        return 2.0
    return _UNPACKED.value if value.codec == "e2m1" and value.block_scale == "e4m3" else 1.0


def _programs_at_once(query: torch.Tensor, key: KVFormat, value: KVFormat, registers: int) -> int:
    """Programs that the device holds at the same time: registers and the two buffers of a program limit them."""
    head_dim, multiprocessors = query.shape[-1], _device(query.device.index)[1]
    shared = 2 * (_tile_bytes(key, head_dim) + _tile_bytes(value, head_dim)) + SHARED_BYTES_PER_PROGRAM
    return multiprocessors * min(REGISTERS // (32 * registers), SHARED_BYTES // shared)


def split_count(heads: int, max_len: int, resident: int) -> int:
    """Programs that share the slots of one KV head.

    Args:
        heads: Independent reductions: batch times KV heads times tiles of query rows.
        max_len: Slots of the cache.
        resident: Programs that run at the same time on the device.

    Returns:
        As many as run at once, if they fill at least 80% of the device; else the smallest count whose last wave of
        programs is at least 90% full, or the fullest within four waves. Never so many that a full cache gives a program
        fewer than ``MIN_TILES_PER_SPLIT`` tiles.
    """
    most = max(1, min(MAX_SPLITS, -(-max_len // (TILE * MIN_TILES_PER_SPLIT))))
    at_once = resident // heads
    if at_once >= most or at_once * heads >= 0.8 * resident:
        return min(at_once, most)
    best, best_fill = 1, 0.0
    for splits in range(1, min(most, max(1, 4 * resident // heads)) + 1):
        waves = -(-heads * splits // resident)
        fill = heads * splits / (waves * resident)
        if fill > best_fill:
            best, best_fill = splits, fill
        if fill >= 0.9:
            break
    return best


def supports(
    query: torch.Tensor,
    key_codes: torch.Tensor,
    key_block_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    key_centre: torch.Tensor | None,
    key_kept: torch.Tensor | None,
    key_kept_slots: torch.Tensor | None,
    value_codes: torch.Tensor,
    value_block_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    value_centre: torch.Tensor | None,
    value_kept: torch.Tensor | None,
    value_kept_slots: torch.Tensor | None,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    key_format: str,
    value_format: str,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> str | None:
    """Why :func:`attention` does not take this call; None if it does."""
    key, value = get_format(key_format), get_format(value_format)
    value_dim = value.head_dim(value_codes.shape[-1])
    kept = [0 if kept is None else kept.shape[2] for kept in (key_kept, value_kept)]
    return (
        supports_device(query.device)
        or supports_shapes(query, key_codes.shape[1], value_dim, mask, scale, key, value)
        or supports_form(mask, key, max(kept), softcap, sinks is not None)
        or _supports_memory(query, mask, key_codes, key_block_scale, value_codes, value_block_scale)
        or (f"{kept[0]} slots of K are kept and {kept[1]} of V" if kept[0] != kept[1] else None)
    )


def supports_device(device: torch.device) -> str | None:
    """:func:`supports`, as far as it depends on the GPU and on triton."""
    if TRITON not in TESTED_TRITON:
        return f"triton {TRITON}: Gluon is experimental, and this kernel tested with {', '.join(TESTED_TRITON)} only"
    if device.type != "cuda" or _device(device.index or 0)[0] != (9, 0):
        return "needs a GPU of compute capability 9.0"
    return None


def supports_shapes(
    query: torch.Tensor,
    kv_heads: int,
    value_dim: int,
    mask: torch.Tensor | None,
    scale: float,
    key: KVFormat,
    value: KVFormat,
) -> str | None:
    """:func:`supports`, as far as it depends on shapes and dtypes: fake tensors will do."""
    head_dim, group, query_length = query.shape[-1], query.shape[1] // kv_heads, query.shape[2]
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}; takes float16 and bfloat16"
    for fmt in (key, value):
        if fmt.codec not in ("e2m1", "e4m3", "e5m2", "int8"):
            return f"codec {fmt.codec} of format {fmt.name!r}; takes e2m1, e4m3, e5m2 and int8"
        if fmt.block not in (0, 16, WHOLE_HEAD) and not (fmt.block == 32 and head_dim >= 128):
            return f"format {fmt.name!r} has blocks of {fmt.block}; takes 16, whole heads, and 32 from head_dim 128"
        if fmt.block_scale == "e8m0" and query.dtype != torch.bfloat16:
            return f"format {fmt.name!r} computes in bfloat16, query is {query.dtype}"
    if head_dim not in (64, 128, 256) or value_dim != head_dim:
        return f"head_dim {head_dim} of K, {value_dim} of V; takes 64, 128 and 256, both alike"
    if query_length > 8 or group > 16:
        return f"{query_length} query tokens and a GQA group of {group}; takes up to 8 and 16"
    if mask is not None and (mask.dtype not in MASK_DTYPES or mask.dim() != 4):
        return f"mask is {mask.dtype} of {mask.dim()} dimensions; takes bool and floats of up to 32 bits, of 4"
    if not scale > 0:
        return f"scale is {scale}; takes a positive one"
    return None


def supports_form(mask: torch.Tensor | None, key: KVFormat, keep: int, softcap: float, has_sinks: bool) -> str | None:
    """:func:`supports`, as far as it depends on what is done with the scores."""
    if keep and (softcap or (mask is not None and mask.dtype != torch.bool)):
        return f"{keep} slots are kept in bf16; takes those with neither a softcap nor a mask that is added"
    if key.centred and (softcap or has_sinks):
        return f"K is centred ({key.name!r}), and a softcap or attention sinks need scores that are not shifted"
    return None


def _supports_memory(
    query: torch.Tensor, mask: torch.Tensor | None, key_codes: torch.Tensor, *others: torch.Tensor | None
) -> str | None:
    if mask is not None and mask.shape[3] < key_codes.shape[2]:
        return f"the mask covers {mask.shape[3]} slots of {key_codes.shape[2]}"
    if query.stride(-1) != 1:
        return "head_dim of the query is not contiguous"
    if not all(b is None or (b.is_contiguous() and b.data_ptr() % 16 == 0) for b in (key_codes, *others)):
        return "a cache buffer is not contiguous or not aligned to 16 bytes"
    return None


def attention(
    query: torch.Tensor,
    key_codes: torch.Tensor,
    key_block_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    key_centre: torch.Tensor | None,
    key_kept: torch.Tensor | None,
    key_kept_slots: torch.Tensor | None,
    value_codes: torch.Tensor,
    value_block_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    value_centre: torch.Tensor | None,
    value_kept: torch.Tensor | None,
    value_kept_slots: torch.Tensor | None,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    key_format: str,
    value_format: str,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a few query tokens to a quantized cache, as :func:`kvpass.ops.attention` has it.

    Rotations are the caller's: what is read is K and V as they are stored. K's centre is left out.

    Args:
        query: ``[batch, kv_heads * group, query_length, head_dim]`` fp16, bf16, or fp32 where it is rotated.
        key_codes ... value_kept_slots: As :class:`kvpass.formats.KVBuffers` says.
        positions: ``[query_length]`` int64; slots up to ``positions[-1]`` exist.
        mask: ``[batch or 1, heads or 1, query_length or 1, at least positions[-1] + 1]``, or None: bool (True attends),
            or fp32, fp16 or bf16 (added to the scores; what is below -1e30 hides its slot).
        scale: Multiplies the scores.
        is_causal: Query ``i`` sees slots up to ``positions[i]`` only.
        softcap: 0 for none, else scaled scores ``s`` become ``softcap * tanh(s / softcap)`` before the mask.
        sinks: None, or ``[heads]`` floating: logits that join the softmax of every row of their head.
        out: Where to write the result; None to allocate it in ``query.dtype``.

    Returns:
        ``[batch, heads, query_length, head_dim]``.
    """
    key, value = get_format(key_format), get_format(value_format)
    batch, heads, query_length, head_dim = query.shape
    kv_heads, max_len = key_codes.shape[1:3]
    group = heads // kv_heads
    rows = group * query_length
    columns = 8 if rows <= 8 or head_dim == 256 else 16
    row_tiles = triton.cdiv(rows, columns)
    registers = 128 if head_dim * columns <= 1024 else 168  # of a lane: 16 or 12 programs on a multiprocessor
    mask_kind, mask_strides = "none", (0, 0, 0, 0)
    if mask is not None:
        mask_strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
        mask_kind = "row" if mask_strides[1] == mask_strides[2] == 0 else "columns"
        mask_kind = mask_kind if mask.dtype == torch.bool else f"added {mask_kind}"

    resident = _programs_at_once(query, key, value, registers)
    splits = split_count(batch * kv_heads * row_tiles, max_len, resident)
    partial = query.new_empty(batch * kv_heads * splits * rows * head_dim, dtype=torch.float32)
    statistics = query.new_empty(batch * kv_heads * splits * rows * 2, dtype=torch.float32)
    out = query.new_empty(batch, heads, query_length, head_dim) if out is None else out
    keep = 0 if key_kept is None else key_kept.shape[2]
    block_splits = triton.next_power_of_2(splits)
    block_dim = max(8, min(head_dim, 16384 // block_splits))
    with torch.cuda.device_of(query):
        _decode_kernel[(batch * kv_heads, splits, row_tiles)](
            query,
            key_codes,
            key_codes if key_block_scale is None else key_block_scale,
            key_scale,
            value_codes,
            value_codes if value_block_scale is None else value_block_scale,
            positions if key_kept_slots is None else key_kept_slots,
            positions,
            mask,
            partial,
            statistics,
            scale,
            softcap or None,
            max_len,
            splits,
            kv_heads,
            *query.stride()[:3],
            *mask_strides,
            HEAD_DIM=head_dim,
            GROUP=group,
            QUERY_LENGTH=query_length,
            COLUMNS=columns,
            K_CODEC=key.codec,
            K_SCALE=key.block_scale,
            K_BLOCK=key.block,
            K_TENSOR_SCALE=key.tensor_scale,
            V_CODEC=value.codec,
            V_SCALE=value.block_scale,
            V_BLOCK=value.block,
            MASK=mask_kind,
            CAUSAL=is_causal and query_length > 1,
            KEEP=keep,
            ROTATED=key.rotated,
            num_warps=1,
            launch_pdl=key.rotated,
            maxnreg=registers,
        )
        _combine_kernel[(batch * heads * query_length, head_dim // block_dim)](
            partial,
            statistics,
            out,
            value_scale,
            value_centre,
            None if sinks is None else sinks.contiguous(),
            positions,
            max_len,
            splits,
            kv_heads,
            _factor_left(value),
            query,
            key_kept,
            value_kept,
            key_kept_slots,
            mask,
            scale,
            *query.stride()[:3],
            *mask_strides,
            QUERY_LENGTH=query_length,
            ROWS=rows,
            HEAD_DIM=head_dim,
            BLOCK_SPLITS=block_splits,
            BLOCK_DIM=block_dim,
            TENSOR_SCALE=value.tensor_scale,
            CAUSAL=is_causal and query_length > 1,
            KEEP=keep,
            KEEP_AT_ONCE=min(8, triton.next_power_of_2(max(keep, 1))),
            num_warps=max(1, min(8, block_splits * block_dim // 1024)),
            launch_pdl=True,
        )
    return out
