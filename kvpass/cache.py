"""``QuantizedCache``: a transformers ``Cache`` whose storage is quantized.

The cache is right by itself, in eager mode and under any ``torch.compile`` backend: ``update`` writes quantized bytes
and returns what they decode to. The ``kvquant`` backend recognizes that read and fuses it with the attention behind
it, so that the decoded K and V never exist in memory.

The first prefill is exact: it attends to the K and V it just computed, and their quantized bytes are stored beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, LinearAttentionLayer

from kvpass.architecture import (
    head_dim_of,
    holds_attention,
    in_every_layer,
    is_hybrid,
    layers_of_transformers,
    rotary_frequencies,
)
from kvpass.config import ConfigLike, KVQuantConfig, LayerConfig
from kvpass.layers import HybridLayer, Lengths, QuantizedLayer
from kvpass.scales import KVScales


class QuantizedCache(Cache):
    """A static KV cache in FP8, FP4 or int8.

    Args:
        config: The model's configuration. Layers of full, sliding-window and chunked attention are quantized; states
            of linear attention, Mamba and convolutions are kept as transformers keeps them.
        format: A format's name, a dictionary, or a :class:`kvpass.KVQuantConfig`.
        max_cache_len: Slots per sequence: the longest prompt plus everything generated after it. A centre of K that the
            first tokens give depends on it (:mod:`kvpass.first_tokens`).

    Attributes:
        quantization: The configuration.
        layer_types: Type of each layer, as the model's config names it.
        is_half_written: A ``generate`` with kvpass enabled was interrupted within a forward; the cache must be reset
            before it is used again.

    Raises:
        ValueError: An unknown format, a ``max_cache_len`` below 1, a head_dim that the format cannot hold, or scales
            of another model.
        NotImplementedError: A layer type or an attention implementation that is not supported.

    For inference: stored tokens carry no gradient.

    The buffers are allocated by the first ``update``, or by ``early_initialization``. Their addresses never change
    afterwards except in ``batch_repeat_interleave`` and ``batch_select_indices``, which change their size.
    """

    is_half_written = False
    _is_part_of_two = False  # with cross attention's, in a kvpass.QuantizedEncoderDecoderCache

    def __init__(self, config: PreTrainedConfig, format: ConfigLike = "fp8_e4m3", max_cache_len: int = 4096) -> None:
        self.quantization = KVQuantConfig.of(format)
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"expected the model's configuration (model.config), got {type(config).__name__}")
        if not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise ValueError(f"max_cache_len is {max_cache_len!r}; it must be a whole number of at least 1")
        text_config = config.get_text_config(decoder=True)
        if text_config.is_encoder_decoder and not self._is_part_of_two:
            raise NotImplementedError(
                f"{config.model_type} is an encoder-decoder; use kvpass.QuantizedEncoderDecoderCache, which holds its "
                "cross attention too"
            )
        likes = layers_of_transformers(text_config, max_cache_len)
        types = (list(getattr(text_config, "layer_types", None) or ()) + ["full_attention"] * len(likes))[: len(likes)]
        self.layer_types = tuple(types)
        self._positions = max_cache_len
        self._most_stored = 0
        self._kv_heads = in_every_layer(text_config, "num_key_value_heads", "num_attention_heads")
        self._model_types = {config.model_type, text_config.model_type}
        quantization, lengths = self.quantization.resolved(types), Lengths()
        attends = [index for index, like in enumerate(likes) if holds_attention(like)]
        self._check_scales(self.quantization.scales, attends)
        layers = list(likes)
        for index in attends:
            of_layer = quantization.layer(index)._replace(frequencies=rotary_frequencies(text_config, index))
            layers[index] = _quantized_like(likes[index], of_layer, max_cache_len, lengths)
        super().__init__(layers=layers)
        if (head_dim := head_dim_of(text_config)) is not None:
            for fmt in {fmt for layer in self._layers for fmt in (layer.key_format, layer.value_format)}:
                fmt.check_head_dim(head_dim)

    @property
    def max_cache_len(self) -> int:
        """Positions that a sequence can have."""
        return self._positions

    @classmethod
    def without_memory(cls, config: PreTrainedConfig, format: ConfigLike, max_cache_len: int) -> QuantizedCache:
        """A cache for one sequence whose buffers are on the meta device, to be asked for its ``nbytes``.

        Raises:
            NotImplementedError: The configuration does not tell the shape of K and V.
        """
        text_config = config.get_text_config(decoder=True)
        cache = cls(config, format, max_cache_len)
        kv_heads, head_dim = cache._kv_heads, head_dim_of(text_config)
        if kv_heads is None or head_dim is None:
            raise NotImplementedError(
                f"{config.model_type}: its configuration does not tell heads and widths of K and V, alike for all "
                "layers, so what its cache occupies is known only once it is allocated"
            )
        states = torch.empty(1, kv_heads, 0, head_dim, dtype=torch.bfloat16, device="meta")
        for layer in cache._layers:
            layer.lazy_initialization(states, states)
        return cache

    def set_scales(self, scales: KVScales) -> None:
        """Use other tensor scales and centres, in place: CUDA graphs recorded over this cache take them from the next
        token on.

        Raises:
            ValueError: Scales of another model, or a cache that holds tokens, which the old scales belong to.
        """
        self._check_scales(scales, [i for i, layer in enumerate(self.layers) if isinstance(layer, QuantizedLayer)])
        if any(not layer.is_empty for layer in self._layers):
            raise ValueError("the cache holds tokens that were stored with its present scales; call reset() first")
        for index, layer in enumerate(self.layers):
            if isinstance(layer, QuantizedLayer):
                old = layer.config
                layer.set_scales(old._replace(**scales[index].tensors(old.key, old.value)._asdict()))

    def saturation(self) -> list[tuple[float, float]]:
        """For each layer the share of K, and of V, that lies at the end of its format's range: codes of an fp8
        format, block scales of nvfp4 and int8. More than a few in a thousand means that the tensor scale is too
        small."""
        return [layer.saturation() if isinstance(layer, QuantizedLayer) else (0.0, 0.0) for layer in self.layers]

    def reset(self) -> None:
        """Forget every token. The buffers, and CUDA graphs recorded over them, stay valid."""
        self._most_stored, self.is_half_written = 0, False
        super().reset()  # type: ignore[no-untyped-call]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: A positive argument, more tokens than are stored, tokens before which a sliding window has lost
                what it would need, or states of linear attention. Nothing is changed then.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}; "
                f"crop({-tokens_to_remove}) removes {tokens_to_remove}"
            )
        stored = int(self.get_seq_length()) if tokens_to_remove else 0
        if -tokens_to_remove > stored:
            raise ValueError(f"cannot remove {-tokens_to_remove} tokens from a cache that holds {stored}")
        linear = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]
        if tokens_to_remove and any(
            any(layer.is_recurrent_states_initialized.values()) or not getattr(layer, "record_past", False)
            for layer in linear
        ):
            raise ValueError(f"cannot remove {-tokens_to_remove} tokens: states of linear attention do not go back")
        self._most_stored = max(self._most_stored, stored)
        lost = self._most_stored - (stored + tokens_to_remove)
        for layer in self._layers if tokens_to_remove else ():
            if self._most_stored > layer.slots and lost > layer.slots - layer.window:
                raise ValueError(
                    f"cannot remove {-tokens_to_remove} tokens: a window of {layer.window} has lost what it would need "
                    f"again. At most {layer.slots - layer.window} tokens can be removed from a full window"
                )
        super().crop(tokens_to_remove)

    def check_fits(self, likes: list[Any]) -> None:
        """Raise ``ValueError`` unless each layer is of the kind, and the window, that the model's is: ``likes`` are
        transformers' layers for as many positions."""
        for index, (layer, like) in enumerate(zip(self.layers, likes, strict=True)):
            window = None if not isinstance(layer, QuantizedLayer) else layer.window if layer.is_sliding else 0
            wanted = None if not holds_attention(like) else like.max_cache_len if like.is_sliding else 0
            if window != wanted:
                names = {None: "no attention", 0: "full attention"}
                raise ValueError(
                    f"layer {index} of the cache is for {names.get(window, f'a window of {window}')}, the model's has "
                    f"{names.get(wanted, f'a window of {wanted}')}; the cache is another model's"
                )

    def note_interruption(self) -> None:
        """Find out, after a forward that raised, whether some layers were given tokens that others were not."""
        counters = {int(layer.last_position) for layer in self._layers if layer.is_initialized and layer.leads}
        uneven = len(counters) > 1 or len({layer.is_empty for layer in self._layers}) > 1
        self.is_half_written = uneven or any(layer.behind for layer in self._layers)

    def _check_scales(self, scales: KVScales | None, layers: list[int]) -> None:
        if scales is not None:
            scales.check(layers, self._kv_heads, self._model_types)

    @property
    def device(self) -> torch.device | None:
        """Device of the first layer's buffers; None before initialization."""
        first = self._layers[0]
        return first.device if first.is_initialized else None

    @property
    def nbytes(self) -> int:
        """Bytes of storage that hold codes and block scales, 0 before initialization."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def eager_reads(self) -> int:
        """Times a layer's decoded cache was read outside a compiled graph since the last reset, hence unfused. A prompt
        of one token is not counted."""
        return sum(layer.eager_reads for layer in self._layers)

    @property
    def _layers(self) -> list[QuantizedLayer]:
        """The layers that are quantized: not those of linear attention, nor those that share another's cache."""
        return [layer for layer in self.layers if isinstance(layer, QuantizedLayer)]


def _quantized_like(like: Any, config: LayerConfig, max_cache_len: int, lengths: Lengths) -> QuantizedLayer:
    """A quantized layer in the place of ``like``."""
    window = like.max_cache_len if like.is_sliding else None
    if window is not None:
        config = config._replace(keep_first=0)  # the first tokens leave the window
    if is_hybrid(like):
        return HybridLayer(config, max_cache_len, lengths, window, like.number_of_states)
    return QuantizedLayer(config, max_cache_len, lengths, window)
