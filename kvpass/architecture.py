"""What a model's configuration says of its cache: the kinds of its layers, and which models cannot have ours."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Mapping
from typing import Any

from packaging.version import Version
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Models with a sliding-window cache whose masks know nothing of the window: they rely on the cache dropping tokens.
_MASKS_WITHOUT_WINDOW = (
    *("kyutai_speech_to_text", "moonshine_streaming", "moshi"),
    *("inkling_text", "inkling2_text", "inkling2_loop_text", "zaya"),
    *("qwen3_vl_moe_text", "qwen3_omni_moe_text"),
)
# Models that cannot have a cache of a fixed size in the place of their own, and why. No attribute tells: transformers'
# `_can_compile_fullgraph` is set for mllama, and not for many that work. tests/test_architecture.py looks for others.
_WIDTH = "works with no static cache: it {} by the width of K"
_UNMASKED = "works with no static cache: it has no mask after the prompt, so it would attend to empty slots"
_OWN_MASK = "works with no static cache: it takes no mask but the one of two dimensions"
_NO_STATIC_CACHE = {
    "blt": "keeps several caches, of several decoders",
    "bloom": "makes its biases (alibi) as wide as the cache while it reads a prompt, and K has no such width then",
    "cpmant": _WIDTH.format("places its biases"),
    "flaubert": "keeps no K and V that another cache could hold",
    "fsmt": _UNMASKED,
    "git": _OWN_MASK,
    "gpt_neo": _WIDTH.format("counts tokens"),
    "led": _UNMASKED,
    "minimax": "makes a cache of its own kind, which cannot be replaced",
    "mllama_text_model": "keeps K and V of images beside those of tokens, and an image does not have as many",
    "prophetnet": _OWN_MASK,
    "xlm": "keeps no K and V that another cache could hold",
}
if Version(importlib.metadata.version("transformers")) < Version("5.24"):  # seen with 5.17
    _NO_STATIC_CACHE |= dict.fromkeys(("big_bird", "megatron-bert", "rembert", "roformer"), _UNMASKED)
# Models that attend to both sides, unless told that they are decoders. Others have `is_decoder` without a meaning.
_ENCODERS = {
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
# Models whose `generate` is that of a part of them, which makes the cache, by the part's name.
_GENERATES_WITH = {
    "blip": "text_decoder",
    "clvp": "speech_decoder_model",
    "kosmos-2": "text_model",
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), "language_model"),
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), "thinker"),
}

_AS_THEY_ARE = tuple(
    getattr(cache_utils, name) for name in ("LinearAttentionLayer", "DummyLayer") if hasattr(cache_utils, name)
)
_PLAIN = (StaticLayer, StaticSlidingWindowLayer)
_HYBRIDS = (LinearAttentionAndStaticFullAttentionLayer, LinearAttentionAndStaticSlidingWindowAttentionLayer)


def layers_of_transformers(config: PreTrainedConfig, max_cache_len: int) -> list[Any]:
    """What transformers itself would cache each layer of the model in, after checking that all can be held."""
    check_attention(config)
    if reason := _why_no_static_cache(config):
        raise NotImplementedError(f"{config.model_type} {reason}")
    if in_every_layer(config, "num_attention_heads") is None:
        raise NotImplementedError(f"{config.model_type} has no attention layers, so there is no KV cache to quantize")
    try:
        layers = StaticCache(config=config, max_cache_len=max_cache_len).layers
    except KeyError as error:
        raise NotImplementedError(
            f"{config.model_type}: transformers has no static cache for layers of type {error}"
        ) from error
    known = {*_PLAIN, *_HYBRIDS, *_AS_THEY_ARE}
    for index, layer in enumerate(layers):
        if type(layer) not in known:
            raise NotImplementedError(
                f"{config.model_type}: layer {index} needs a {type(layer).__name__}, which keeps more than K and V; "
                f"supported are {', '.join(sorted(kind.__name__ for kind in known))}"
            )
        if getattr(layer, "is_sliding", False) and config.model_type in _MASKS_WITHOUT_WINDOW:
            raise NotImplementedError(
                f"{config.model_type}: its masks leave the sliding window to the cache, and a ring needs it in the mask"
            )
    if not any(map(holds_attention, layers)):
        raise NotImplementedError(f"{config.model_type} has no attention layers, so there is no KV cache to quantize")
    return layers


def _why_no_static_cache(config: PreTrainedConfig) -> str | None:
    if config.model_type in _ENCODERS and not config.is_decoder:
        return "attends to later tokens too, so it has no KV cache, unless its configuration says is_decoder=True"
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
        return "reads the cache by itself with recurrent_kv_cache_mode='last_loop'; supported is 'per_loop'"
    return _NO_STATIC_CACHE.get(config.model_type)


def check_makes_a_cache(model: Any) -> None:
    """Raise ``NotImplementedError`` for a model whose ``generate`` makes no KV cache that could be replaced."""
    model_type = model.config.model_type
    if part := _GENERATES_WITH.get(model_type):
        raise NotImplementedError(
            f"{model_type} generates with a part of it, whose cache it is: call kvpass.enable(model.{part}, ...) and, "
            "as before, model.generate"
        )
    kinds = {type(part) for part in model.modules()}
    arguments = {name for kind in kinds for name in inspect.signature(kind.forward).parameters}
    if arguments.isdisjoint({"cache", "past_key_values"}):
        raise NotImplementedError(f"{model_type} takes no KV cache, so there is nothing to quantize")


def check_inputs(config: PreTrainedConfig, inputs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for inputs of ``generate`` with which a static cache would have another mask."""
    if config.model_type == "paligemma" and inputs.get("token_type_ids") is None:
        raise ValueError(
            "paligemma needs token_type_ids with a static cache, or its prompt is attended to in one direction only; "
            "pass what its processor returns"
        )


