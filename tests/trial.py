"""One architecture through a quantized cache, beside transformers' own: what ``test_compatibility.py`` asks about."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from architectures import VOCABULARY, Architecture
from torch import Tensor, fx
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import kvpass
from kvpass import hf
from kvpass.fx_passes.match import Match, Rejected, Site, find_sites
from kvpass.fx_passes.rewrite import rewrite
from kvpass.layers import HybridLayer, QuantizedLayer

ROWS, PROMPT, TOKENS, SLOTS = 3, 12, 27, 32
PADDING = (0, 3, 9)
MIXED = kvpass.KVQuantConfig(key_format="fp8_e4m3", value_format="nvfp4")
# Each architecture is fused in one of these, in turns: K and V apart, transforms, kept tokens, every kind of scale.
FORMATS = {
    "fp8_e4m3/nvfp4": MIXED,
    "accurate": kvpass.KVQuantConfig.preset("accurate"),
    "balanced": kvpass.KVQuantConfig.preset("balanced"),
    "compact": kvpass.KVQuantConfig.preset("compact"),
    "fp4_mx_block16/fp8_e5m2": kvpass.KVQuantConfig("fp4_mx_block16", value_format="fp8_e5m2"),
    "int8": kvpass.KVQuantConfig("int8", keep_last=3),
}


@dataclass(frozen=True)
class Result:
    """What became of an architecture.

    Attributes:
        refused: The message with which the cache refuses it; None if it does not.
        error: Largest difference of logits from transformers' own cache, as a share of the largest logit.
        generate_error: The same of the logits of ``generate``, as long as both choose the same tokens.
        fusion_error: The same for fused against unfused, on the same bytes.
        fused: Attentions that were fused.
        reasons: Why others were not.
        kinds: Kinds of its cache's layers.
    """

    refused: str | None = None
    error: float = 0.0
    generate_error: float = 0.0
    fusion_error: float = 0.0
    fused: int = 0
    reasons: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


class Rounded(DynamicCache):
    """transformers' own cache with what the bf16 format stores: K and V rounded. A first prefill is exact."""

    def update(self, key: Tensor, value: Tensor, index: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        is_first = index >= len(self.layers) or self.layers[index].get_seq_length() == 0
        rounded = super().update(key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype), index, *args, **kwargs)
        return (key, value) if is_first else rounded


@torch.no_grad()
def try_architecture(architecture: Architecture, fused: kvpass.KVQuantConfig) -> Result:
    """Run ``architecture`` and compare, the fused graph with a cache of ``fused``."""
    model = architecture.model()
    two = model.config.is_encoder_decoder
    kind = kvpass.QuantizedEncoderDecoderCache if two else kvpass.QuantizedCache
    try:
        error, generate_error = errors(model)
    except NotImplementedError as refusal:
        return Result(refused=str(refusal))
    run = _Run(model)

    matches: list[Match] = []
    step = torch.compile(model, backend=_pass_alone(matches))
    cache = kind(model.config, fused, max_cache_len=SLOTS)
    run.call(model, cache, 0, PROMPT)
    fusion_error = 0.0
    for start in range(PROMPT, TOKENS):
        expected = run.call(model, copy.deepcopy(cache), start, start + 1)
        fusion_error = max(fusion_error, _difference(run.call(step, cache, start, start + 1), expected))
    return Result(
        error=error,
        generate_error=generate_error,
        fusion_error=fusion_error,
        fused=sum(isinstance(match, Site) for match in matches),
        reasons=tuple(sorted({match.reason for match in matches if isinstance(match, Rejected)})),
        kinds=_kinds(cache.self_attention_cache.layers if two else cache.layers, two),
    )


@torch.no_grad()
def errors(model: Any) -> tuple[float, float]:
    """``Result.error`` and ``Result.generate_error`` of a model.

    Raises:
        NotImplementedError: The model is refused.
    """
    config, two = model.config, model.config.is_encoder_decoder
    kind = kvpass.QuantizedEncoderDecoderCache if two else kvpass.QuantizedCache
    cache, run = kind(config, "bf16", max_cache_len=SLOTS), _Run(model)
    own = EncoderDecoderCache(Rounded(config=config), Rounded(config=config)) if two else Rounded(config=config)
    ours, theirs = run.tokens(cache), run.tokens(own)
    return _difference(ours[run.seen], theirs[run.seen]), run.generate_error(Rounded(config=config))


