"""Find the attention sites of a Dynamo graph that read a KV cache. Nothing here changes the graph.

Every attention, be it ``scaled_dot_product_attention`` (:mod:`kvpass.fx_passes.sdpa`) or written out
(:mod:`kvpass.fx_passes.eager`), becomes a :class:`Site` (it can be fused), a :class:`Exact` (a prefill that attends to
the K and V it has just computed: nothing to fuse), or a :class:`Rejected` with a reason a user can act on. So does
every decoded K or V that something else reads: a graph has no read of a quantized cache that goes uncounted.

Two reads of a cache are recognized behind the views that ``repeat_kv`` makes:

- ``kvpass::dequantize``: a ``QuantizedCache``;
- the buffer of a transformers ``StaticCache`` into which the same graph copies new tokens (``index_copy_``). Its
  storage is bf16 when the graph is compiled for the first time, and quantized afterwards
  (:mod:`kvpass.static_cache`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch._dynamo.source import GetItemSource
from torch._guards import TracingContext

import kvpass.ops  # noqa: F401  the operators below are registered there
from kvpass.config import KVQuantConfig
from kvpass.formats import get_format
from kvpass.fx_passes import eager, flex, sdpa
from kvpass.fx_passes.forms import Added, Attention, Unrecognized, example, name_of

STORE = torch.ops.kvpass.store.default
DEQUANTIZE = torch.ops.kvpass.dequantize.default
UNROLL = torch.ops.kvpass.unroll.default
RELEASED = torch.ops.kvpass.released.default
LATENT = (
    "is expanded by a linear layer from a cached latent (multi-head latent attention), which is not fused: the latent "
    "is stored quantized, and expanded in full at every step"
)
MASK_DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class QuantizedRead:
    """K or V decoded from a ``QuantizedCache``.

    Attributes:
        node: The ``kvpass::dequantize``.
        buffers: Nodes of the :class:`kvpass.formats.KVBuffers` (None where there is none).
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
        attention: The node whose value it is.
        key, value: Where K and V come from; both of one kind.
        query, scale, added, softcap, sinks: As :class:`kvpass.fx_passes.forms.Attention` has them.
        layer: Path of the module that attends.
        consumed: What has no use left once the attention is replaced, users before what they use.
    """

    attention: fx.Node
    key: QuantizedRead | StaticRead
    value: QuantizedRead | StaticRead
    query: fx.Node
    scale: float
    added: tuple[Added, ...]
    softcap: float
    sinks: fx.Node | None
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


def find_sites(graph: fx.Graph, config: KVQuantConfig | None = None) -> list[Match]:
    """Every attention of ``graph``, and every other read of a decoded cache, in the graph's order.

    Masks of flex attention are written into ``graph`` (:mod:`kvpass.fx_passes.flex`), dead code unless fused.

    Args:
        config: How a ``StaticCache`` is to be stored; None for the defaults.
    """
    matches: list[Match] = []
    accounted: set[fx.Node] = set()
    ends: set[fx.Node] = set()  # a read that gets here has a match that speaks for it
    config = config or KVQuantConfig()
    for found in (*sdpa.find(graph), *eager.find(graph), *flex.find(graph)):
        match = _match_attention(found, config) if isinstance(found, Attention) else _match_unrecognized(found)
        if match is None:
            continue
        matches.append(match)
        accounted.update((match.attention, *found.inner))
        ends.add(match.attention)
        if isinstance(match, Site):
            accounted.update(match.consumed)
        elif isinstance(match, Rejected):  # its reason speaks for the reads behind it
            for operand in (found.key, found.value):
                if operand is not None:
                    source, views = _peel(_before_cut(operand))
                    accounted.update((*views, *_chain(source)))
                    ends.add(operand)
    latent = {match.layer for match in matches if isinstance(match, Rejected) and LATENT in match.reason} - {"?"}
    for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        if layer_of(node) in latent:  # the rotary part of K is another read of the same attention
            continue
        read = next((user for user in node.users if user.target is UNROLL), node)
        others = set() if read in ends else _unaccounted_users(read, accounted, ends)
        if others or read not in accounted:
            matches.append(Rejected(node, layer_of(node), _why_not_attention(others or read.users.keys())))
    order = {node: index for index, node in enumerate(graph.nodes)}
    return sorted(matches, key=lambda match: order[match.attention])


def layer_of(node: fx.Node) -> str:
    """Path of the module whose forward made ``node``, such as ``model.layers.3.self_attn``; '?' where unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "?"
    path = next(reversed(stack.values()))[0]
    path = re.sub(r"^(L\['\w+'\](\[\d+\])?|self)\.", "", path)  # what Dynamo calls the model itself
    return path.replace("_modules['", "").replace("']", "") or "?"


