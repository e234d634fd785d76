"""Recognize attention written out: matmul, softmax, matmul, as ``attn_implementation="eager"`` runs it.

Anchored at a softmax. From its input back to the scores, in this order of execution, are peeled:

- ``query @ key`` with the last two dimensions of ``key`` exchanged (``transpose``, ``swapaxes``, ``permute``, ``mT``);
- products with and quotients by numbers, whose product is the scale;
- a softcap: ``tanh`` of a multiple of the scores, times a number (Gemma 2);
- anything added: masks and biases, each times the numbers that multiply it afterwards;
- a sink: a last column that holds a number of each head (GPT-OSS);
- the row's maximum subtracted, which changes no softmax.

From the softmax on to the result: the sink's column cut off, dropout that drops nothing, ``probabilities @ value``.
Casts, and views that keep the shape, may stand anywhere. All of these must have no other use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvpass.fx_passes.forms import Added, Attention, Unrecognized, example, name_of, number

_KINDS: dict[str, tuple[Callable[..., Any], ...]] = {
    "matmul": (torch.matmul, operator.matmul),
    "softmax": (torch.softmax, torch.nn.functional.softmax),
    "mul": (torch.mul, operator.mul, operator.imul),
    "div": (torch.div, torch.true_divide, operator.truediv, operator.itruediv),
    "add": (torch.add, operator.add, operator.iadd),
    "sub": (torch.sub, operator.sub),
    "tanh": (torch.tanh,),
    "cat": (torch.cat,),
    "dropout": (torch.nn.functional.dropout,),
    "transpose": (torch.transpose, torch.swapaxes, torch.permute),
    "getitem": (operator.getitem,),
    "getattr": (getattr,),
    "max": (torch.max, torch.amax),
}
_FUNCTIONS = {function: kind for kind, functions in _KINDS.items() for function in functions}
_METHODS = {
    **{name: name for name in ("matmul", "softmax", "mul", "div", "add", "sub", "tanh", "transpose", "max")},
    **{"mul_": "mul", "div_": "div", "add_": "add", "tanh_": "tanh", "swapaxes": "transpose", "permute": "transpose"},
    **{name: "cast" for name in ("to", "type", "type_as", "float", "half", "bfloat16")},
    **{"amax": "max", "view": "view", "reshape": "view", "expand": "view", "unsqueeze": "view", "contiguous": "view"},
}


def kind(node: object) -> str | None:
    """What ``node`` does, one of the words above; None for anything else."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target) if callable(node.target) else None
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None


def find(graph: fx.Graph) -> list[Attention | Unrecognized]:
    """What every softmax of ``graph`` takes part in."""
    return [_Walk(node).result() for node in graph.nodes if kind(node) == "softmax"]


class _NotAnAttention(Exception):
    """The walk ends here."""