def head_dim_of(config: PreTrainedConfig) -> int | None:
    """The head_dim of every layer, where the configuration tells it plainly; None where it must be seen."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return None  # latent attention: K and V have other widths
    width, heads = in_every_layer(config, "hidden_size"), in_every_layer(config, "num_attention_heads")
    return in_every_layer(config, "head_dim", "d_kv") or (width // heads if width and heads else None)


def rotary_frequencies(config: PreTrainedConfig, layer: int) -> tuple[float, ...]:
    """Radians per position by which rotary embedding turns pairs of K's channels, from the first pair on, in the layer
    of this index; empty where the configuration does not tell. Where they depend on a prompt's length, those of a short
    one."""
    found = getattr(config, "rope_parameters", None) or {}
    layer_type = dict(enumerate(getattr(config, "layer_types", None) or ())).get(layer)
    by_type = isinstance(found.get(layer_type), dict)
    parameters = found[layer_type] if by_type else found
    kind, base, head_dim = parameters.get("rope_type"), parameters.get("rope_theta"), head_dim_of(config)
    if base is None or head_dim is None or (kind != "default" and kind not in ROPE_INIT_FUNCTIONS):
        return ()
    if kind != "default":
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", **({"layer_type": layer_type} if by_type else {}))
        return tuple(frequencies.tolist())
    turned = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    return tuple(base ** (-channel / turned) for channel in range(0, turned, 2))


def in_layers(config: PreTrainedConfig, *names: str) -> set[Any]:
    """The first of these attributes that is set, of each layer; None among them where none is."""
    layers = getattr(config, "per_layer_config", None) or [config]
    return {next((v for name in names if (v := getattr(layer, name, None)) is not None), None) for layer in layers}


def in_every_layer(config: PreTrainedConfig, *names: str) -> int | None:
    """The first of these attributes that is set, if it is the same number in every layer; else None."""
    found = in_layers(config, *names)
    value = found.pop() if len(found) == 1 else None
    return value if isinstance(value, int) else None


def check_attention(config: PreTrainedConfig) -> None:
    """Raise ``NotImplementedError`` for an attention implementation that would attend to empty slots."""
    implementation = config._attn_implementation
    if implementation not in (None, "sdpa", "eager", "flex_attention"):
        raise NotImplementedError(
            f"attention implementation {implementation!r} takes no mask over a static cache, so it would attend to "
            "empty slots; load the model with attn_implementation='sdpa'"
        )


def holds_attention(layer: Any) -> bool:
    """Whether a layer of transformers' static cache holds K and V (beside states of linear attention, or alone)."""
    return type(layer) in (*_PLAIN, *_HYBRIDS)


def is_hybrid(layer: Any) -> bool:
    """Whether a layer of transformers' static cache holds K and V and states of linear attention."""
    return type(layer) in _HYBRIDS