def _match_unrecognized(found: Unrecognized) -> Rejected | None:
    """A softmax matters only if what it would take for K or V comes from a cache."""
    operands = [operand for operand in (found.key, found.value) if operand is not None]
    if all(isinstance(_read(operand), str) for operand in operands):
        return None
    reason = f"it is written as matmul and softmax, and {found.reason}"
    return Rejected(found.node, layer_of(found.node), reason)


def _match_attention(call: Attention, config: KVQuantConfig) -> Match:
    node, layer = call.node, layer_of(call.node)
    if _stores_fresh(call.key, call.value):
        return Exact(node, layer)
    sides = []
    for name, source in (("K", call.key), ("V", call.value)):
        read = _read(source)
        if isinstance(read, str):
            return Rejected(node, layer, f"{name} {read}")
        sides.append((name, source, read))
    (_, key_node, key), (_, value_node, value) = sides
    if isinstance(key, StaticRead) and isinstance(value, StaticRead):
        is_prompt = sdpa.is_causal(node) and _is_cut(key_node) and _is_cut(value_node)
        if is_prompt or {key.buffer.op, value.buffer.op}.isdisjoint({"placeholder"}):
            return Exact(node, layer)  # an empty static cache, still bf16, that this graph may even allocate
    if reason := _obstacle(call, key, value, config):
        return Rejected(node, layer, reason)
    consumed = list(call.inner)
    for name, source, read in sides:
        consumed += _peel(source)[1]
        if isinstance(read, QuantizedRead):
            consumed += [node for node in (read.unroll, read.node) if node is not None]
            continue
        own = (read.copy, *read.markers)
        holders = (read.buffer, *own, *_peel(source)[1])
        if others := {user for holder in holders for user in holder.users} - {node, *own, *consumed}:
            names = ", ".join(sorted({name_of(other) for other in others}))
            return Rejected(node, layer, f"the {name} buffer is also used by {names}, which needs it unquantized")
        consumed += own
    return Site(node, key, value, call.query, call.scale, call.added, call.softcap, call.sinks, layer, tuple(consumed))


def _obstacle(
    call: Attention, key: QuantizedRead | StaticRead, value: QuantizedRead | StaticRead, config: KVQuantConfig
) -> str | None:
    """What the fused attention cannot express, or None."""
    query, (_, kv_heads, slots, _) = example(call.query), example(key.source).shape
    if type(key) is not type(value):
        return "K and V come from caches of different kinds"
    if key.positions is not value.positions:
        return "K and V are written at different positions"
    if config.differs_by_layer and isinstance(key, StaticRead) and isinstance(value, StaticRead):
        if key.index is None or key.index != value.index:
            return (
                "formats or scales differ from layer to layer, and which layer of a cache the buffers of K and V "
                "belong to cannot be told; use a kvpass.QuantizedCache"
            )
    if _is_cut(call.key) or _is_cut(call.value):
        return "it reads a slice of the cache"
    if call.obstacle is not None:
        return call.obstacle
    for read in (key, value):
        if isinstance(read, StaticRead) and _is_sliding(read.buffer):
            return "a StaticCache moves all of a sliding window at every token; use kvpass.enable or a QuantizedCache"
    if call.sinks is not None:
        stored = get_format(value.format) if isinstance(value, QuantizedRead) else config.layer(value.index or 0).value
        if stored.centred:
            return f"it has attention sinks, which a centred V ({stored.name!r}) cannot be fused with"
    if query.dim() != 4:
        return f"its query has {query.dim()} dimensions; 4 are needed (batch, heads, length, head_dim)"
    if (count := example(key.positions).shape[0]) not in (1, query.shape[2]):
        return f"its query has {query.shape[2]} rows for {count} tokens; one for each is needed"
    if query.shape[1] % kv_heads:
        return f"{query.shape[1]} query heads are no multiple of {kv_heads} KV heads"
    if query.dtype != example(call.node).dtype:
        return f"its query is {query.dtype} and its result {example(call.node).dtype}; they must be alike"
    if isinstance(key, QuantizedRead) and key.unroll is not None and not call.added:
        return "it reads a sliding window without a mask over all positions"
    for mask in (example(added.node) for added in call.added):
        if mask.dim() > 4 or mask.dim() == 0:
            return f"its mask has {mask.dim()} dimensions; at most 4 (batch, heads, query, slots) can be fused"
        if mask.dtype not in MASK_DTYPES:
            return f"its mask is {mask.dtype}; {', '.join(map(str, MASK_DTYPES))} can be fused"
        if mask.shape[-1] != slots:
            return f"its mask covers {mask.shape[-1]} slots, and the cache has {slots}"
    return None


