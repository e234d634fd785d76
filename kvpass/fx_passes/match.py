"""Find the attention sites of a Dynamo graph that read a KV cache. Nothing here changes the graph.

Every ``scaled_dot_product_attention`` becomes a :class:`Site` (it can be fused), a :class:`Exact` (a prefill that
attends to the K and V it has just computed: nothing to fuse), or a :class:`Rejected` with a reason a user can act on.
So does every decoded K or V that something else reads: a graph has no read of a quantized cache that goes uncounted.

Two reads of a cache are recognized behind the views that ``repeat_kv`` makes:

- ``kvpass::dequantize``: a ``QuantizedCache``;
- the buffer of a transformers ``StaticCache`` into which the same graph copies new tokens (``index_copy_``). Its
  storage is bf16 when the graph is compiled for the first time, and quantized afterwards
  (:mod:`kvpass.static_cache`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import GetItemSource
from torch._guards import TracingContext

SDPA = torch.nn.functional.scaled_dot_product_attention
STORE = torch.ops.kvpass.store.default
DEQUANTIZE = torch.ops.kvpass.dequantize.default
UNROLL = torch.ops.kvpass.unroll.default
RELEASED = torch.ops.kvpass.released.default


@dataclass(frozen=True)
class QuantizedRead:
    """K or V decoded from a ``QuantizedCache``.

    Attributes:
        node: The ``kvpass::dequantize``.
        buffers: Nodes of codes, block scales and scale (None where the format has none).
        positions: Node of the slots of this call's tokens.
        format: The format's name.
        unroll: The ``kvpass::unroll`` behind it, where the buffers are a ring.
    """

    node: fx.Node
    buffers: tuple[fx.Node | None, ...]
    positions: fx.Node
    format: str
    unroll: fx.Node | None = None

    @property
    def source(self) -> fx.Node:
        """The node whose shape is ``[batch, kv_heads, positions, head_dim]``."""
        return self.unroll or self.node


@dataclass(frozen=True)
class StaticRead:
    """K or V read from a buffer of a ``StaticCache``.

    Attributes:
        buffer: The placeholder.
        copy: The ``index_copy_`` that writes this call's tokens.
        tokens, positions: Nodes of those tokens and of their slots.
        markers: ``kvpass::released`` calls through which an already quantized buffer is seen.
        index: Of its layer among the cache's layers; None where the buffer's origin does not tell.
    """

    buffer: fx.Node
    copy: fx.Node
    tokens: fx.Node
    positions: fx.Node
    markers: tuple[fx.Node, ...]
    index: int | None = None

    @property
    def source(self) -> fx.Node:
        """The node whose shape is ``[batch, kv_heads, slots, head_dim]``."""
        return self.buffer


@dataclass(frozen=True)
class Site:
    """An attention that reads a cache and can be fused.

    Attributes:
        attention: The SDPA node.
        key, value: Where K and V come from; both of one kind.
        query, mask: Nodes.
        scale: Softmax scale.
        layer: Path of the module that attends.
        consumed: What has no use left once the attention is replaced, users before what they use.
    """

    attention: fx.Node
    key: QuantizedRead | StaticRead
    value: QuantizedRead | StaticRead
    query: fx.Node
    mask: fx.Node | None
    scale: float
    layer: str
    consumed: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Exact:
    """A prefill that attends to the fresh K and V whose quantized bytes the same graph stores."""

    attention: fx.Node
    layer: str


@dataclass(frozen=True)
class Rejected:
    """A read of K and V that is not fused, and why."""

    attention: fx.Node
    layer: str
    reason: str


Match = Site | Exact | Rejected


def find_sites(graph: fx.Graph, by_layer: bool = False) -> list[Match]:
    """Every attention of ``graph``, and every other read of a decoded cache, in the graph's order.

    Args:
        by_layer: Whether the layers of a ``StaticCache`` are not all stored alike, so that a site must know its own.
    """
    matches = [
        _match_attention(node, _sdpa_arguments(node), by_layer)
        for node in graph.find_nodes(op="call_function", target=SDPA)
    ]
    accounted: set[fx.Node] = set()
    for match in matches:
        accounted.add(match.attention)
        if isinstance(match, Site):
            accounted.update(match.consumed)
        elif isinstance(match, Rejected):  # its reason speaks for the reads behind it
            call = _sdpa_arguments(match.attention)
            for name in ("key", "value"):
                source, views = _peel(_before_cut(call[name]))
                accounted.update((call[name], *views, *_chain(source)))
    for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        read = next((user for user in node.users if user.target is UNROLL), node)
        others = read.users.keys() - accounted
        if others or read not in accounted:
            reason = f"the decoded cache is read by {_names(others or read.users)}, not by SDPA"
            matches.append(Rejected(node, layer_of(node), reason))
    order = {node: index for index, node in enumerate(graph.nodes)}
    return sorted(matches, key=lambda match: order[match.attention])


def why_none(graph: fx.Graph) -> str:
    """Why a graph in which :func:`find_sites` finds nothing has nothing to fuse."""
    names = {str(getattr(node.target, "__name__", node.target)) for node in graph.nodes}
    if "flex_attention" in names:
        return "it uses flex attention; load the model with attn_implementation='sdpa'"
    if "softmax" in names:
        return "its attention is written as matmul and softmax; load the model with attn_implementation='sdpa'"
    return (
        "it holds no scaled_dot_product_attention: the model has no attention, or a graph break cut it apart "
        "(TORCH_LOGS=graph_breaks shows where)"
    )


def layer_of(node: fx.Node) -> str:
    """Path of the module whose forward made ``node``, such as ``model.layers.3.self_attn``; '?' where unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "?"
    path = next(reversed(stack.values()))[0]
    for prefix in ("L['args'][0].", "L['self'].", "L['fn'].", "self."):
        path = path.removeprefix(prefix)
    return path.replace("_modules['", "").replace("']", "") or "?"


