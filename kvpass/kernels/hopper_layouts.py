"""Layouts of the Hopper decode kernel: which lane holds what of K, V, their block scales, the query and the output.

:mod:`kvpass.kernels.hopper_decode` says what the fragments are, and what a position is. A tile of codes is
[32 positions, words] of 32-bit words. A tile of block scales is [blocks, 4, 2] words: the block, bits 2 and 1 of the
position, bit 4; the byte in the word has bits 3 and 0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = 32  # slots

ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
OPERAND_A = gl.constexpr(gl.DotOperandLayout(0, ACCUMULATOR.value, 2))
OPERAND_B = gl.constexpr(gl.DotOperandLayout(1, ACCUMULATOR.value, 2))


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
def key_layout(words):
    registers, lanes = _key_words(words)
    return _linear(
        [[0, w] for w in registers] + [[8, 0], [16, 0]],
        [[0, w] for w in lanes] + [[1, 0], [2, 0], [4, 0]],
        [TILE, words],
    )


@gluon.constexpr_function
def value_layout(words, pairs_first):
    """``pairs_first``: two neighbouring positions are neighbouring registers, as the decoder takes them."""
    registers, lanes = _value_words(words)
    row, pair = [[0, w] for w in registers], [[1, 0]]
    return _linear(
        (pair + row if pairs_first else row + pair) + [[8, 0], [16, 0]],
        [[2, 0], [4, 0]] + [[0, w] for w in lanes],
        [TILE, words],
    )


@gluon.constexpr_function
def copy_layout(words):
    """16 bytes a lane; neighbouring lanes take neighbouring bytes of the cache."""
    bits = [[0, w] for w in _bits(4, words // 4)] + [[2, 0], [1, 0], [4, 0], [8, 0], [16, 0]]
    return _linear([[0, 1], [0, 2]] + bits[5:], bits[:5], [TILE, words])


@gluon.constexpr_function
def key_shared(words):
    """Rows of K in shared memory; where two rows do not fit 128 bytes, odd rows have their 64-byte halves exchanged."""
    if words < 32:
        return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = [[1, 16], [2, 0], [4, 0], [8, 0], [16, 0]]
    return gl.SharedLinearLayout([[0, w] for w in _bits(1, words)] + rows)


@gluon.constexpr_function
def value_shared(words):
    """Rows of V in shared memory, swizzled so that the positions 0, 2, 4, 6 that four lanes read lie in other banks."""
    swizzle = {8: (0, 0), 16: (0, 8), 32: (8, 16), 64: (4, 16)}[words]
    rows = [[2, swizzle[0]], [4, swizzle[1]], [1, 0], [8, 0], [16, 0]]
    return gl.SharedLinearLayout([[0, w] for w in _bits(1, words)] + rows)


@gluon.constexpr_function
def scale_copy_layout(blocks):
    bits = [[0, 0, 1], [0, 1, 0], [0, 2, 0]] + [[b, 0, 0] for b in _bits(1, blocks)]
    own = (blocks // 4).bit_length() - 1
    return _linear(bits[:own], bits[own:], [blocks, 4, 2])


@gluon.constexpr_function
def scale_shared():
    return gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])


@gluon.constexpr_function
def key_scale_layout(words, blocks):
    """[blocks, bits 1 and 2 of the position, bit 0, word]: a lane's K words say which blocks it needs."""
    registers, lanes = _key_words(words)
    run = words // blocks
    return _linear(
        [[0, 0, 0, 1]] + [[w // run, 0, 0, 0] for w in registers if w >= run],
        [[w // run, 0, 0, 0] for w in lanes] + [[0, 0, 1, 0], [0, 1, 0, 0], [0, 2, 0, 0]],
        [blocks, 4, 2, 2],
    )


@gluon.constexpr_function
def value_scale_layout(words, blocks):
    registers, lanes = _value_words(words)
    run = words // blocks
    return _linear(
        [[0, 0, 1]] + [[w // run, 0, 0] for w in registers if w >= run],
        [[0, 1, 0], [0, 2, 0]] + [[w // run, 0, 0] for w in lanes],
        [blocks, 4, 2],
    )


@gluon.constexpr_function
def split_words(layout, words, blocks):
    """``layout`` of [32, words] as a layout of [32, blocks, words // blocks]."""
    run = words // blocks

    def split(bases):
        return [[p, w // run, w % run] for p, w in bases]

    return _linear(split(layout.reg_bases), split(layout.lane_bases), [TILE, blocks, run])


@gluon.constexpr_function
def query_layout(words, head_dim, columns):
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
def output_layout(head_dim, columns):
    """[columns, head_dim]: lane ``(r, c)`` holds the ``r``-th eighth of columns ``2 c, 2 c + 1``."""
    return _linear(
        [[0, d] for d in _bits(1, head_dim // 8)] + [[1, 0]] + [[n, 0] for n in _bits(8, columns // 8)],
        [[2, 0], [4, 0]] + [[0, d] for d in _bits(head_dim // 8, 8)],
        [columns, head_dim],
    )
