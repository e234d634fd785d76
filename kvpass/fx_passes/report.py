"""What the pass did to a graph, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from kvpass import ops
from kvpass.config import KVQuantConfig
from kvpass.formats import KVBuffers, get_format
from kvpass.fx_passes.forms import example
from kvpass.fx_passes.match import Exact, Match, QuantizedRead, Site, StaticRead


@dataclass(frozen=True)
class SiteReport:
    """One attention of a compiled graph.

    Attributes:
        layer: Path of the module that attends.
        status: ``fused``; ``exact`` (a prefill over the K and V it has just computed: nothing to fuse); or
            ``not fused``.
        key_format, value_format: Formats, where fused.
        bytes_per_token: Stored bytes of K and V of this layer, where fused.
        kernel: Which kernel computes it, where fused.
        reason: Why it is not fused.
    """

    layer: str
    status: str
    key_format: str | None = None
    value_format: str | None = None
    bytes_per_token: int | None = None
    kernel: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph.

    Attributes:
        sites: Its attentions, in order.
        why_none: Why it has none.
        linears: How many linear layers were merged, and into how many.
        devices: The GPUs that it runs on.
    """

    sites: tuple[SiteReport, ...]
    why_none: str | None = None
    linears: tuple[int, int] = (0, 0)
    devices: tuple[str, ...] = ()

    def count(self, status: str) -> int:
        """Attentions with this status."""
        return sum(site.status == status for site in self.sites)

    def __str__(self) -> str:
        if not self.sites:
            return f"graph without attention: {self.why_none}"
        counts = ", ".join(f"{self.count(s)} {s}" for s in ("fused", "exact", "not fused") if self.count(s))
        lines = [f"graph with {len(self.sites)} attentions: {counts}", *table(self.sites)]
        if self.linears[0]:
            lines.append(f"  {self.linears[0]} linear layers that share an input computed as {self.linears[1]}")
        if len(self.devices) > 1:
            lines.append(f"  on {', '.join(self.devices)}: without CUDA graphs, which torch records for one device")
        return "\n".join(lines)


def describe(
    matches: Sequence[Match],
    config: KVQuantConfig,
    stacks: Sequence[Sequence[fx.Node]] = (),
    devices: tuple[str, ...] = (),
) -> GraphReport:
    """The report of a graph's ``matches`` and ``stacks``, which have been or are about to be fused."""
    linears = sum(map(len, stacks)), len(stacks)
    if not matches:
        why = "it holds no attention that is recognized: the model has none, or a graph break cut it apart "
        return GraphReport((), why + "(TORCH_LOGS=graph_breaks shows where)", linears, devices)
    return GraphReport(tuple(_describe(match, config) for match in matches), None, linears, devices)


def table(sites: Sequence[SiteReport]) -> list[str]:
    """Lines of text, one per site, with neighbours that differ in nothing but their layer's number merged."""
    rows: list[tuple[list[str], tuple[object, ...]]] = []
    for site in sites:
        key = (site.status, site.key_format, site.value_format, site.bytes_per_token, site.kernel, site.reason)
        if rows and rows[-1][1] == key:
            rows[-1][0].append(site.layer)
        else:
            rows.append(([site.layer], key))
    lines = []
    for layers, (status, key_format, value_format, nbytes, kernel, reason) in rows:
        name = layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]} ({len(layers)})"
        stored = f"K {key_format}, V {value_format}, {nbytes} bytes per token, kernel {kernel}"
        lines.append(f"  {name}: {status}, {stored if status == 'fused' else reason}")
    return lines


def _describe(match: Match, config: KVQuantConfig) -> SiteReport:
    if isinstance(match, Exact):
        return SiteReport(match.layer, "exact", reason="a first prefill attends to the K and V it has just computed")
    if not isinstance(match, Site):
        return SiteReport(match.layer, "not fused", reason=match.reason)
    names, nbytes = [], 0
    layer = config.layer(match.key.index or 0) if isinstance(match.key, StaticRead) else config
    for read, fmt in ((match.key, layer.key), (match.value, layer.value)):
        if isinstance(read, QuantizedRead):
            fmt = get_format(read.format)
        kv_heads, head_dim = int(example(read.source).shape[1]), int(example(read.source).shape[3])
        names.append(fmt.name)
        nbytes += fmt.bytes_per_token(kv_heads, head_dim)
    masks = sorted((example(added.node) for added in match.added), key=lambda mask: mask.dtype == torch.bool)
    mask = masks[0] if masks else None  # together they are what the first of these is
    mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
    keep = _kept(match.key) if isinstance(match.key, QuantizedRead) else config.layer(match.key.index or 0).keep
    call = (example(match.query), kv_heads, head_dim, mask, match.scale, names[0], names[1])
    kernel = ops.attention_kernel(*call, keep, match.softcap, match.sinks is not None)
    return SiteReport(match.layer, "fused", names[0], names[1], nbytes, kernel)


def _kept(read: QuantizedRead) -> int:
    """Slots that a ``QuantizedCache`` keeps in bf16."""
    kept = read.buffers[KVBuffers._fields.index("kept")]
    return 0 if kept is None else int(example(kept).shape[2])
