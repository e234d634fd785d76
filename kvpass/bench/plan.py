"""``kvpass plan``: what fits a GPU, from a model's configuration alone.

Bytes of the cache are exact: a :class:`kvpass.QuantizedCache` is laid out without memory and asked. Weights are exact
for one dtype throughout. What the activations of a prefill take is an estimate (:func:`activation_bytes`), and
:data:`OVERHEAD` an allowance for what the driver and libraries hold; ``kvpass bench capacity`` measures both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kvpass.bench.record import table
from kvpass.cache import QuantizedCache
from kvpass.config import KVQuantConfig

OVERHEAD = 2 << 30  # CUDA context, library workspaces, recorded graphs, fragmentation
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FORMATS = ("bf16", "fp8_e4m3", "nvfp4")
_BATCHES = (1, 4, 16, 64, 256)
_CONTEXTS = (2048, 8192, 32768, 131072)


def parse_bytes(text: str) -> int:
    """``80GB`` (10^9), ``80GiB`` (2^30) or a plain number of bytes.

    Raises:
        ValueError: Anything else, or nothing above zero.
    """
    match = re.fullmatch(r"([0-9.]+(?:[eE][0-9]+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    try:
        value = int(float(match[1]) * unit) if match and unit else 0
    except ValueError:
        value = 0
    if value <= 0:
        raise ValueError(f"memory {text!r}; write a positive size as 80GB, 141GiB or 8e10")
    return value


@dataclass(frozen=True)
class Plan:
    """What fits ``memory`` bytes.

    Attributes:
        config: The model's configuration.
        memory: Bytes of device memory.
        formats: Configurations of the cache, by the text they are shown as.
        weight_bytes: Bytes of the weights.
        chunk: Tokens of each sequence that a prefill computes at once.
        overhead: Bytes that nothing here accounts for.
    """

    config: PreTrainedConfig
    memory: int
    formats: dict[str, KVQuantConfig]
    weight_bytes: int
    chunk: int = 512
    overhead: int = OVERHEAD
    _known: dict[tuple[str, int], int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        memory: int,
        formats: Sequence[str] = FORMATS,
        dtype: torch.dtype = torch.bfloat16,
        chunk: int = 512,
    ) -> Plan:
        """A plan for weights of ``dtype``.

        Raises:
            ValueError: ``chunk`` below 1, an unknown format, or weights that do not fit.
            NotImplementedError: A model whose cache kvpass does not hold.
        """
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; it must be at least 1 token")
        weights = parameter_count(config) * dtype.itemsize
        plan = cls(config, memory, {text: KVQuantConfig.parse(text) for text in formats}, weights, chunk)
        for text in plan.formats:
            plan.row_bytes(text, 1)  # raises what it can now
        if plan.room <= 0:
            raise ValueError(
                f"the weights take {weights / 1e9:.1f} GB and {plan.overhead / 1e9:.1f} GB are set aside; "
                f"{memory / 1e9:.1f} GB do not hold them"
            )
        return plan

    @property
    def room(self) -> int:
        """Bytes left for caches and activations."""
        return self.memory - self.weight_bytes - self.overhead

    def needs(self, text: str, batch: int, context: int) -> int:
        """Bytes of cache and activations for ``batch`` sequences of ``context`` tokens, stored as ``text`` says."""
        chunk = min(self.chunk, context)
        masks = 2 * batch * chunk * context if chunk < context else 0  # one byte each: made, and a graph's copy
        return batch * self.row_bytes(text, context) + activation_bytes(self.config, batch, chunk) + masks

    def row_bytes(self, text: str, context: int) -> int:
        """Bytes of the cache of one sequence of ``context`` tokens in the format shown as ``text``."""
        if (text, context) not in self._known:
            self._known[text, context] = cache_bytes(self.config, self.formats[text], context)
        return self._known[text, context]

    def largest_batch(self, text: str, context: int, beside: int = 0) -> int:
        """Most sequences of ``context`` tokens, each with ``beside`` bytes more; 0 where not even one fits."""
        return _largest(lambda batch: self.needs(text, batch, context) + batch * beside <= self.room, 1 << 20)

    def longest_context(self, text: str, batch: int) -> int:
        """Most tokens of each of ``batch`` sequences, in steps of 32; 0 where not even those fit.

        What the model was trained for (``max_position_embeddings``) is not looked at.
        """
        return 32 * _largest(lambda steps: self.needs(text, batch, 32 * steps) <= self.room, 1 << 22)

    def __str__(self) -> str:
        context = 8192
        names = list(self.formats)
        sizes = {text: self.row_bytes(text, context) / context for text in names}
        whole = cache_bytes(self.config, KVQuantConfig("bf16"), context) / context
        first = [(text, f"{sizes[text]:,.0f}", f"{whole / sizes[text]:.2f}") for text in names]
        limit = getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)
        title = (
            f"{self.config.model_type}: weights {self.weight_bytes / 1e9:.2f} GB of {self.memory / 1e9:.2f} GB; "
            f"prefill in chunks of {self.chunk} tokens; {self.overhead / 1e9:.2f} GB set aside"
        )
        return "\n\n".join(
            [
                title,
                table(("format", f"bytes/token at {context:,}", "tokens vs bf16"), first),
                "Longest context, tokens"
                + (f" (the model's own limit is {limit:,})" if limit else "")
                + "\n"
                + table(
                    ("batch", *names),
                    [[str(b), *(f"{self.longest_context(text, b):,}" for text in names)] for b in _BATCHES],
                ),
                "Largest batch\n"
                + table(
                    ("context", *names),
                    [[f"{c:,}", *(f"{self.largest_batch(text, c):,}" for text in names)] for c in _CONTEXTS],
                ),
            ]
        )


def cache_bytes(config: PreTrainedConfig, quantization: KVQuantConfig, slots: int) -> int:
    """Bytes of a cache of ``slots`` tokens for one sequence."""
    return QuantizedCache.without_memory(config, quantization, slots).nbytes


def activation_bytes(config: PreTrainedConfig, batch: int, tokens: int) -> int:
    """An estimate of what a prefill of ``tokens`` tokens for each of ``batch`` sequences holds beside the cache.

    At its peak that is a layer's MLP, 16 bits each: the residual stream and its normalized copy, gate, up and their
    product; and the logits of each last token, in 16 and 32 bits.
    """
    text = config.get_text_config(decoder=True)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return int(batch) * int(2 * tokens * (4 * text.hidden_size + 3 * inner) + 6 * text.vocab_size)


def parameter_count(config: PreTrainedConfig) -> int:
    """Parameters of a model of this configuration, counted on one that is built without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(int(parameter.numel()) for parameter in model.parameters())


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, where every smaller one does."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