@dataclass
class _Walk:
    """One attempt, from ``softmax`` back to the scores and on to the result.

    What is in the way is noted, in words for a user, and the walk goes on, so that it is known which K and V the words
    are about.
    """

    softmax: fx.Node
    inner: list[fx.Node] = field(default_factory=list)
    operands: list[fx.Node] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    node: fx.Node | None = None
    query: fx.Node | None = None
    key: fx.Node | None = None
    value: fx.Node | None = None
    scale: float = 1.0
    added: list[Added] = field(default_factory=list)
    softcap: float = 0.0
    sinks: fx.Node | None = None

    def result(self) -> Attention | Unrecognized:
        for walk in (self.back, self.on, self.check_uses):
            try:
                walk()
            except _NotAnAttention as end:
                self.reasons.append(str(end))
        inner = tuple(sorted({*self.inner, *self.operands, self.softmax}, reverse=True))
        if self.reasons or self.node is None or self.query is None or self.key is None or self.value is None:
            return Unrecognized(self.softmax, self.reasons[0], self.key, self.value, inner)
        return Attention(
            self.node, self.query, self.key, self.value, self.scale, tuple(self.added), self.softcap, self.sinks, inner
        )

    def back(self) -> None:
        """From the softmax to Q and K."""
        at = _tensor(self.softmax, 0)
        if (dim := _argument(self.softmax, 1, "dim")) not in (-1, example(at).dim() - 1):
            self.reasons.append(f"the softmax is taken over dimension {dim}, not over the slots")
        at = self.without_maximum(self.without_sinks(self.without_maximum(at)))
        while kind(at) != "matmul":
            before = self.step_back(at)
            self.inner.append(at)
            if before is None or len(self.inner) > 24:
                raise _NotAnAttention("its scores are not computed in this graph")
            at = before
        self.inner.append(at)
        self.query, transposed = self.without_upcast(_tensor(at, 0)), self.without_casts(_tensor(at, 1))
        self.key = _untransposed(transposed)
        if self.key is None:
            raise _NotAnAttention("its scores are no product of queries with transposed keys")
        self.operands.append(transposed)

    def step_back(self, at: fx.Node) -> fx.Node | None:
        """Take account of one node between the softmax and the scores; returns the node before it."""
        match kind(at), at.args:
            case (("cast" | "view"), (fx.Node() as before, *_)) if _keeps_shape(at):
                return before
            case ("mul" | "div") as what, (first, second) if not at.kwargs:
                before, other = _scores_first(first, second)
                factor = number(other)
                if not factor or (what == "div" and before is not first):
                    self.reasons.append("its scores are multiplied by something other than a number")
                else:
                    self.scale *= factor if what == "mul" else 1 / factor
                return before
            case "add", (first, second) if not at.kwargs:
                before, other = _scores_first(first, second)
                is_tensor = isinstance(other, fx.Node) and isinstance(other.meta.get("example_value"), torch.Tensor)
                dtype = example(other).dtype if is_tensor else None  # type: ignore[arg-type]
                if self.softcap:
                    self.reasons.append("a mask or bias is added before the softcap")
                elif dtype is None or not dtype.is_floating_point:
                    self.reasons.append(f"{dtype or 'a number'} is added to its scores; a mask must be floating there")
                else:
                    self.added.append(Added(other, self.scale))  # type: ignore[arg-type]
                return before
            case "tanh", (fx.Node() as before, *_):
                if self.softcap or self.scale <= 0:
                    self.reasons.append("its scores go through tanh twice, or are turned in sign after it")
                self.softcap = self.scale
                return before
        self.reasons.append(f"between its scores and its softmax is {name_of(at)}, which the fused attention has not")
        return next(iter(at.all_input_nodes), None)

    def without_maximum(self, at: fx.Node) -> fx.Node:
        """Undo ``x - x.max(-1, keepdim=True).values``."""
        if kind(at) != "sub" or at.kwargs or not all(isinstance(x, fx.Node) for x in at.args):
            return at
        scores, subtracted = _tensor(at, 0), _tensor(at, 1)
        values = [subtracted] if kind(subtracted) in ("getattr", "getitem") else []
        largest = _tensor(values[0], 0) if values else subtracted
        of_rows = _argument(largest, 1, "dim") in (-1, example(scores).dim() - 1) and _argument(largest, 2, "keepdim")
        if kind(largest) != "max" or largest.args[0] is not scores or not of_rows:
            self.reasons.append(
                f"from its scores {name_of(subtracted)} is subtracted, which is not the maximum of each row"
            )
            return scores
        self.inner += [at, *values, largest]
        return scores

    def without_sinks(self, at: fx.Node) -> fx.Node:
        """Undo ``cat([scores, sinks], -1)``, with one number for each head in the last column."""
        if kind(at) == "cast" and kind(_tensor(at, 0)) == "cat":
            self.inner.append(at)
            at = _tensor(at, 0)
        if kind(at) != "cat":
            return at
        parts, is_last = at.args[0], _argument(at, 1, "dim") in (-1, example(at).dim() - 1)
        match parts:
            case (fx.Node() as scores, fx.Node() as column) if is_last and example(column).shape[-1] == 1:
                heads, views = example(scores).shape[1], []
                while example(column).dim() > 2 and kind(column) in ("view", "cast"):
                    if example(column).shape[-3] != heads:
                        break
                    views.append(column)
                    column = _tensor(column, 0)
                if example(column).shape == (heads,):
                    self.inner.append(at)
                    self.operands += views
                    self.sinks = column
                    return scores
        self.reasons.append("its scores are concatenated with something other than one number of each head")
        return at

    def without_casts(self, at: fx.Node) -> fx.Node:
        while kind(at) == "cast":
            self.operands.append(at)
            at = _tensor(at, 0)
        return at

    def without_upcast(self, query: fx.Node) -> fx.Node:
        """The query before a cast to a wider type: the fused attention computes scores in fp32 anyway."""
        if kind(query) != "cast" or example(query).dtype.itemsize < example(_tensor(query, 0)).dtype.itemsize:
            return query
        self.operands.append(query)
        return _tensor(query, 0)

    def on(self) -> None:
        """From the softmax to the result."""
        at, cut = self.softmax, False
        while (product := next((u for u in at.users if kind(u) == "matmul" and u.args[0] is at), None)) is None:
            user = next(iter(at.users), None)
            if user is None or kind(user) is None:
                raise _NotAnAttention(f"its probabilities are used by {_names(at.users)}, not by a product with V")
            self.check_single_use(at)
            if kind(user) == "dropout":
                rate, training = _argument(user, 1, "p", 0.5), _argument(user, 2, "training", True)
                if rate and training:
                    self.reasons.append(f"dropout with p={rate} is active; call model.eval()")
            elif kind(user) == "getitem" and self.sinks is not None and user.args[1] == (Ellipsis, slice(None, -1)):
                cut = True
            elif not (kind(user) in ("cast", "view") and _keeps_shape(user)):
                self.reasons.append(f"its probabilities go through {name_of(user)}, which the fused attention has not")
            self.inner.append(user)
            at = user
        self.node, self.value = product, _tensor(product, 1)
        self.check_single_use(at)
        if self.sinks is not None and not cut:
            self.reasons.append("the probability of the sink is not cut off")

    def check_single_use(self, probabilities: fx.Node) -> None:
        if len(probabilities.users) > 1:
            self.reasons.append(
                f"its probabilities are used by {_names(probabilities.users)}, not by one product with V alone; do not "
                "ask for output_attentions"
            )

    def check_uses(self) -> None:
        """That nothing else uses what fusing would remove. Casts and views of its operands may be shared: they stay."""
        own = {*self.inner, *self.operands, self.softmax, self.node}
        for node in (*self.inner, self.softmax):
            if others := node.users.keys() - own:
                self.reasons.append(f"the result of its {name_of(node)} is also used by {_names(others)}")
        self.operands = [node for node in self.operands if not node.users.keys() - own]