def example(node: fx.Node) -> torch.Tensor:
    """The fake tensor Dynamo recorded for ``node``."""
    value: torch.Tensor = node.meta["example_value"]
    return value


def _match_attention(node: fx.Node, call: dict[str, Any], by_layer: bool) -> Match:
    layer = layer_of(node)
    query, mask = call["query"], call["attn_mask"]
    if _stores_fresh(call["key"], call["value"]):
        return Exact(node, layer)
    sides = []
    for name, source in (("K", call["key"]), ("V", call["value"])):
        read = _read(source)
        if isinstance(read, str):
            return Rejected(node, layer, f"{name} {read}")
        sides.append((name, source, read))
    (_, key_node, key), (_, value_node, value) = sides
    if isinstance(key, StaticRead) and call["is_causal"] and _is_cut(key_node) and _is_cut(value_node):
        return Exact(node, layer)  # the prompt in an empty static cache, still bf16
    if reason := _obstacle(call, key, value, by_layer):
        return Rejected(node, layer, reason)
    consumed: list[fx.Node] = []
    for name, source, read in sides:
        consumed += _peel(source)[1]
        if isinstance(read, QuantizedRead):
            consumed += [node for node in (read.unroll, read.node) if node is not None]
            continue
        own = (read.copy, *read.markers)
        holders = (read.buffer, *own, *_peel(source)[1])
        if others := {user for holder in holders for user in holder.users} - {node, *own, *consumed}:
            return Rejected(
                node, layer, f"the {name} buffer is also used by {_names(others)}, which needs it unquantized"
            )
        consumed += own
    scale = call["scale"] if call["scale"] is not None else 1 / math.sqrt(example(query).shape[-1])
    if isinstance(scale, fx.Node):  # symbolic under dynamic=True, though it follows from head_dim
        scale = scale.meta["example_value"]
    return Site(node, key, value, query, mask, float(scale), layer, tuple(consumed))


