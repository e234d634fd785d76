"""Storage as an experiment needs it: one window through a layer's bytes, and what a configuration costs in bits."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedConfig

from kvpass.architecture import rotary_frequencies
from kvpass.cache import QuantizedCache
from kvpass.config import ConfigLike, KVQuantConfig, LayerConfig
from kvpass.layers import QuantizedLayer

PREFILL = 256  # tokens of the prefill from which a format takes what it takes from a first prefill
BITS_AT = 2048  # tokens at which bits per value are counted


def layer_config(model_config: PreTrainedConfig, config: KVQuantConfig, index: int) -> LayerConfig:
    """How a cache of the model stores layer ``index``, of full attention, as ``config`` says."""
    frequencies = rotary_frequencies(model_config.get_text_config(decoder=True), index)
    return config.layer(index)._replace(frequencies=frequencies)


def stored(config: LayerConfig, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer's cache gives back for all tokens of ``key`` and ``value`` (``[batch, kv_heads, length,
    head_dim]``), once they have been stored as ``config`` says: a prefill of :data:`PREFILL` tokens, then the rest. Of
    what it keeps in bf16, the newest are those at the end."""
    length = key.shape[2]
    layer = QuantizedLayer(config, length)
    prefill = min(PREFILL, length - 1)  # the last token at least is not of the prefill, and so has the bytes read
    if prefill:
        layer.update(key[:, :, :prefill], value[:, :, :prefill])
    return layer.update(key[:, :, prefill:], value[:, :, prefill:])


def bits_per_value(model_config: PreTrainedConfig, config: ConfigLike, tokens: int = BITS_AT) -> float:
    """Bits per value of K and V that a cache of ``tokens`` tokens occupies, all layers together, of sliding windows
    what they hold: codes, block scales, and whatever else grows with it. 16 times its bytes over those of bf16."""
    cache = QuantizedCache.without_memory(model_config, config, tokens)
    whole = QuantizedCache.without_memory(model_config, "bf16", tokens)
    return 16 * cache.nbytes / whole.nbytes


def kept_fields(config: KVQuantConfig) -> dict[str, object]:
    """The fields of ``config`` that are not formats: scales, ``strict`` and the like."""
    formats = ("format", "key_format", "value_format", "layers", "skip_layers")
    return {name: value for name, value in vars(config).items() if name not in formats}