class _Run:
    """The tokens, and how a model is called with them."""

    def __init__(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self.model = model
        self.ids = torch.randint(4, VOCABULARY, (ROWS, TOKENS), generator=generator)
        self.mask = (torch.arange(SLOTS) >= torch.tensor(PADDING)[:, None]).long()
        self.names = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in self.names else "past_key_values"
        if model.config.is_encoder_decoder:
            encoder_ids = torch.randint(4, VOCABULARY, (ROWS, 9), generator=generator)
            self.encoder_mask = (torch.arange(9) >= torch.tensor((0, 2, 5))[:, None]).long()
            self.encoder_outputs = model.get_encoder()(input_ids=encoder_ids, attention_mask=self.encoder_mask)

    @property
    def seen(self) -> Tensor:
        """Which tokens are no padding."""
        return self.mask[:, :TOKENS].bool()

    def call(self, model: Any, cache: Any, start: int, end: int) -> Tensor:
        """Logits of tokens ``start`` to ``end``. The mask has the cache's length: masks of one shape, one graph."""
        grows = isinstance(cache, Rounded)
        mask = self.mask[:, :end] if grows or end <= PROMPT else self.mask
        more: dict[str, Any] = {self.cache_name: cache, "use_cache": True}
        if self.model.config.is_encoder_decoder:
            more |= {"encoder_outputs": self.encoder_outputs, "attention_mask": self.encoder_mask}
            more["decoder_input_ids"] = self.ids[:, start:end]
        else:
            more |= {"input_ids": self.ids[:, start:end], "attention_mask": mask}
            if "position_ids" in self.names:
                more["position_ids"] = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]
        logits: Tensor = model(**more).logits
        return logits

    def generate_error(self, own: DynamicCache) -> float:
        """How far the logits of ``generate`` with a cache of the bf16 format are from those with ``own``."""
        prompt = {"attention_mask": self.mask[:, :PROMPT]}
        if self.model.config.is_encoder_decoder:
            prompt = {"encoder_outputs": self.encoder_outputs, "attention_mask": self.encoder_mask}
            own = EncoderDecoderCache(own, Rounded(config=self.model.config))
        else:
            prompt["input_ids"] = self.ids[:, :PROMPT]
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
        options |= {"output_logits": True, "disable_compile": True, "use_cache": True}
        theirs = self.model.generate(**prompt, **options, **{hf.CACHE_ARGUMENT: own})
        kvpass.enable(self.model, "bf16")
        ours = self.model.generate(**prompt, **options)
        kvpass.disable(self.model)
        start = ours.sequences.shape[1] - options["max_new_tokens"]
        same = (ours.sequences == theirs.sequences).long().cummin(-1).values.bool()
        errors = []
        for i, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True), start):
            if (rows := same[:, i - 1]).any():
                errors.append(_difference(a[rows], b[rows]))
        return max(errors)

    def tokens(self, cache: Any) -> Tensor:
        """Logits of the prompt, then token by token."""
        spans = [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, TOKENS))]
        return torch.cat([self.call(self.model, cache, *span) for span in spans], 1)


def _pass_alone(matches: list[Match]) -> Callable[..., Any]:
    """A backend that rewrites a graph and generates no code. ``matches`` gets those of the newest graphs."""

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        found = find_sites(gm.graph)
        known = {match.layer for match in matches}
        if known & {match.layer for match in found}:  # compiled again, for other shapes
            matches[:] = [match for match in matches if match.layer not in {m.layer for m in found}]
        matches.extend(found)
        rewrite(gm, [match for match in found if isinstance(match, Site)], kvpass.KVQuantConfig())
        return gm

    return backend


def _difference(a: Tensor, b: Tensor) -> float:
    worst = float((a - b).abs().max() / b.abs().max())
    return worst if worst == worst else float("inf")  # NaN is worse than any number


def _kinds(layers: list[Any], two: bool) -> tuple[str, ...]:
    names = set()
    for layer in layers:
        names.add("sliding" if getattr(layer, "is_sliding", False) else "full")
        if isinstance(layer, HybridLayer):
            names.add("linear")
        elif not isinstance(layer, QuantizedLayer):
            names.discard("full")
            names.add("linear")
    return tuple(sorted(names)) + (("cross",) if two else ())