def _obstacle(
    call: dict[str, Any], key: QuantizedRead | StaticRead, value: QuantizedRead | StaticRead, by_layer: bool
) -> str | None:
    """What the fused attention cannot express, or None."""
    heads, kv_heads, mask = example(call["query"]).shape[1], example(key.source).shape[1], call["attn_mask"]
    if type(key) is not type(value):
        return "K and V come from caches of different kinds"
    if key.positions is not value.positions:
        return "K and V are written at different positions"
    if by_layer and isinstance(key, StaticRead) and isinstance(value, StaticRead):
        if key.index is None or key.index != value.index:
            return (
                "formats or scales differ from layer to layer, and which layer of a cache the buffers of K and V "
                "belong to cannot be told; use a kvpass.QuantizedCache"
            )
    if _is_cut(call["key"]) or _is_cut(call["value"]):
        return "it reads a slice of the cache"
    if call["dropout_p"] != 0.0:
        return f"dropout_p is {call['dropout_p']}; only 0.0 can be fused (call model.eval())"
    if call["is_causal"]:
        return "is_causal=True counts from the cache's first slot, not from the newest token; pass a mask"
    if isinstance(call["scale"], fx.Node) and isinstance(call["scale"].meta["example_value"], torch.Tensor):
        return "the softmax scale is a tensor"
    for name, read in (("K", key), ("V", value)):
        if isinstance(read, StaticRead) and read.buffer.op != "placeholder":
            return f"the {name} buffer is allocated in this graph; the next one can be fused"
        if isinstance(read, StaticRead) and _is_sliding(read.buffer):
            return "a StaticCache moves all of a sliding window at every token; use kvpass.enable or a QuantizedCache"
    if isinstance(key, QuantizedRead):
        if (added := example(key.positions).shape[0]) not in (1, length := example(call["query"]).shape[2]):
            return f"{length} query tokens read a cache to which {added} were added"
        if key.unroll is not None and (mask is None or example(mask).shape[-1] != example(key.source).shape[2]):
            return "it reads a sliding window without a mask over all positions"
    if heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} KV heads"
    if mask is not None and example(mask).dim() != 4:
        return f"the mask has {example(mask).dim()} dimensions; 4 are needed (batch, heads, query, slots)"
    if mask is not None and not (example(mask).dtype == torch.bool or example(mask).dtype.is_floating_point):
        return f"the mask is {example(mask).dtype}; boolean or floating is needed"
    return None


def _sdpa_arguments(node: fx.Node) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    return defaults | dict(zip(names, node.args, strict=False)) | node.kwargs


