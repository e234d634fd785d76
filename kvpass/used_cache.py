"""The cache that a ``generate`` uses: what is refused of one that the caller passes, and how often it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticCache, StaticLayer

from kvpass.architecture import layers_of_transformers
from kvpass.cache import QuantizedCache
from kvpass.encoder_decoder import QuantizedEncoderDecoderCache

AnyQuantizedCache = QuantizedCache | QuantizedEncoderDecoderCache


@dataclass
class Use:
    """A cache that the `generate` running in this thread uses.

    Attributes:
        rows: Of its batch.
        is_ours: Nobody else keeps it.
        encoder_length: Of what cross attention reads; None without.
        reads_before: What ``eager_reads`` of the cache was when ``generate`` began.
        reads_in_steps: How much more it became in compiled steps; None where ``generate`` asked for none. Not kept
            without ``strict``.
    """

    cache: Any
    rows: int
    is_ours: bool
    encoder_length: int | None
    reads_before: int = 0
    reads_in_steps: int | None = None

    def __post_init__(self) -> None:
        self.reads_before = self.reads

    @property
    def reads(self) -> int:
        """``eager_reads`` of the cache; a static one counts none."""
        return getattr(self.cache, "eager_reads", 0)

    @property
    def unfused(self) -> int:
        """Reads that ``strict`` forbids: not those of a prompt that goes on in the cache, nor of its caller."""
        return self.reads - self.reads_before if self.reads_in_steps is None else self.reads_in_steps

    def counting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, counting its reads."""
        self.reads_in_steps = self.reads_in_steps or 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self.reads
            result = step(*args, **kwargs)
            self.reads_in_steps = (self.reads_in_steps or 0) + self.reads - before
            return result

        return counted


def self_attention(cache: Any) -> Any:
    """``cache`` itself, or of an encoder-decoder's the part to which tokens are added."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def check_given(cache: Cache, rows: int, slots: int, text_config: PreTrainedConfig) -> None:
    """Refuse a cache of the caller's that is not quantized, another model's, half written or too small, before anything
    is written into it."""
    own = self_attention(cache)
    if not isinstance(own, (QuantizedCache, StaticCache)):
        raise ValueError(
            f"kvpass is enabled on this model, and a {type(cache).__name__} was passed, which would not be quantized; "
            "pass a kvpass.QuantizedCache or no cache, or call kvpass.disable(model)"
        )
    if isinstance(own, StaticCache) and (own.offloading or any(type(layer) is not StaticLayer for layer in own.layers)):
        raise ValueError(
            "a StaticCache can be quantized where all its layers are of full attention and none is offloaded; pass a "
            "kvpass.QuantizedCache or no cache"
        )
    layers = layers_of_transformers(text_config, cache.get_max_length())
    if len(cache) != len(layers):
        raise ValueError(
            f"the cache that was passed has {len(cache)} layers, the model {len(layers)}; it is another model's"
        )
    if isinstance(own, QuantizedCache):
        own.check_fits(layers)
        if own.is_half_written:
            raise ValueError(
                "some layers of the cache that was passed lack its newest tokens, since the last generate was "
                "interrupted; call its reset(), and pass the whole prompt"
            )
    if slots > cache.get_max_length():
        raise ValueError(
            f"prompt and new tokens need {slots} slots, but the cache that was passed has {cache.get_max_length()}; "
            f"make it with max_cache_len={slots} or more"
        )
    if own.is_initialized and own.batch_size != rows:
        raise ValueError(f"the batch has {rows} rows, but the cache that was passed was allocated for {own.batch_size}")


def check_fitted(cache: Cache) -> None:
    """Raise if a compiled decode step ran over the end of ``cache``: the caller passed only the new tokens of a
    conversation, so that what the cache needed could not be known before."""
    if not isinstance(cache, AnyQuantizedCache) or not cache.is_initialized:
        return
    if (stored := int(cache.get_seq_length())) > cache.max_cache_len:
        raise RuntimeError(
            f"the cache that was passed has {cache.max_cache_len} slots, and {stored} tokens were generated into it: "
            f"the tokens after the first {cache.max_cache_len} are meaningless. Make it with max_cache_len={stored}"
        )
