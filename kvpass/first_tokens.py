"""What the first tokens of a prompt give where nobody else does: centres, and tensor scales.

A centre is the mean of the first tokens, taken before they are stored and fixed from then on; any vector would be
exact, a mean makes what is stored small. So it is with the tensor scale of a format whose block scales it moves into
their range (nvfp4, int8): the largest magnitude of the first tokens gives it.
"""

from __future__ import annotations

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
    is_written: Tensor | None = None,
) -> None:
    """Set the centres and tensor scales that nobody gave from the first :data:`FIRST_TOKENS` tokens, in place.

    Args:
        config: What was given.
        key, value: The buffers.
        key_states, value_states: ``[batch, kv_heads, length, head_dim]``.
        is_written: ``[at most FIRST_TOKENS]`` boolean, whether the first slots hold tokens, and not zeros; None where
            all do.
    """
    weight = None if is_written is None else is_written[:, None].float()
    for buffers, fmt, x, scale, centre in (
        (key, config.key, key_states, config.key_scale, config.key_centre),
        (value, config.value, value_states, config.value_scale, config.value_centre),
    ):
        x = x[:, :, :FIRST_TOKENS]
        if buffers.centre is not None and centre is None:
            buffers.centre.copy_(centre_of(x.float(), weight))
        if buffers.scale is not None and fmt.learns_scale and scale is None:
            buffers.scale.copy_(scale_of(x, CODECS[fmt.codec].max, buffers.centre, weight))


def centre_of(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """``[kv_heads, head_dim]``: the mean of ``x`` (``[batch, kv_heads, length, head_dim]`` float32) over rows and
    tokens, 0 where that is not finite. ``weight`` (``[length, 1]``) is 1 for a token and 0 for a slot of zeros."""
    mean = x.mean((0, 2))
    if weight is not None:
        mean = mean / weight.mean().clamp(min=1 / FIRST_TOKENS)
    return mean.nan_to_num(0.0, 0.0, 0.0)


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
