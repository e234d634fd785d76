"""Recognize flex attention (``torch.nn.attention.flex_attention``).

Its mask is a function of one batch row, head, query token and slot, and a table of the blocks in which something is
visible; another such function changes each score. The functions are graphs of their own. What the fused attention needs
of them is written into the graph that calls them, for all slots at once: such a function works element by element, so
that it may as well be given index tensors that broadcast. Where nothing is fused afterwards these nodes are dead, and
the compiler drops them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from kvpass.fx_passes.forms import Added, Attention, example, name_of, number

FLEX = torch.ops.higher_order.flex_attention
_ADDS = (operator.add, operator.iadd, torch.add)
_MULTIPLIES = (operator.mul, operator.imul, torch.mul)
_DIVIDES = (operator.truediv, operator.itruediv, torch.div)
# What works element by element. The ways to write a tensor of one element are allowed, too.
_ELEMENTWISE: dict[str, set[object]] = {
    "call_function": {
        *_ADDS, *_MULTIPLIES, *_DIVIDES, operator.sub, operator.isub, operator.neg, operator.floordiv, operator.mod,
        operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.and_, operator.iand,
        operator.or_, operator.ior, operator.xor, operator.invert, torch.sub, torch.abs, torch.remainder,
        torch.logical_and, torch.logical_or, torch.logical_not, torch.where, torch.minimum, torch.maximum,
    },
    "call_method": {"to", "float", "int", "long", "bool", "abs", "new_ones", "new_zeros", "logical_not", "eq", "ne"},
}  # fmt: skip


class _Obstacle(Exception):
    """Why a function cannot be written out, in words for a user."""


def find(graph: fx.Graph) -> list[Attention]:
    """Every flex attention of ``graph`` whose result is used. Masks and biases are written into ``graph``."""
    found = []
    for node in graph.find_nodes(op="call_function", target=FLEX):
        outputs = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        if len(outputs) == 1:
            found.append(_recognize(graph, node, outputs[0]))
    return found


def _recognize(graph: fx.Graph, node: fx.Node, out: fx.Node) -> Attention:
    arguments: Any = node.args
    query, key, value, score_mod, block_mask, scale, _, score_buffers, mask_buffers = arguments
    mask_mod = block_mask[-1]
    unused, is_used = _behind(user for user in node.users if user is not out)
    inner = (*unused, node, score_mod, mask_mod)
    added: list[Added] = []
    softcap, obstacle = 0.0, None
    try:
        if is_used:
            raise _Obstacle("the logarithm of its denominator is used as well (for attention sinks)")
        if (factor := number(scale)) is None:
            raise _Obstacle("its softmax scale is a tensor")
        with graph.inserting_before(node):
            index = _indices(graph, query, key)
            mask = _written_out(graph, mask_mod, index, mask_buffers)
            if not _is_always_true(mask):
                added.append(Added(_for_every_slot(graph, mask, index)))
            added += _blocks(graph, block_mask, index)
            softcap, biases = _score_mod(graph, score_mod, index, score_buffers)
            added += map(Added, biases)
    except _Obstacle as reason:
        factor, obstacle = 1.0, f"it uses flex attention, and {reason}; attn_implementation='sdpa' may be fused"
    return Attention(out, query, key, value, factor, tuple(added), softcap, inner=inner, obstacle=obstacle)


def _behind(nodes: Any) -> tuple[list[fx.Node], bool]:
    """``nodes`` and all that is computed from them, users before what they use, and whether any of it leaves the
    graph."""
    reached: dict[fx.Node, None] = {}
    pending = list(nodes)
    while pending:
        node = pending.pop(0)
        reached.pop(node, None)
        reached[node] = None
        pending += node.users
    return list(reversed(reached)), any(node.op == "output" or node.is_impure() for node in reached)


def _indices(graph: fx.Graph, query: fx.Node, key: fx.Node) -> list[fx.Node]:
    """Of batch rows, heads, query tokens and slots, each along a dimension of its own."""
    batch, heads, length, _ = example(query).shape
    sizes, nodes = (batch, heads, length, example(key).shape[2]), []
    for dim, size in enumerate(sizes):
        line = _call(graph, torch.arange, (size,), {"device": example(query).device})
        place = tuple(slice(None) if at == dim else None for at in range(4))
        nodes.append(_call(graph, operator.getitem, (line, place)))
    return nodes


def _score_mod(
    graph: fx.Graph, score_mod: fx.Node, index: list[fx.Node], buffers: Sequence[fx.Node]
) -> tuple[float, list[fx.Node]]:
    """The softcap of a ``score_mod``, and what it adds to scores."""
    body = _body(graph, score_mod)
    score, *rest = body.find_nodes(op="placeholder")
    at = _result(body)
    depends = _dependents(score)
    terms = []  # a number among them moves all scores alike
    while isinstance(at, fx.Node) and at.target in _ADDS and len(at.args) == 2 and not at.kwargs:
        own, other = sorted(at.args, key=lambda x: x not in depends)
        if own not in depends or other in depends:
            break
        terms.append(other)
        at = own
    softcap = 0.0
    if at is not score and (softcap := _softcap(at, score)) == 0.0:
        raise _Obstacle("its score_mod does more than to cap scores and to add to them")
    known = dict(zip(rest, (*index, *buffers), strict=True))
    biases = [_copied(graph, term, known) for term in terms if isinstance(term, fx.Node)]
    return softcap, [_as_bias(graph, bias, index) for bias in biases if example(bias).dim()]


def _as_bias(graph: fx.Graph, term: fx.Node, index: list[fx.Node]) -> fx.Node:
    """``term`` as floating numbers, which a boolean would not be taken for."""
    if not example(term).dtype.is_floating_point:
        term = _call(graph, "to", (term, torch.float32), op="call_method")
    return _for_every_slot(graph, term, index)


def _for_every_slot(graph: fx.Graph, term: fx.Node, index: list[fx.Node]) -> fx.Node:
    """``term`` with as many columns as there are slots, where it has one for all."""
    if not example(term).dim():
        raise _Obstacle("its mask_mod says the same of everything")
    *before, last = example(term).shape
    slots = example(index[3]).shape[3]
    return term if last == slots else _call(graph, "expand", (term, (*before, slots)), op="call_method")


def _blocks(graph: fx.Graph, block_mask: Any, index: list[fx.Node]) -> list[Added]:
    """What the table of blocks hides, whatever the mask function says; nothing where one block holds all."""
    counts, blocks, full_counts, full_blocks = block_mask[2:6]
    query_size, slot_size = block_mask[-3:-1]
    length, slots = example(index[2]).shape[2], example(index[3]).shape[3]
    if query_size >= length and slot_size >= slots:
        return []
    total = None
    for count, places in ((counts, blocks), (full_counts, full_blocks)):
        if count is None:
            continue
        columns = example(places).shape[-1]
        order = _call(graph, torch.arange, (columns,), {"device": example(places).device})
        is_listed = _call(graph, torch.lt, (order, _call(graph, operator.getitem, (count, (..., None)))))
        listed = _call(graph, torch.where, (is_listed, places, columns))  # the others in a column that is cut off
        listed = _call(graph, "to", (listed, torch.int64), op="call_method")
        table = _call(graph, "new_zeros", (is_listed, (*example(places).shape[:-1], columns + 1)), op="call_method")
        table = _call(graph, torch.scatter, (table, -1, listed, True))
        total = table if total is None else _call(graph, torch.logical_or, (total, table))
    for dim, size in ((2, query_size), (3, slot_size)):
        block_of = _call(graph, operator.floordiv, (index[dim], size))
        block_of = _call(graph, "flatten", (block_of,), op="call_method")
        total = _call(graph, torch.index_select, (total, dim, block_of))
    assert total is not None
    return [Added(total)]


def _softcap(node: Any, score: fx.Node) -> float:
    """``c`` of ``c * tanh(score / c)``, which is even in ``c``; 0 for anything else."""
    if not (isinstance(node, fx.Node) and node.target in _MULTIPLIES and len(node.args) == 2 and not node.kwargs):
        return 0.0
    factors: Any = sorted(node.args, key=lambda x: isinstance(x, fx.Node))
    cap, tanh = factors
    if not isinstance(cap, (int, float)) or tanh.target not in (torch.tanh, "tanh"):
        return 0.0
    (inside,) = tanh.args
    is_same = inside.target in _DIVIDES and inside.args == (score, cap) and not inside.kwargs
    return abs(float(cap)) if is_same else 0.0


def _result(function: fx.Graph) -> Any:
    """What ``function`` returns."""
    return next(iter(function.find_nodes(op="output"))).args[0]


def _dependents(node: fx.Node) -> set[fx.Node]:
    found, pending = {node}, [node]
    while pending:
        new = pending.pop().users.keys() - found
        found |= new
        pending += new
    return found


def _written_out(graph: fx.Graph, function: fx.Node, index: list[fx.Node], buffers: Any) -> fx.Node:
    """The result of ``function`` for all of ``index``."""
    body = _body(graph, function)
    known = dict(zip(body.find_nodes(op="placeholder"), (*index, *buffers), strict=True))
    return _copied(graph, _result(body), known)


def _body(graph: fx.Graph, function: fx.Node) -> fx.Graph:
    module = getattr(graph.owning_module, str(function.target), None)
    if not isinstance(module, fx.GraphModule):
        raise _Obstacle(f"{function.target} is not a graph that can be read")
    return module.graph


def _copied(graph: fx.Graph, result: Any, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """``result``, a node of a function, and what it is computed from, copied into ``graph``."""
    if not isinstance(result, fx.Node):
        raise _Obstacle(f"a function of it returns {result!r}")
    for node in result.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if not _is_elementwise(node, known):
            raise _Obstacle(f"its functions use {name_of(node)}, of which it is not known to work element by element")
        args, kwargs = _mapped(node, known)
        if node.target is operator.getitem:
            args = _within(graph, *args)
        known[node] = _call(graph, node.target, args, kwargs, op=node.op)
        if node is result:
            break
    return known[result]


def _is_elementwise(node: fx.Node, known: dict[fx.Node, fx.Node]) -> bool:
    if node.target is operator.getitem:  # one element of a tensor
        arguments: Any = node.args
        source, index = arguments
        places = index if isinstance(index, tuple) else (index,)
        is_one = all(isinstance(place, (int, fx.Node)) for place in places)
        return is_one and example(known[source]).dim() == len(places)
    if node.target in ("new_ones", "new_zeros"):
        size: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("size")
        return size in ((), [])
    return node.target in _ELEMENTWISE.get(node.op, ())


def _within(graph: fx.Graph, source: fx.Node, places: Any) -> tuple[Any, ...]:
    """Arguments of a lookup, its places brought into the tensor: of slots that the mask hides they may be outside."""
    places = places if isinstance(places, tuple) else (places,)
    inside = []
    for place, size in zip(places, example(source).shape, strict=True):
        is_range = isinstance(place, fx.Node) and place.target is operator.getitem  # one of `_indices`
        if isinstance(place, fx.Node) and not (is_range and example(place).numel() <= size):
            place = _call(graph, torch.clamp, (place, 0, size - 1))
        inside.append(place)
    return source, tuple(inside)


def _mapped(node: fx.Node, known: dict[fx.Node, fx.Node]) -> tuple[Any, Any]:
    return fx.map_arg(node.args, known.__getitem__), fx.map_arg(node.kwargs, known.__getitem__)


def _call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, op: str = "call_function"
) -> fx.Node:
    """A new node with the example that Dynamo would record for it."""
    node = graph.create_node(op, target, args, kwargs or {})
    examples: Any = fx.map_arg((node.args, node.kwargs), lambda at: at.meta["example_value"])
    values, options = examples
    run: Callable[..., Any] = getattr(torch.Tensor, target) if op == "call_method" else target
    with _mode_of(graph):
        node.meta["example_value"] = run(*values, **options)
    return node


def _mode_of(graph: fx.Graph) -> AbstractContextManager[object]:
    """That in which the examples of ``graph`` were made: while a backend runs, Dynamo has another one at hand."""
    examples = (node.meta.get("example_value") for node in graph.nodes if node.op == "placeholder")
    return next((x.fake_mode for x in examples if isinstance(x, FakeTensor)), nullcontext())


def _is_always_true(mask: fx.Node) -> bool:
    """Whether ``mask`` is that of no mask."""
    return mask.op == "call_method" and mask.target == "new_ones" and example(mask).dim() == 0
