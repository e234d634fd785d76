"""Linear layers that read the same input become one: the q, k and v projections, gate and up.

At decode a linear layer takes as long as its weights take to be read, plus a launch, and the reduction that cuBLAS
needs to spread a small one over a GPU. One larger product does it in one go.

The weights must lie behind each other for that. :class:`Stacked` moves them into one tensor when a graph first runs,
and makes the parameters views of it: no second copy, and what is written into a parameter afterwards is seen. A
parameter that was given another storage since (``.data = ...``, ``.to(...)``) is moved again before the next run.

Of a parameter that is sharded among tensor-parallel ranks (a DTensor, which the graph takes through ``to_local``) it is
this rank's part that moves (:func:`local`).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from kvpass.fx_passes.rewrite import static_placeholder

LINEAR = torch._C._nn.linear
# Methods that accept any strides. `view` is tried out; others are left alone.
_ANY_STRIDES = {"reshape", "transpose", "permute", "unsqueeze", "squeeze", "to", "float", "contiguous", "expand"}

_IN_PLACE = {getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_IN_PLACE |= {operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.setitem}

_stacked: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Stacked:
    """Where an input of a rewritten graph comes from: several parameters, as one tensor.

    Attributes:
        positions: Places of the parameters among the inputs of the graph before. They agree in all but their first
            dimension.
    """

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = tuple(positions)
        self._tensor: Tensor | None = None
        self._addresses: list[int] = []
        _known.add(self)

    def of(self, args: Sequence[Any]) -> Tensor:
        """The tensor for these inputs."""
        parameters = [args[position] for position in self.positions]
        if self._tensor is None or [local(p).data_ptr() for p in parameters] != self._addresses:
            self._tensor = stack(parameters)
            self._addresses = [local(p).data_ptr() for p in parameters]
        return self._tensor

    def forget(self, storage: int) -> None:
        """Let go of the tensor, if its storage is at this address; it is made anew when it is needed."""
        if self._tensor is not None and self._tensor.untyped_storage().data_ptr() == storage:
            self._tensor, self._addresses = None, []

    def example(self, args: Sequence[Any]) -> Tensor:
        """An empty tensor of the same shape, dtype and device; nothing is moved."""
        parameters = [local(args[position]) for position in self.positions]
        first, rows = parameters[0], sum(parameter.shape[0] for parameter in parameters)
        return torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device=first.device)


_known: weakref.WeakSet[Stacked] = weakref.WeakSet()


def local(parameter: Tensor) -> Tensor:
    """What this rank holds of a DTensor, itself and no copy; of any other parameter all there is."""
    part: Tensor = getattr(parameter, "_local_tensor", parameter)
    return part


@torch.inference_mode(False)
@torch.no_grad()
def stack(parameters: Sequence[Tensor]) -> Tensor:
    """``torch.cat(parameters)``, of which the parameters become views, unless they are views of such a tensor."""
    parts = [local(parameter) for parameter in parameters]
    first, end, rows = parts[0], parts[0].data_ptr(), [part.shape[0] for part in parts]
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            break
        end += part.nbytes
    else:
        return first.detach().as_strided((sum(rows), *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([part.detach() for part in parts])
    for parameter, part, moved in zip(parameters, parts, whole.split(rows), strict=True):
        part.data = moved
        _stacked[parameter] = True
    return whole


def unstack(parameters: Sequence[Tensor]) -> None:
    """Give those of ``parameters`` that :func:`stack` moved a storage of their own again, one stack at a time: that is
    all the memory it takes, and where even that is missing, what is left can be unstacked later."""
    held: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter in _stacked:
            held.setdefault(local(parameter).untyped_storage().data_ptr(), []).append(parameter)
    for storage, members in held.items():
        for stacked in _known:  # Dynamo keeps compiled graphs, and these with them
            stacked.forget(storage)
        for parameter in members:
            moved = local(parameter)
            moved.data = moved.data.clone()
            del _stacked[parameter]


def find_stacks(graph: fx.Graph, examples: Sequence[Any]) -> list[list[fx.Node]]:
    """Groups of linear layers that can be computed as one.

    Args:
        graph: A Dynamo graph.
        examples: Its inputs.
    """
    values = dict(zip(graph.find_nodes(op="placeholder"), examples, strict=True))
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        if (kind := _kind(node, values)) is not None:
            groups.setdefault(kind, []).append(node)
    return [
        linears
        for linears in groups.values()
        if len(linears) > 1 and all(_takes_strides(linear, sum(map(_rows, linears))) for linear in linears)
    ]


def stack_linears(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]], origin: dict[fx.Node, Any]) -> None:
    """Merge ``groups`` in place. ``origin``, where each placeholder comes from, changes as the placeholders do."""
    for linears in groups:
        inputs = []
        for parameters in zip(*(linear.args[1:] for linear in linears), strict=True):
            if parameters[0] is not None:
                held = [_placeholder(parameter) for parameter in parameters]
                node = static_placeholder(graph, held[0], "stacked")
                origin[node] = Stacked([origin.pop(parameter).position for parameter in held])
                inputs.append(node)
        with graph.inserting_before(linears[0]):
            product = graph.call_function(LINEAR, (linears[0].args[0], *inputs))
            parts = graph.call_function(torch.split, (product, [_rows(linear) for linear in linears], -1))
            for index, linear in enumerate(linears):
                part = graph.call_function(operator.getitem, (parts, index))
                part.meta = dict(linear.meta)
                linear.replace_all_uses_with(part)
        for linear in linears:
            parameters = linear.args[1:]
            graph.erase_node(linear)
            for parameter in parameters:
                if isinstance(parameter, fx.Node):
                    placeholder = _placeholder(parameter)
                    graph.erase_node(parameter)
                    if placeholder is not parameter:
                        graph.erase_node(placeholder)


def _placeholder(node: fx.Node) -> fx.Node:
    """The input that a weight or bias is: itself, or what it is the ``to_local`` of."""
    is_local = node.target == "to_local" or getattr(node.target, "__name__", "") == "prim_to_local"
    return node.args[0] if is_local and isinstance(node.args[0], fx.Node) else node


def _kind(node: fx.Node, values: dict[fx.Node, Any]) -> tuple[Any, ...] | None:
    """What linear layers must have in common to be merged; None if this one cannot be."""
    if node.kwargs or len(node.args) not in (2, 3):
        return None
    x, weight, bias = (*node.args, None)[:3]
    for parameter in (weight, bias) if bias is not None else (weight,):
        if not isinstance(parameter, fx.Node):
            return None
        held = _placeholder(parameter)
        value: Any = values.get(held)
        if not (type(value) is nn.Parameter or hasattr(value, "_local_tensor")):
            return None
        part = local(value)
        if not part.is_contiguous() or not part.is_floating_point():
            return None
        if part.untyped_storage().nbytes() != part.nbytes and value not in _stacked:
            return None  # it is part of something else's memory, which must go on seeing what is written to it
        if len(parameter.users) != 1 or len(held.users) != 1:
            return None
        if (held is parameter) != (part is value):
            return None  # a linear layer of a DTensor, which is not computed on this rank's part alone
    if not isinstance(x, fx.Node) or _is_changed(x):
        return None
    part = local(values[_placeholder(weight)])  # type: ignore[arg-type]
    return x, bias is None, part.dtype, part.device, part.shape[1]


def _is_changed(x: fx.Node) -> bool:
    """Whether ``x``, or a view of it, is changed in place: linear layers before and after do not see the same."""
    for user in x.users:
        name = user.target if user.op == "call_method" else ""
        if user.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):  # type: ignore[union-attr]
            return True
        is_view = name in _ANY_STRIDES or name == "view" or user.target is operator.getitem
        if is_view and _is_changed(user):
            return True
    return False


def _rows(linear: fx.Node) -> int:
    return int(linear.meta["example_value"].shape[-1])


def _takes_strides(linear: fx.Node, rows: int) -> bool:
    """Whether everything that uses ``linear`` works on part of the rows of a product of ``rows`` as well."""
    shape = linear.meta["example_value"].shape
    if not all(isinstance(size, int) for size in shape):
        return False
    part = torch.empty((*shape[:-1], rows), device="meta").narrow(-1, 0, shape[-1])
    for user in linear.users:
        if user.op == "call_method" and user.target == "view":
            sizes: Any = user.args[1] if isinstance(user.args[1], (tuple, list)) else user.args[1:]
            if not all(isinstance(size, int) for size in sizes):
                return False
            try:
                part.view(sizes)
            except RuntimeError:
                return False
        elif user.op == "call_method" and user.target not in _ANY_STRIDES:
            return False
        elif user.op == "call_function" and isinstance(user.target, torch._ops.OpOverload):
            return False
    return True
