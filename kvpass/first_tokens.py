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

from kvpass import ops
from kvpass.config import LayerConfig
from kvpass.formats import KVBuffers

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
    key_scale = key.scale if config.key.learns_scale and config.key_scale is None else None
    value_scale = value.scale if config.value.learns_scale and config.value_scale is None else None
    learns_key_centre = key.centre is not None and config.key_centre is None
    learns_value_centre = value.centre is not None and config.value_centre is None
    if key_scale is None and value_scale is None and not learns_key_centre and not learns_value_centre:
        return
    is_turned = learns_key_centre and 0 < 2 * len(config.frequencies) <= key_states.shape[3]
    ops.learn(
        key_states[:, :, :FIRST_TOKENS],
        value_states[:, :, :FIRST_TOKENS],
        key_scale,
        key.centre,
        value_scale,
        value.centre,
        _constant_turns(config.frequencies, positions, key_states.device) if is_turned else None,
        is_written,
        learns_key_centre,
        learns_value_centre,
        config.key.name,
        config.value.name,
    )


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
def turns(frequencies: tuple[float, ...], positions: int, device: torch.device | str) -> Tensor:
    """What :func:`kvpass.reference.centre_of` takes of a rotary embedding that turns its pairs of channels by
    ``frequencies`` (radians per position), for a cache of so many ``positions``: ``[1 + FIRST_TOKENS, pairs, 2]``
    float32."""
    with torch.inference_mode(False):
        frequency = torch.tensor(frequencies, dtype=torch.float64)
        angle = -torch.arange(FIRST_TOKENS, dtype=torch.float64)[:, None] * frequency
        back = torch.polar(torch.ones_like(angle), angle)
        both = torch.cat([_mean_turn(frequency, positions)[None], back])
        return torch.view_as_real(both).float().to(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_turns(frequencies: tuple[float, ...], positions: int, device: torch.device) -> Tensor:
    """The same as a constant of a graph that is compiled: worked out there, on the CPU, no CUDA graph would hold it."""
    return turns(frequencies, positions, device)
