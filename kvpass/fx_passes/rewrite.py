"""Turn matched sites into ``kvpass::attention``. Nothing here decides: every site given is rewritten."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.source import AttrSource

from kvpass.config import KVQuantConfig, LayerConfig
from kvpass.formats import KVBuffers
from kvpass.fx_passes.forms import example
from kvpass.fx_passes.match import QuantizedRead, Site, StaticRead

STORE = torch.ops.kvpass.store.default
ATTENTION = torch.ops.kvpass.attention.default
RING_MASK = torch.ops.kvpass.ring_mask.default
NEWEST_FOR = torch.ops.kvpass.newest_for.default


class Input(NamedTuple):
    """Where one input of a rewritten graph comes from.

    Attributes:
        position: Place among the inputs of the graph before.
        field: None for that input itself, else the field of the :class:`kvpass.formats.KVBuffers` that replace it.
    """

    position: int
    field: str | None = None

    def of(self, args: Sequence[Any]) -> Any:
        """This input, from those of the graph before."""
        return args[self.position] if self.field is None else getattr(args[self.position].buffers, self.field)


class StaticPair(NamedTuple):
    """Positions, among the inputs of the graph before, of one layer's K and V buffers of a ``StaticCache``, and how
    that layer is stored."""

    key: int
    value: int
    layer: LayerConfig


def rewrite(
    gm: fx.GraphModule, sites: Sequence[Site], config: KVQuantConfig
) -> tuple[dict[fx.Node, Input], list[StaticPair]]:
    """Fuse ``sites`` in place.

    Args:
        gm: The graph module ``sites`` were found in.
        sites: What to fuse.
        config: Formats and scales for the buffers of a ``StaticCache``; a ``QuantizedCache`` brings its own.

    Returns:
        Where each placeholder of the rewritten graph comes from, and the pairs of former inputs whose buffers must be
        quantized before it runs (both trivial if no site reads a ``StaticCache``).
    """
    graph = gm.graph
    before = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    pairs, origin = [], {node: Input(index, None) for node, index in before.items()}
    for site in sites:
        if isinstance(site.key, StaticRead) and isinstance(site.value, StaticRead):
            layer = config.layer(site.key.index or 0)
            pairs.append(StaticPair(before[site.key.buffer], before[site.value.buffer], layer))
            buffers = []
            for read, fmt in ((site.key, layer.key), (site.value, layer.value)):
                placeholders = _replacements(graph, read.buffer, fmt.fields(layer.keep))
                position = origin.pop(read.buffer).position
                origin |= {node: Input(position, field) for field, node in placeholders.items()}
                buffers += [placeholders.get(field) for field in KVBuffers._fields]
            formats = (layer.key.name, layer.value.name)
            with graph.inserting_before(site.attention):
                new_tokens = (site.key.tokens, site.value.tokens, site.key.positions)
                graph.call_function(STORE, (*new_tokens, *buffers, *formats, layer.keep_first))
        else:
            assert isinstance(site.key, QuantizedRead) and isinstance(site.value, QuantizedRead)
            buffers = [*site.key.buffers, *site.value.buffers]
            formats = (site.key.format, site.value.format)
        with graph.inserting_before(site.attention):
            mask, positions = _mask(graph, site), site.key.positions
            if example(positions).shape[0] != example(site.query).shape[2]:
                positions = graph.call_function(NEWEST_FOR, (positions, site.query))
            if isinstance(site.key, QuantizedRead) and site.key.unroll is not None:
                mask = graph.call_function(RING_MASK, (mask, site.key.unroll.args[1], buffers[0]))
            arguments = (site.query, *buffers, positions, mask, site.scale, False, *formats)
            extras: dict[str, Any] = {"softcap": site.softcap} if site.softcap else {}
            extras |= {"sinks": site.sinks} if site.sinks is not None else {}
            fused = graph.call_function(ATTENTION, arguments, extras)
        fused.meta = dict(site.attention.meta)
        site.attention.replace_all_uses_with(fused)
        graph.erase_node(site.attention)
        for node in site.consumed:
            if not node.users:
                graph.erase_node(node)
        for side in (site.key, site.value):
            if isinstance(side, StaticRead):
                graph.erase_node(side.buffer)
    graph.lint()
    gm.recompile()
    return origin, pairs


def _mask(graph: fx.Graph, site: Site) -> fx.Node | None:
    """All that is added to the scores of ``site`` or hides them, as one node of four dimensions."""
    total: fx.Node | None = None
    visible: fx.Node | None = None
    for added in site.added:
        term = added.node
        if missing := 4 - example(term).dim():
            term = graph.call_function(operator.getitem, (term, (None,) * missing))
        if example(added.node).dtype == torch.bool:
            visible = term if visible is None else graph.call_function(torch.logical_and, (visible, term))
            continue
        if added.factor != 1.0:
            term = graph.call_function(torch.mul, (term, added.factor))
        total = term if total is None else graph.call_function(torch.add, (total, term))
    if total is None or visible is None:
        return visible if total is None else total
    return graph.call_function(torch.where, (visible, total, -math.inf))


def _replacements(graph: fx.Graph, buffer: fx.Node, fields: Sequence[str]) -> dict[str, fx.Node]:
    """New placeholders, by field, for the :class:`kvpass.formats.KVBuffers` that take the place of ``buffer``."""
    return {field: static_placeholder(graph, buffer, field) for field in fields}


def static_placeholder(graph: fx.Graph, replaced: fx.Node, field: str) -> fx.Node:
    """A new placeholder for a tensor whose address stays, in front of the placeholder that it replaces."""
    with graph.inserting_before(replaced):
        node = graph.placeholder(f"{replaced.name}_{field}")
    # What AOTAutograd reads off a Dynamo graph's inputs: a source, and that the address stays (CUDA graphs).
    node._dynamo_source = AttrSource(replaced._dynamo_source, field)  # type: ignore[attr-defined]
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return node
