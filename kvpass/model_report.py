"""What :func:`kvpass.report` returns: what was done for one model, in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpass.config import KVQuantConfig
from kvpass.fx_passes.report import GraphReport

BYPASSED = (
    "it kept no cache (use_cache=False), or this model's generate() has a loop of its own or calls that of a model "
    "inside it, which is then the one to enable"
)
# A larger share of a layer's K or V at the end of its range is reported. A calibrated scale leaves far less there.
_SATURATED = 0.005


@dataclass(frozen=True)
class ModelReport:
    """What kvpass did for one model.

    Attributes:
        config: The configuration given to :func:`enable`; None where the model is not enabled.
        graphs: A report for each graph compiled with ``kvquant``, oldest first.
        cache_bytes, cache_slots: Bytes of K and V that the last ``generate`` allocated, and tokens they have room for.
        cross_bytes: The same of cross attention, which has its own number of tokens.
        eager_reads: How often the last ``generate`` read a layer's decoded cache outside a compiled graph.
        was_bypassed: The last ``generate`` did not ask for a cache, so that nothing was quantized.
        saturation: Of the cache of the last ``generate``: see :meth:`kvpass.QuantizedCache.saturation`. Empty where
            there is none, or its caller has it.
        tp_rank, tp_size: This process's tensor-parallel rank and how many there are; what else is here is this rank's.
        offloaded: Where parts of the model are kept besides its devices (``hf_device_map``); None where there are none.
    """

    config: KVQuantConfig | None
    graphs: tuple[GraphReport, ...]
    cache_bytes: int = 0
    cache_slots: int = 0
    cross_bytes: int = 0
    eager_reads: int = 0
    was_bypassed: bool = False
    saturation: tuple[tuple[float, float], ...] = ()
    tp_rank: int = 0
    tp_size: int = 1
    offloaded: str | None = None

    @property
    def fused(self) -> int:
        """Fused attentions of the newest graph that has any; 0 where there is none."""
        return next((graph.count("fused") for graph in reversed(self.graphs) if graph.count("fused")), 0)

    def __str__(self) -> str:
        lines = [f"kvpass: enabled with {self.config}" if self.config else "kvpass: not enabled"]
        if self.tp_size > 1:
            lines.append(f"tensor-parallel rank {self.tp_rank} of {self.tp_size}: what follows is this rank's")
        if self.config and self.config.scales:
            lines.append(f"scales: {self.config.scales}")
        if self.config and self.config.learns:
            lines.append(f"from the first tokens of each prompt: {', '.join(self.config.learns)}")
        lines += [
            f"scale too small: {share:.1%} of layer {index}'s {name} is at the end of its range; `kvpass calibrate` "
            "measures a better one"
            for index, shares in enumerate(self.saturation)
            for name, share in zip("KV", shares, strict=True)
            if share > _SATURATED
        ]
        if self.cache_bytes:
            per_token = self.cache_bytes / self.cache_slots
            lines.append(f"cache: {self.cache_bytes:,} bytes for {self.cache_slots:,} tokens, {per_token:,.0f} each")
        if self.cross_bytes:
            lines.append(f"cross attention: {self.cross_bytes:,} bytes")
        if self.offloaded:
            lines.append(
                f"hf_device_map has parts of the model on {self.offloaded}: transformers does not compile it then, and "
                "attention is not fused"
            )
        if self.eager_reads:
            lines.append(
                f"the last generate read a layer's cache {self.eager_reads:,} times outside a compiled graph: decoded "
                "in full, not fused (transformers does that in beam search, with disable_compile=True, and for a "
                "prompt that goes on in a cache; torch does when it has compiled one step "
                f"{torch._dynamo.config.recompile_limit} times)"
            )
        if self.was_bypassed:
            lines.append(f"nothing was quantized in the last generate: {BYPASSED}")
        lines += [str(graph) for graph in self.graphs]
        if not self.graphs and self.config:
            lines.append("no decode step was compiled with kvquant yet")
        elif not self.graphs:
            lines.append(
                "no graph was compiled with kvquant yet. torch.compile(model, backend='kvquant').generate(...) does "
                "not compile: write kvpass.enable(model, format) and model.generate(...), or call the compiled model "
                "itself. transformers compiles no generate(..., compile_config=...) on a CPU"
            )
        return "\n".join(lines)
