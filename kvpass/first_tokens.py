"""What the first tokens of a prompt give where nobody else does: centres, and tensor scales.

A centre is fixed from the first tokens on; any vector would be exact, one near to what is stored makes what is left
small. It is the mean of the first tokens, but for K that rotary embedding turns by its position. A pair of channels
that turns once in 20,000 tokens stands still in the first 256, and its mean there points the wrong way 10,000 tokens
later: it would double what it was to take away. What such a pair has in common at all positions is found by turning
the first tokens back, and its centre is the mean of that over the positions that the cache has room for (of a slow
pair the mean itself, of a fast one nothing). Earlier ones weigh more: a cache need not get full.

So it is with the tensor scale of a format whose block scales it moves into their range (nvfp4, int8): the largest
magnitude of the first tokens gives it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvpass.config import LayerConfig
from kvpass.formats import CODECS, KVBuffers

FIRST_TOKENS = 256


def learn(
    config: LayerConfig,
    key: KVBuffers,
    value: KVBuffers,
    key_states: Tensor,
    value_states: Tensor,
    positions: int,
    is_written: Tensor | None = None,
) -> None:
    """Set the centres and tensor scales that nobody gave from the first :data:`FIRST_TOKENS` tokens, in place.

    Args:
        config: What was given.
        key, value: The buffers.
        key_states, value_states: ``[batch, kv_heads, length, head_dim]``, from position 0.
        positions: How many there can be.
        is_written: ``[at most FIRST_TOKENS]`` boolean, whether the first slots hold tokens, and not zeros; None where
            all do.
    """
    weight = None if is_written is None else is_written[:, None].float()
    for buffers, fmt, x, scale, centre, frequencies in (
        (key, config.key, key_states, config.key_scale, config.key_centre, config.frequencies),
        (value, config.value, value_states, config.value_scale, config.value_centre, ()),
    ):
        x = x[:, :, :FIRST_TOKENS]
        if buffers.centre is not None and centre is None:
            buffers.centre.copy_(centre_of(x.float(), weight, frequencies, positions))
        if buffers.scale is not None and fmt.learns_scale and scale is None:
            buffers.scale.copy_(scale_of(x, CODECS[fmt.codec].max, buffers.centre, weight))


def centre_of(
    x: Tensor, weight: Tensor | None = None, frequencies: tuple[float, ...] = (), positions: int = FIRST_TOKENS
) -> Tensor:
    """``[kv_heads, head_dim]``: the centre of tokens of which ``x`` (``[batch, kv_heads, length, head_dim]`` float32)
    are the first, 0 where that is not finite. ``weight`` (``[length, 1]``) is 1 for a token and 0 for a slot of zeros.

    Without ``frequencies`` it is the mean of ``x`` over rows and tokens. With them (radians per position by which
    rotary embedding turns the first ``2 * len(frequencies)`` channels) it is what is to be expected of the mean over
    ``positions``, weighed as :func:`_mean_turn` says. Which channels are turned together is not asked but seen: the
    right pairs, turned back, have the largest mean. Where no pairs have a larger one than the channels as they are,
    nothing is turned: there are layers without rotary embedding in models that have it.
    """
    turned = 2 * len(frequencies) if 2 * len(frequencies) <= x.shape[-1] else 0
    mean = x.mean((0, 2))
    if turned:
        factors, partners = _constant_turns(frequencies, positions, x.device)
        factors = factors[..., : x.shape[2], :]
        alone, crossed = torch.einsum("bknd,twcnd->twckd", x[..., :turned], factors) / (x.shape[0] * x.shape[2])
        found = (alone + crossed.gather(-1, partners.expand_as(crossed))).nan_to_num(0.0, 0.0, 0.0)
        best = found[0].square().sum((1, 2)).argmax(0, keepdim=True)
        mean = torch.cat([found[1].index_select(0, best)[0], mean[:, turned:]], -1)
    if weight is not None:
        mean = mean / weight.mean().clamp(min=1 / FIRST_TOKENS)
    return mean.nan_to_num(0.0, 0.0, 0.0)


def _mean_turn(frequency: Tensor, positions: int) -> Tensor:
    """The mean of ``exp(i * frequency * p)`` over the positions ``p`` below ``positions``, complex128.

    Each weighs ``p ** -0.5`` but for the first :data:`FIRST_TOKENS`, which weigh like the last of them. In steps of a
    quarter the weights are taken to be alike, so that the sums have a closed form.
    """
    total, weights, begin, end = torch.zeros_like(frequency, dtype=torch.complex128), 0.0, 0, FIRST_TOKENS
    while begin < positions:
        end = min(end, positions)
        length, weight = end - begin, 2 * (end**0.5 - begin**0.5) if begin else end**0.5
        half = frequency / 2
        long = torch.where(half == 0, 1.0, (length * half).sin() / (length * half.sin()))
        total += weight * torch.polar(torch.ones_like(half), (begin + end - 1) * half) * long
        weights, begin, end = weights + weight, end, end + end // 4
    return total / weights


@functools.lru_cache(maxsize=8)
def _turns(frequencies: tuple[float, ...], positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What turns the first tokens to where their mean is wanted, as two sums that are added.

    Returns:
        Factors ``[2, 2, 3, FIRST_TOKENS, channels]`` float32: of a channel's own sum, and of what it adds to its
        partner; for tokens turned back, and for tokens turned on to the mean over ``positions``; for channels that are
        not turned, those of the two halves as pairs, and neighbours as pairs. And the partners, ``[3, 1, channels]``
        int64.
    """
    with torch.inference_mode(False):
        frequency = torch.tensor(frequencies, dtype=torch.float64)
        angle = -torch.arange(FIRST_TOKENS, dtype=torch.float64)[:, None] * frequency
        back = torch.polar(torch.ones_like(angle), angle)
        turn = torch.view_as_real(torch.stack([back, back * _mean_turn(frequency, positions)]))
        own, other = turn.unbind(-1)  # [2, FIRST_TOKENS, pairs]
        halves, neighbours = torch.cat([own, own], -1), own.repeat_interleave(2, -1)
        alone = torch.stack([torch.ones_like(halves), halves, neighbours], 1)
        # The first of a pair adds to the second, the second takes away from the first.
        halves, neighbours = torch.cat([other, -other], -1), torch.stack([other, -other], -1).flatten(-2)
        crossed = torch.stack([torch.zeros_like(halves), halves, neighbours], 1)
        channels = torch.arange(2 * len(frequencies))
        partners = torch.stack([channels, channels.roll(len(frequencies)), channels ^ 1])[:, None]
        return torch.stack([alone, crossed]).float().to(device), partners.to(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_turns(frequencies: tuple[float, ...], positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same as constants of a graph that is compiled: worked out there, on the CPU, no CUDA graph would hold it."""
    return _turns(frequencies, positions, device)


def scale_of(x: Tensor, code: float = 6.0, centre: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """``[kv_heads]`` float32: the tensor scale that a format of e4m3 block scales takes from the tokens ``x`` (of any
    floating dtype), which are stored less ``centre``, in codes up to ``code``; other arguments as for
    :func:`centre_of`.

    With ``p`` the power of two at or below the largest magnitude ``a``, it is ``p / 16`` for e2m1 (``p / 256`` for
    int8): then ``a`` has a block scale ``a / 6 / scale`` from 2.7 to 5.3 (2 to 4), the middle, in octaves, of what e4m3
    holds as a normal number, ``2**-6`` to 448. A later token can be 84 times as large before it saturates, and a block
    scale loses bits only where its block is 170 times as small (128). As a power of two it changes no rounding of any
    other block scale: which of them it is, and so the other rows of a batch and their padding, shows at those two ends
    alone.

    ``a`` is at least a sixteenth of the magnitude before ``centre`` is taken away: a prompt of one token is its own
    centre, and says nothing of how far others lie. A rotation is left out. It changes ``a`` by ``sqrt(head_dim)`` at
    most. What is not finite does not count, and the scale is 1 where nothing is left.
    """
    magnitude = (x.float() if x.dtype == torch.float64 else x).abs()
    if centre is not None:
        distance = x.float() - centre[:, None]
        magnitude = torch.maximum((distance if weight is None else distance * weight).abs(), magnitude.float() / 16)
    largest = magnitude.nan_to_num(0.0, 0.0).amax((0, 2, 3)).float()
    power = (largest.clamp(min=2.0**-100).view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(largest == 0, 1.0, power / 2 ** (int(code).bit_length() + 1))
