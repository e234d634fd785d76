"""Linear layers that read the same input become one: the q, k and v projections, gate and up.

At decode a linear layer takes as long as its weights take to be read, plus a launch, and the reduction that cuBLAS
needs to spread a small one over a GPU. One larger product does it in one go.

The weights must lie behind each other for that. :class:`Stacked` moves them into one tensor when a graph first runs,
and makes the parameters views of it: no second copy, and what is written into a parameter afterwards is seen. A
parameter that was given another storage since (``.data = ...``, ``.to(...)``) is moved again before the next run.
Only the parameters hold that memory. Compiled graphs, which Dynamo keeps, look it up from them at each run.

A parameter whose memory something else sees as well (a ``state_dict`` that was taken, another model, another process)
is left where it is, or what is written to one of them would no longer be seen by the other.

Of a parameter that is sharded among tensor-parallel ranks (a DTensor, which the graph takes through ``to_local``) it is
this rank's part that moves (:func:`local`).
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from kvpass.fx_passes.rewrite import static_placeholder

LINEAR = torch._C._nn.linear
# Methods that accept any strides. `view` is tried out; others are left alone.
_ANY_STRIDES = {"reshape", "transpose", "permute", "unsqueeze", "squeeze", "to", "float", "contiguous", "expand"}

# What may be done with the input of linear layers between the first and the last of them: all else may write to it.
_READS = {LINEAR, getattr, operator.getitem, "size", "view", "repeat", *_ANY_STRIDES}

_stacked: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the storage that each parameter was moved to
_lock = threading.RLock()  # parameters move between a look at where they are and a view of them


class Stacked:
    """Where an input of a rewritten graph comes from: several parameters, as one tensor.

    Attributes:
        positions: Places of the parameters among the inputs of the graph before. They agree in all but their first
            dimension.
        shape: Of that tensor.
    """

    def __init__(self, positions: Sequence[int], shape: Sequence[int]) -> None:
        self.positions = tuple(positions)
        self.shape = tuple(shape)
        # Where the parameters lay behind each other when that was last looked at, and in which storage.
        self._addresses: list[int] = []
        self._storage: Any = None

    def of(self, args: Sequence[Any]) -> Tensor:
        """The tensor for these inputs. Every run asks, and finds them where they were."""
        parts = [local(args[position]) for position in self.positions]
        first = parts[0]
        with _lock:
            addresses, storage = [part.data_ptr() for part in parts], first.untyped_storage()
            if addresses == self._addresses and storage._cdata == self._storage.cdata:
                return first.as_strided(self.shape, first.stride())
            whole = _view(parts, self.shape)
            if whole is None:
                return stack([args[position] for position in self.positions])
            self._addresses, self._storage = addresses, StorageWeakRef(storage)
            return whole

    def example(self, args: Sequence[Any]) -> Tensor:
        """An empty tensor of the same shape, dtype and device; nothing is moved."""
        first = local(args[self.positions[0]])
        return torch.empty(self.shape, dtype=first.dtype, device=first.device)


def local(parameter: Tensor) -> Tensor:
    """What this rank holds of a DTensor, itself and no copy; of any other parameter all there is."""
    part: Tensor = getattr(parameter, "_local_tensor", parameter)
    return part


@torch.inference_mode(False)
@torch.no_grad()
def stack(parameters: Sequence[Tensor]) -> Tensor:
    """``torch.cat(parameters)``, of which the parameters become views, unless they are views of such a tensor. Where
    the memory of one of them is seen by something else they stay where they are, and this is a copy: a graph that was
    compiled before then makes one at each run."""
    parts = [local(parameter) for parameter in parameters]
    rows = [part.shape[0] for part in parts]
    if (whole := _view(parts, (sum(rows), *parts[0].shape[1:]))) is not None:
        return whole
    whole = torch.cat([part.detach() for part in parts])
    if not any(map(_is_seen, parameters)):
        for parameter, part, moved in zip(parameters, parts, whole.split(rows), strict=True):
            part.data = moved
            _stacked[parameter] = StorageWeakRef(whole.untyped_storage())
    return whole


def unstack(parameters: Sequence[Tensor]) -> None:
    """Give those of ``parameters`` that :func:`stack` moved a storage of their own again, one stack at a time: that is
    all the memory it takes, and where even that is missing, what is left can be unstacked later. A stack that something
    else sees, such as a ``state_dict``, stays."""
    with _lock:
        held: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            if (storage := _stack_of(parameter)) is not None:
                held.setdefault(storage, []).append(parameter)
        for members in held.values():
            if _is_seen(members[0]):
                continue
            for parameter in members:
                moved = local(parameter)
                moved.data = moved.data.clone()
                del _stacked[parameter]


def _view(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """``parts`` as one tensor of ``shape``, if they lie behind each other in one storage."""
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end:
            return None
        end += part.nbytes
    storage = first.untyped_storage()  # neighbours may as well have one each
    if end > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided(shape, first.stride())


def _stack_of(parameter: Tensor) -> int | None:
    """The storage that :func:`stack` moved ``parameter`` to, if that is where it still is."""
    moved, storage = _stacked.get(parameter), local(parameter).untyped_storage()._cdata
    return storage if moved is not None and moved.cdata == storage else None


def _is_seen(parameter: Tensor) -> bool:
    """Whether the memory of ``parameter`` is that of something else too, parameters of its stack aside."""
    part = local(parameter)
    storage = part.untyped_storage()
    if storage.is_shared() and not part.is_cuda:  # CUDA's always is, if it is asked
        return True
    stacked = _stack_of(parameter)
    if stacked is None:
        return storage.nbytes() != part.nbytes or _users(part) > _ONE
    others = sum(_stack_of(other) == stacked for other in _stacked) - 1
    return _users(part) > _ONE + others


def _users(tensor: Tensor) -> int:
    """How many tensors have this one's storage, plus a constant. It is not public: without it, none has a second."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) if hasattr(torch._C, "_storage_Use_Count") else 0


