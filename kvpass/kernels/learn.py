"""Centres and tensor scales from the first tokens: one launch for K and V, one program for each head of each.

A program goes through its tokens twice, for the centre and for the largest magnitude around it, and holds a channel
beside the one that it is turned with: so neither a turn nor the choice between two orders of pairs moves a value from
one thread to another, or through memory.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kvpass.formats import TURN_MARGIN, get_format
from kvpass.kernels.codecs import on_device, to_float32
from kvpass.kernels.launch import remembered

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TILE, _NUM_WARPS = 4096, 16  # pairs of channels at once, and their warps


@triton.jit
def _channels(pair, are_neighbours, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """The first and the second channel of each ``pair``: neighbours (1), or the same place of two halves (0), among the
    ``2 * PAIRS`` that are turned. The others, which nothing pairs, are two halves."""
    is_turned = pair < PAIRS
    first = tl.where(is_turned, pair * (1 + are_neighbours), PAIRS + pair)
    apart = tl.where(is_turned, PAIRS + are_neighbours * (1 - PAIRS), HEAD_DIM // 2 - PAIRS)
    return first, first + apart


@triton.jit
def _turn(first, second, real, imaginary):
    return first * real - second * imaginary, first * imaginary + second * real


@triton.jit
def _mean(total, count):
    """Over the rows of ``total``, 0 where that is not finite."""
    mean = tl.sum(total, 0) / count
    return tl.where(tl.abs(mean) < float("inf"), mean, 0.0)


@triton.jit
def _tokens(start, batch_stride, token_stride, rows, length, is_written, BLOCK_ROWS: tl.constexpr):
    """Of ``BLOCK_ROWS`` tokens of all rows of the batch from ``start`` on: where they are, which they are, whether they
    are there (as a mask), and whether they are written (as a factor)."""
    row = start + tl.arange(0, BLOCK_ROWS)
    is_row, token = row < rows, row % length
    at = (row // length).to(tl.int64) * batch_stride + token.to(tl.int64) * token_stride
    if is_written is None:
        weight = is_row.to(tl.float32)
    else:
        weight = tl.load(is_written + token, mask=is_row, other=0).to(tl.float32)
    return at[:, None], token[:, None], is_row[:, None], weight[:, None]


@triton.jit
def _load(x, at, channel, mask):
    return to_float32(tl.load(x + at + channel[None, :], mask=mask, other=0.0))


@triton.jit
def _centre_of(
    x,
    batch_stride,
    token_stride,
    turns,
    is_written,
    rows,
    length,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """:func:`kvpass.reference.centre_of` at the first and at the second channel of each pair (``[WIDTH]``), and whether
    pairs are neighbours."""
    pair = tl.arange(0, WIDTH)
    is_turned = pair < PAIRS
    first_channel, second_channel = _channels(pair, 0, HEAD_DIM, PAIRS)
    left_channel, right_channel = _channels(pair, 1, HEAD_DIM, PAIRS)
    count = tl.zeros([BLOCK_ROWS, 1], tl.float32)
    first_sum = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
    second_sum = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
    if PAIRS:
        first_back = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
        second_back = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
        left_back = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
        right_back = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
    for start in range(0, rows, BLOCK_ROWS):
        at, token, is_row, weight = _tokens(start, batch_stride, token_stride, rows, length, is_written, BLOCK_ROWS)
        is_read = is_row & (pair < HEAD_DIM // 2)[None, :]
        first, second = _load(x, at, first_channel, is_read), _load(x, at, second_channel, is_read)
        count += weight
        first_sum += first
        second_sum += second
        if PAIRS:
            turn = turns + 2 * ((1 + token) * PAIRS + pair[None, :])
            real = tl.load(turn, mask=is_row & is_turned[None, :], other=1.0)
            imaginary = tl.load(turn + 1, mask=is_row & is_turned[None, :], other=0.0)
            first, second = _turn(first, second, real, imaginary)
            first_back += first
            second_back += second
            left, right = _load(x, at, left_channel, is_read), _load(x, at, right_channel, is_read)
            left, right = _turn(left, right, real, imaginary)
            left_back += left
            right_back += right
    total = tl.maximum(tl.sum(tl.sum(count, 1), 0), rows // length)
    first, second = _mean(first_sum, total), _mean(second_sum, total)
    are_neighbours = 0
    if PAIRS:
        halves = _mean(first_back, total), _mean(second_back, total)
        neighbours = _mean(left_back, total), _mean(right_back, total)
        squares = _squares(halves[0], halves[1], is_turned)
        closer = _squares(neighbours[0], neighbours[1], is_turned)
        are_turned = tl.maximum(squares, closer) > MARGIN * _squares(first, second, is_turned)
        is_closer = are_turned & (closer > squares)
        common = tl.where(is_closer, neighbours[0], halves[0]), tl.where(is_closer, neighbours[1], halves[1])
        real = tl.load(turns + 2 * pair, mask=is_turned, other=1.0)
        imaginary = tl.load(turns + 2 * pair + 1, mask=is_turned, other=0.0)
        onward = _turn(common[0], common[1], real, imaginary)
        first, second = tl.where(are_turned, onward[0], first), tl.where(are_turned, onward[1], second)
        are_neighbours = is_closer.to(tl.int32)
    return first, second, are_neighbours


@triton.jit
def _squares(first, second, is_turned):
    return tl.sum(tl.where(is_turned, first * first + second * second, 0.0), 0)


@triton.jit
def _magnitude(x, centre, weight):
    """What counts of each ``x`` (``[rows, channels]``) for the scale."""
    magnitude = tl.abs(x)
    if centre is None:
        return tl.where(magnitude < float("inf"), magnitude, 0.0)
    else:
        distance = tl.abs((x - centre[None, :]) * weight)
        return tl.where(distance < float("inf"), tl.maximum(distance, magnitude / 16), 0.0)


@triton.jit
def _learn_head(
    x,
    batch_stride,
    head_stride,
    token_stride,
    scale,
    centre,
    turns,
    is_written,
    rows,
    length,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LEARNS_CENTRE: tl.constexpr,
    PAIRS: tl.constexpr,
    STEP: tl.constexpr,
    MARGIN: tl.constexpr,
    TILE: tl.constexpr,
):
    """The program's head of one of K and V. Tiles are ``[BLOCK_ROWS, WIDTH]``, tokens and pairs of channels."""
    BLOCK_ROWS: tl.constexpr = TILE // WIDTH
    head = tl.program_id(0)
    x += head.to(tl.int64) * head_stride
    pair = tl.arange(0, WIDTH)
    is_pair = pair < HEAD_DIM // 2
    are_neighbours = 0
    if LEARNS_CENTRE:
        first, second, are_neighbours = _centre_of(
            x, batch_stride, token_stride, turns, is_written, rows, length, HEAD_DIM, WIDTH, PAIRS, MARGIN, BLOCK_ROWS
        )
    first_channel, second_channel = _channels(pair, are_neighbours, HEAD_DIM, PAIRS)
    if centre is None:
        first, second = None, None
    else:
        centre += head * HEAD_DIM
        if LEARNS_CENTRE:
            tl.store(centre + first_channel, first, mask=is_pair)
            tl.store(centre + second_channel, second, mask=is_pair)
        else:
            first = tl.load(centre + first_channel, mask=is_pair, other=0.0)
            second = tl.load(centre + second_channel, mask=is_pair, other=0.0)
    if scale is not None:
        most = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
        for start in range(0, rows, BLOCK_ROWS):
            at, token, is_row, weight = _tokens(start, batch_stride, token_stride, rows, length, is_written, BLOCK_ROWS)
            is_read = is_row & is_pair[None, :]
            most = tl.maximum(most, _magnitude(_load(x, at, first_channel, is_read), first, weight))
            most = tl.maximum(most, _magnitude(_load(x, at, second_channel, is_read), second, weight))
        largest = tl.max(tl.max(most, 1), 0)
        power = (tl.maximum(largest, 2.0**-100).to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        tl.store(scale + head, tl.where(largest == 0, 1.0, power * STEP))


@remembered
@triton.jit(do_not_specialize=["rows", "length"])
def _learn_kernel(
    key,
    key_batch_stride,
    key_head_stride,
    key_token_stride,
    value,
    value_batch_stride,
    value_head_stride,
    value_token_stride,
    key_scale,
    key_centre,
    value_scale,
    value_centre,
    turns,
    is_written,
    rows,
    length,
    KEY_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_LEARNS_CENTRE: tl.constexpr,
    KEY_STEP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_LEARNS_CENTRE: tl.constexpr,
    VALUE_STEP: tl.constexpr,
    PAIRS: tl.constexpr,
    MARGIN: tl.constexpr,
    TILE: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _learn_head(
            key, key_batch_stride, key_head_stride, key_token_stride, key_scale, key_centre, turns,
            is_written, rows, length, KEY_DIM, KEY_WIDTH, KEY_LEARNS_CENTRE, PAIRS, KEY_STEP, MARGIN, TILE,
        )  # fmt: skip
    else:
        _learn_head(
            value, value_batch_stride, value_head_stride, value_token_stride, value_scale, value_centre, None,
            is_written, rows, length, VALUE_DIM, VALUE_WIDTH, VALUE_LEARNS_CENTRE, 0, VALUE_STEP, MARGIN, TILE,
        )  # fmt: skip


def learn(
    key: torch.Tensor,
    value: torch.Tensor,
    key_scale: torch.Tensor | None,
    key_centre: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    value_centre: torch.Tensor | None,
    turns: torch.Tensor | None,
    is_written: torch.Tensor | None,
    learns_key_centre: bool,
    learns_value_centre: bool,
    key_format: str,
    value_format: str,
) -> None:
    """Set tensor scales and centres from the tokens ``key`` and ``value``, in place.

    Args:
        key, value: ``[batch, kv_heads, length, head_dim]`` bf16, fp16 or fp32, any strides; ``head_dim`` may differ.
        key_scale, value_scale: ``[kv_heads]`` float32 to be set; None where it is not.
        key_centre, value_centre: ``[kv_heads, head_dim]`` float32, set where ``learns_..._centre``, else only
            subtracted; None for none.
        turns: ``[at least 1 + length, pairs, 2]`` float32, of K (:func:`kvpass.reference.centre_of`), or None.
        is_written: ``[length]`` bool, or None for all.
        key_format, value_format: Names of registered formats.

    Raises:
        ValueError: A dtype or shape that does not fit.
    """
    batch, kv_heads, length, key_dim = key.shape
    sides = (
        ("key", key, key_scale, key_centre, learns_key_centre),
        ("value", value, value_scale, value_centre, learns_value_centre),
    )
    for what, x, scale, centre, learns_centre in sides:
        if x.dtype not in _DTYPES:
            raise ValueError(f"{what} is {x.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
        _check(f"{what}_scale", scale, torch.float32, (kv_heads,))
        _check(f"{what}_centre", centre, torch.float32, (kv_heads, x.shape[3]))
        if learns_centre and centre is None:
            raise ValueError(f"{what}_centre is missing and is to be set")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} may differ in head_dim only")
    _check("is_written", is_written, torch.bool, (length,))
    if turns is not None:
        _check("turns", turns, torch.float32, (max(turns.shape[0], 1 + length), min(turns.shape[1], key_dim // 2), 2))
    rows = batch * length
    if rows == 0 or not (learns_key_centre or learns_value_centre or key_scale is not None or value_scale is not None):
        return
    key = key if key.stride(3) == 1 else key.contiguous()
    value = value if value.stride(3) == 1 else value.contiguous()
    with on_device(key):
        _learn_kernel[(kv_heads, 2)](
            key,
            *key.stride()[:3],
            value,
            *value.stride()[:3],
            key_scale,
            key_centre,
            value_scale,
            value_centre,
            turns,
            is_written,
            rows,
            length,
            KEY_LEARNS_CENTRE=learns_key_centre,
            PAIRS=0 if turns is None else turns.shape[1],
            VALUE_LEARNS_CENTRE=learns_value_centre,
            MARGIN=TURN_MARGIN,
            TILE=_TILE,
            **_constexprs(key_format, key_dim, "KEY_"),
            **_constexprs(value_format, value.shape[3], "VALUE_"),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # as the reference rounds, but for the order of sums, and means
        )


@functools.lru_cache
def _constexprs(format: str, head_dim: int, prefix: str) -> dict[str, object]:
    fmt = get_format(format)
    fmt.check_head_dim(head_dim)
    width = triton.next_power_of_2(head_dim // 2)
    return {f"{prefix}DIM": head_dim, f"{prefix}WIDTH": width, f"{prefix}STEP": fmt.learnt_step}


def _check(what: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor is not None and not (tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()):
        raise ValueError(
            f"{what} is {tensor.dtype} of shape {tuple(tensor.shape)}; needed: {dtype} {shape}, contiguous"
        )