def _keeps_shape(node: fx.Node) -> bool:
    return example(node).shape == example(_tensor(node, 0)).shape


def _names(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(sorted({name_of(node) for node in nodes})) or "nothing"


def _tensor(node: fx.Node, index: int) -> fx.Node:
    """Argument ``index`` of ``node``, which must be a node."""
    if index >= len(node.args) or not isinstance(argument := node.args[index], fx.Node):
        raise _NotAnAttention(f"its {name_of(node)} takes no tensor where one is expected")
    return argument


def _argument(node: fx.Node, index: int, name: str, default: object = None) -> Any:
    return node.kwargs.get(name, node.args[index] if index < len(node.args) else default)


def _scores_first(first: object, second: object) -> tuple[fx.Node, object]:
    """The two operands, that which leads back to a matmul of four dimensions first."""
    for scores, other in ((first, second), (second, first)):
        at = scores
        while isinstance(at, fx.Node) and kind(at) in ("mul", "div", "add", "tanh", "cast"):
            at = next((x for x in at.args if isinstance(x, fx.Node)), None)
        if kind(at) == "matmul":
            return scores, other  # type: ignore[return-value]
    if isinstance(first, fx.Node):
        return first, second
    raise _NotAnAttention("its scores are no product of queries with transposed keys")


def _untransposed(node: fx.Node) -> fx.Node | None:
    """``x`` of ``x`` with its last two dimensions exchanged."""
    if kind(node) == "getattr":
        return _tensor(node, 0) if node.args[1] == "mT" else None
    if kind(node) != "transpose":
        return None
    source, last = _tensor(node, 0), example(node).dim() - 1
    order = [x for arg in node.args[1:] for x in (arg if isinstance(arg, (tuple, list)) else [arg])]
    dims = [x % (last + 1) for x in order if isinstance(x, int)]
    exchanged = [*range(last - 1), last, last - 1]
    return source if sorted(dims) == [last - 1, last] or dims == exchanged else None