def _peel(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Follow ``repeat_kv`` back to its input: ``x[:, :, None].expand(...).reshape(...)``. Also the views passed."""
    views: list[fx.Node] = []
    while node.op == "call_method" and node.target == "contiguous":
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    reshape = node
    if reshape.op == "call_method" and reshape.target == "reshape":
        expand = reshape.args[0]
        if isinstance(expand, fx.Node) and expand.op == "call_method" and expand.target == "expand":
            unsqueeze = expand.args[0]
            if isinstance(unsqueeze, fx.Node) and _adds_group_dimension(unsqueeze):
                source = unsqueeze.args[0]
                assert isinstance(source, fx.Node)
                batch, kv_heads, slots, dim = example(source).shape
                if tuple(example(expand).shape)[:2] == (batch, kv_heads) and tuple(example(reshape).shape) == (
                    batch,
                    kv_heads * example(expand).shape[2],
                    slots,
                    dim,
                ):
                    return source, [*views, reshape, expand, unsqueeze]
    return node, views


def _adds_group_dimension(node: fx.Node) -> bool:
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    index, full = node.args[1], slice(None)
    return len(index) >= 3 and index[2] is None and all(i == full for i in (*index[:2], *index[3:]))


def _read(node: fx.Node) -> QuantizedRead | StaticRead | str:
    """Where K or V comes from, or what is in the way (worded to follow the word K or V)."""
    source, _ = _peel(_before_cut(node))
    unroll = source if source.target is UNROLL else None
    if (read := source.args[0] if unroll else source).target is DEQUANTIZE:  # type: ignore[union-attr]
        codes, block_scale, scale, positions, format, _ = read.args  # type: ignore[union-attr]
        return QuantizedRead(read, (codes, block_scale, scale), positions, format, unroll)  # type: ignore[arg-type]
    if source.target == "index_copy" and source.args[0].target is UNROLL:  # type: ignore[union-attr]
        return "comes from a sliding window to which more tokens are added at once than it has spare slots for"
    copies = [source] if _is_index_copy(source) else []
    buffer = _through_marker(copies[0].args[0] if copies else source)
    if not isinstance(buffer, fx.Node) or (buffer.op != "placeholder" and buffer.target is not torch.zeros):
        return f"comes from {getattr(source.target, '__name__', source.target)}, not from a cache"
    markers = tuple(user for user in buffer.users if user.target is RELEASED)
    copies = [user for holder in (buffer, *markers) for user in holder.users if _is_index_copy(user)]
    if len(copies) != 1:
        return f"is an input of the graph, written {len(copies)} times in it; a StaticCache is written once"
    _, dim, positions, tokens = copies[0].args
    if dim != 2:
        return f"is written along dimension {dim}; a StaticCache is written along 2"
    return StaticRead(buffer, copies[0], tokens, positions, markers, _cache_index(buffer))  # type: ignore[arg-type]


def _chain(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it reads of a ring: the ``unroll``, and before that the ``dequantize``."""
    nodes = [node]
    while nodes[-1].target in ("index_copy", UNROLL) and isinstance(nodes[-1].args[0], fx.Node):
        nodes.append(nodes[-1].args[0])
    return nodes


def _cache_index(buffer: fx.Node) -> int | None:
    """The layer of a buffer that Dynamo found as ``<cache>.layers[index].keys`` or ``.values``."""
    source = getattr(buffer, "_dynamo_source", None)
    while source is not None:
        holder = getattr(source, "base", None)
        if isinstance(source, GetItemSource) and getattr(holder, "member", None) == "layers":
            return source.index if isinstance(source.index, int) else None
        source = holder
    return None


def _is_sliding(buffer: fx.Node) -> bool:
    """Whether ``buffer`` is of a ``StaticSlidingWindowLayer``: the one kind of layer that counts its tokens in Python,
    so that Dynamo guards on that count."""
    source, context = getattr(buffer, "_dynamo_source", None), TracingContext.try_get()
    if source is None or context is None:
        return False
    holder = source.base.name
    count = f"{holder() if callable(holder) else holder}.cumulative_length_int"  # a method in older torch
    return any(guard.name == count for guard in context.guards_context.dynamo_guards)


def _is_index_copy(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "index_copy_" and len(node.args) == 4


def _through_marker(node: object) -> object:
    return node.args[0] if isinstance(node, fx.Node) and node.target is RELEASED else node


def _before_cut(node: fx.Node) -> fx.Node:
    """Undo ``key[:, :, :length, :]``, with which transformers cuts an empty static cache to the prompt."""
    if node.target is operator.getitem and isinstance(node.args[1], tuple):
        index, full = node.args[1], slice(None)
        if len(index) == 4 and isinstance(index[2], slice) and all(i == full for i in (*index[:2], index[3])):
            return node.args[0]  # type: ignore[return-value]
    return node


def _is_cut(node: fx.Node) -> bool:
    return _before_cut(node) is not node


def _stores_fresh(key: fx.Node, value: fx.Node) -> bool:
    """Whether K and V are themselves what the graph stores in a ``QuantizedCache``."""
    fresh_key, fresh_value = _peel(key)[0], _peel(value)[0]
    return any(user.target is STORE and user.args[:2] == (fresh_key, fresh_value) for user in fresh_key.users)


def _names(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(sorted({str(getattr(node.target, "__name__", node.target)) for node in nodes})) or "nothing"