def _unaccounted_users(node: fx.Node, accounted: set[fx.Node], ends: set[fx.Node]) -> set[fx.Node]:
    """Users of ``node``, directly or through accounted nodes up to one of ``ends``, that no match speaks for."""
    reached, pending = {node}, [node]
    while pending:
        new = pending.pop().users.keys() - reached
        reached |= new
        pending += [user for user in new if user in accounted and user not in ends]
    return reached - accounted - ends - {node}


def _why_not_attention(users: Iterable[fx.Node]) -> str:
    """Why a decoded cache that ``users`` read is not read by an attention that was recognized."""
    direct = behind = set(users)
    for _ in range(3):  # through a reshape and a transpose
        behind = behind.union(*(user.users for user in behind))
    names, later = ({name_of(user) for user in nodes} for nodes in (direct, behind))
    reason = f"the decoded cache is read by {', '.join(sorted(names)) or 'nothing'}, not by an attention"
    if later & {"bmm", "baddbmm"}:
        return f"{reason} that is recognized: its product has batch and heads in one dimension (bmm)"
    if "matmul" in later and "output" in later:
        return f"{reason} within this graph: a graph break cut it apart (TORCH_LOGS=graph_breaks shows where)"
    return reason


def _peel(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Follow ``repeat_kv`` back to its input: ``x[:, :, None].expand(...).reshape(...)``. Also the views passed.

    Casts of K and V are passed as well: the fused attention computes in fp32, or in what holds each value exactly.
    """
    views: list[fx.Node] = []
    while node.op == "call_method" and (node.target == "contiguous" or eager.kind(node) == "cast"):
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
        *buffers, positions, format, _ = read.args  # type: ignore[union-attr]
        return QuantizedRead(read, tuple(buffers), positions, format, unroll)  # type: ignore[arg-type]
    if source.target == "index_copy" and source.args[0].target is UNROLL:  # type: ignore[union-attr]
        return "comes from a sliding window to which more tokens are added at once than it has spare slots for"
    copies = [source] if _is_index_copy(source) else []
    buffer = _through_marker(copies[0].args[0] if copies else source)
    if not isinstance(buffer, fx.Node) or (buffer.op != "placeholder" and buffer.target is not torch.zeros):
        if _is_expanded_latent(source):
            return LATENT
        return f"comes from {name_of(source)}, not from a cache"
    markers = tuple(user for user in buffer.users if user.target is RELEASED)
    copies = [user for holder in (buffer, *markers) for user in holder.users if _is_index_copy(user)]
    if len(copies) != 1:
        return f"is an input of the graph, written {len(copies)} times in it; a StaticCache is written once"
    _, dim, positions, tokens = copies[0].args
    if dim != 2:
        return f"is written along dimension {dim}; a StaticCache is written along 2"
    return StaticRead(buffer, copies[0], tokens, positions, markers, _cache_index(buffer))  # type: ignore[arg-type]


def _is_expanded_latent(node: fx.Node) -> bool:
    """Whether ``node`` is made by a linear layer of a cache: what DeepSeek caches is not K and V but a latent."""
    pending, seen = [node], 0
    while pending and (seen := seen + 1) <= 16:
        at = pending.pop(0)
        if at.target is torch.nn.functional.linear:
            cached = _peel(at.args[0])[0]  # type: ignore[arg-type]
            return cached.target is DEQUANTIZE or _is_index_copy(cached)
        pending += at.all_input_nodes
    return False


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
