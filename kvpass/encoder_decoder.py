"""``QuantizedEncoderDecoderCache``: self-attention and cross-attention of an encoder-decoder's decoder, quantized.

Cross attention is written once, when the decoder sees the encoder's output for the first time, and read at every token.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import EncoderDecoderCache

from kvpass.cache import QuantizedCache
from kvpass.config import ConfigLike, KVQuantConfig, LayerConfig
from kvpass.formats import KVBuffers, KVFormat
from kvpass.layers import Lengths, QuantizedLayer


class QuantizedEncoderDecoderCache(EncoderDecoderCache):
    """The cache of a decoder that attends to an encoder's output: T5, BART, Whisper and their like.

    Args:
        config: The model's configuration.
        format: A format's name, a dictionary, or a :class:`kvpass.KVQuantConfig`. Its scales are those of
            self-attention; K and V of cross attention are stored as if there were none.
        max_cache_len: Tokens per sequence that the decoder can hold. Cross attention holds what the encoder returns.

    Attributes:
        self_attention_cache, cross_attention_cache: Each a :class:`kvpass.QuantizedCache`.
        quantization: The configuration.

    Raises:
        As :class:`kvpass.QuantizedCache`.
    """

    self_attention_cache: QuantizedCache  # type: ignore[assignment]
    cross_attention_cache: QuantizedCache  # type: ignore[assignment]

    def __init__(self, config: PreTrainedConfig, format: ConfigLike = "fp8_e4m3", max_cache_len: int = 4096) -> None:
        self.quantization = KVQuantConfig.of(format)
        cross = dataclasses.replace(self.quantization, scales=None)
        super().__init__(
            _SelfAttentionCache(config, self.quantization, max_cache_len), _CrossAttentionCache(config, cross, 1)
        )

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Type of each of the decoder's layers."""
        return self.self_attention_cache.layer_types

    @property
    def max_cache_len(self) -> int:
        """Tokens per sequence that the decoder can hold."""
        return self.self_attention_cache.max_cache_len

    @property
    def batch_size(self) -> int:
        """Rows that the cache was allocated for; -1 before initialization."""
        return self.self_attention_cache.batch_size

    @property
    def device(self) -> torch.device | None:
        """Device of the first layer's buffers; None before initialization."""
        return self.self_attention_cache.device

    @property
    def is_initialized(self) -> bool:
        """Whether the decoder's own buffers are allocated."""
        return self.self_attention_cache.is_initialized

    @property
    def nbytes(self) -> int:
        """Bytes of storage that hold codes and block scales, 0 before initialization."""
        return self.self_attention_cache.nbytes + self.cross_attention_cache.nbytes

    @property
    def eager_reads(self) -> int:
        """Times a layer's decoded cache was read outside a compiled graph since the last reset, hence unfused. A prompt
        of one token is not counted."""
        return self.self_attention_cache.eager_reads + self.cross_attention_cache.eager_reads

    def saturation(self) -> list[tuple[float, float]]:
        """Of self-attention: see :meth:`kvpass.QuantizedCache.saturation`."""
        return self.self_attention_cache.saturation()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` of the decoder's tokens: see :meth:`kvpass.QuantizedCache.crop`."""
        self.self_attention_cache.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch ``repeats`` times."""
        for cache in (self.self_attention_cache, self.cross_attention_cache):
            cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows ``indices`` (integers or booleans) of the batch."""
        for cache in (self.self_attention_cache, self.cross_attention_cache):
            cache.batch_select_indices(indices)


class CrossAttentionLayer(QuantizedLayer):
    """K and V of one layer's cross attention: as many slots as the encoder returns, all written at once."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config, max_cache_len=1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for these ``[batch, kv_heads, encoder_length, head_dim]`` tensors."""
        self.max_cache_len = self.window = self.slots = key_states.shape[2]
        self._lengths = Lengths()
        super().lazy_initialization(key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Quantize and store what the encoder returned; afterwards it is read as ``keys`` and ``values``.

        Returns:
            The arguments themselves (decoded where the encoder returned a single state).

        Raises:
            ValueError: Something is stored already.
        """
        if not self.is_empty:
            raise ValueError("cross attention is written once; call reset() before another encoder output")
        if not self.is_initialized or key_states.shape[::2] != (self.batch_size, self.slots):
            self.lazy_initialization(key_states, value_states)
        return super().update(key_states, value_states)

    def _stored(self, buffers: KVBuffers, fmt: KVFormat) -> Tensor:
        if not torch.compiler.is_compiling():
            self.eager_reads += 1  # this is how cross attention reads
        return super()._stored(buffers, fmt)


class _SelfAttentionCache(QuantizedCache):
    _is_part_of_two = True


class _CrossAttentionCache(QuantizedCache):
    _is_part_of_two = True

    def __init__(self, config: PreTrainedConfig, format: KVQuantConfig, max_cache_len: int) -> None:
        super().__init__(config, format, max_cache_len)
        self.layers = [CrossAttentionLayer(LayerConfig(layer.key_format, layer.value_format)) for layer in self._layers]