_ONE = _users(torch.empty(1))


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
        if len(linears) > 1
        and _is_only_read(linears)
        and all(_takes_strides(linear, sum(map(_rows, linears))) for linear in linears)
    ]


def stack_linears(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]], origin: dict[fx.Node, Any]) -> None:
    """Merge ``groups`` in place. ``origin``, where each placeholder comes from, changes as the placeholders do."""
    for linears in groups:
        inputs = []
        for parameters in zip(*(linear.args[1:] for linear in linears), strict=True):
            if parameters[0] is not None:
                held = [_placeholder(parameter) for parameter in parameters]
                node = static_placeholder(graph, held[0], "stacked")
                shapes = [parameter.meta["example_value"].shape for parameter in parameters]
                shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
                origin[node] = Stacked([origin.pop(parameter).position for parameter in held], shape)
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
        if _stack_of(value) is None and _is_seen(value):
            return None  # what else sees it must go on seeing what is written to it
        if len(parameter.users) != 1 or len(held.users) != 1:
            return None
        if (held is parameter) != (part is value):
            return None  # a linear layer of a DTensor, which is not computed on this rank's part alone
    if not isinstance(x, fx.Node):
        return None
    part = local(values[_placeholder(weight)])  # type: ignore[arg-type]
    return x, bias is None, part.dtype, part.device, part.shape[1]


def _is_only_read(linears: Sequence[fx.Node]) -> bool:
    """Whether the input that ``linears`` share is the same for all: nothing between the first and the last writes to
    its memory, be it through a view, or what it is a view of."""
    memory = _memory(linears[0].args[0])
    node = linears[0]
    while (node := node.next) is not linears[-1]:
        reads = node.target in _READS and "out" not in node.kwargs
        if not reads and any(memory & _memory(operand) for operand in node.all_input_nodes):
            return False
    return True


def _memory(node: Any) -> set[int]:
    """The storages of the tensors that ``node`` stands for. They are fake ones, and views share them."""
    leaves = tree_leaves(node.meta.get("example_value"))
    return {local(leaf).untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}


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
