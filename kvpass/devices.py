"""Models on several devices: split among tensor-parallel ranks, or dispatched over devices by accelerate.

What transformers and accelerate put around each module for that can be compiled badly or not at all. While an enabled
model generates, :func:`substitutes` takes its place:

- accelerate hooks every module to move what it is given, and forbids compiling its hooks, so that a decode step would
  fall into a graph per module. Tensors need to move only where a part named in ``hf_device_map`` begins.
- transformers makes weights DTensors, and swaps them for their local part in every forward. Guards on those, and on the
  dictionaries that change, cost more at every step than all others together. Linear layers get their part as it is.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpass.architecture import in_layers
from kvpass.config import KVQuantConfig

# Projections whose output holds K, fused with others or not.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_ABSENT: Any = object()
_HOOK = "kvpass"  # its key among a module's hooks


class Ranks(NamedTuple):
    """How a model is split among tensor-parallel ranks: this one's place, their number, and in how many parts K and V
    are (1 where every rank has all heads)."""

    rank: int = 0
    size: int = 1
    parts: int = 1


def ranks_of(model: Any) -> Ranks:
    """How transformers has split ``model``.

    Raises:
        ValueError: The ranks cannot share the KV heads: the K projection is split by rows, so each would get part of a
            head, and transformers' forward fails.
        NotImplementedError: Its layers are on different ranks.
    """
    mesh, size = getattr(model, "_device_mesh", None), getattr(model, "_tp_size", None) or 1
    if mesh is not None and "pp" in (mesh.mesh_dim_names or ()) and mesh["pp"].size() > 1:
        raise NotImplementedError(
            f"the model's layers are split among {mesh['pp'].size()} ranks (pp_size); kvpass supports tensor "
            "parallelism (tp_size)"
        )
    if mesh is None or size == 1:
        return Ranks()
    rank = _tensor_parallel(mesh).get_local_rank()
    plan = (model.tp_plan or {}).items()
    if not any(name.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise" for name, style in plan):
        return Ranks(rank, size)
    text = model.config.get_text_config(decoder=True)
    for heads in in_layers(text, "num_key_value_heads", "num_attention_heads"):
        if heads % size:
            raise ValueError(
                f"the model has {heads} KV heads, which {size} tensor-parallel ranks cannot share: each would get part "
                f"of a head. Run it on a number of ranks that divides {heads}"
            )
    return Ranks(rank, size, size)


def on_this_rank(config: KVQuantConfig, ranks: Ranks) -> KVQuantConfig:
    """``config`` with the scales of the heads that this rank has. Those that are a rank's part already are left."""
    scales = config.scales
    if scales is None or (scales.tp_size == ranks.parts and not scales.ranks):
        return config
    return dataclasses.replace(config, scales=scales.shard(ranks.rank if ranks.parts > 1 else 0, ranks.parts))


def offloaded(model: Any) -> str | None:
    """Where parts of ``model`` are kept besides its devices ("cpu, disk"); None where there are none. transformers does
    not compile such a model."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    found = sorted(places & {"cpu", "disk"})
    return ", ".join(found) if "disk" in found or (found and len(places) > 1) else None


def modules_of(model: Any) -> list[Any]:
    """The modules of ``model.modules()`` in another order and a third of the time: every ``generate`` looks at them."""
    found, seen = [model], {model}
    for module in found:  # which grows meanwhile
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


class Substitutes:
    """Entries of the dictionaries of a model's modules, that can be put in the place of what is there.

    They are made once for a model, so that what was compiled with them stays valid.

    Attributes:
        made_for: What of the model they depend on.
        parameters: The local parts of weights that they hold.
    """

    def __init__(self, made_for: list[Any]) -> None:
        self.made_for = made_for
        self.parameters: list[nn.Parameter] = []
        self._sharded: list[Any] = []
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        self._depth = 0
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        self._lock = threading.Lock()

    def add(self, entries: dict[str, Any], name: str, value: Any) -> None:
        """Have ``entries[name]`` be ``value``, or be no entry where that is ``_ABSENT``."""
        self._entries.append((entries, name, value))

    def local(self, weight: Any) -> nn.Parameter:
        """This rank's part of a DTensor. The two share one tensor: what moves it, moves it for both."""
        part = weight._local_tensor = nn.Parameter(weight._local_tensor, requires_grad=False)
        self.parameters.append(part)
        self._sharded.append(weight)
        return part

    def dissolve(self) -> None:
        """Give the DTensors plain tensors again."""
        for weight in self._sharded:
            weight._local_tensor = weight._local_tensor.detach()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this they are in place: until the last ``generate`` ends of those inside each other or in threads."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                for entries, name, value in self._entries:
                    self._before.append((entries, name, entries.get(name, _ABSENT)))
                    _set(entries, name, value)
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                while self._before and not self._depth:
                    _set(*self._before.pop())

    @property
    def is_in_place(self) -> bool:
        """Whether a ``generate`` uses them now."""
        return self._depth > 0


def substitutes(model: Any, known: Substitutes | None) -> Substitutes:
    """What ``model`` is to compute with while it generates: ``known``, unless it was dispatched or split anew."""
    if known is not None and known.is_in_place:
        return known
    hooked = [module for module in modules_of(model) if "_hf_hook" in vars(module)]
    sharded = _sharded_linears(model)
    made_for = [*(module._hf_hook for module in hooked), *(module.weight for module, _ in sharded)]
    if known is not None and [id(x) for x in known.made_for] == [id(x) for x in made_for]:
        return known
    made = Substitutes(made_for)
    # A hook that does more, such as bringing weights from the CPU, must go on doing so.
    if all(type(module._hf_hook).__name__ == "AlignDevicesHook" and not module._hf_hook.offload for module in hooked):
        named = dict(model.named_modules())  # the map may name single parameters, too
        parts = {named[name] for name in getattr(model, "hf_device_map", None) or {} if name in named}
        for module in hooked:
            plain = module._old_forward
            is_own = getattr(plain, "__func__", None) is type(module).forward
            made.add(vars(module), "forward", _ABSENT if is_own else plain)
            if module in parts:
                made.add(module._forward_pre_hooks, _HOOK, _moving(module._hf_hook))
                made.add(module._forward_pre_hooks_with_kwargs, _HOOK, True)
    for module, style in sharded:
        weight: Any = module.weight
        made.add(module._parameters, "weight", made.local(weight))
        made.add(vars(module), "forward", _ABSENT if style == "colwise" else _reducing(module, weight.device_mesh))
    return made


def _set(entries: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        entries.pop(name, None)
    else:
        entries[name] = value


def _moving(hook: Any) -> Callable[..., Any]:
    """A forward pre-hook that brings arguments to the device that ``hook``, accelerate's, is for."""
    device, skip = torch.device(hook.execution_device), hook.skip_keys or ()
    skip = (skip,) if isinstance(skip, str) else skip

    def moving(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return _to(args, device), {name: x if name in skip else _to(x, device) for name, x in kwargs.items()}

    return moving


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)([_to(x, device) for x in value])
    return {name: _to(x, device) for name, x in value.items()} if type(value) is dict else value


def _sharded_linears(model: Any) -> list[tuple[nn.Linear, str]]:
    """Linear layers that compute with a DTensor's local part alone, and how they are split: ``colwise`` or
    ``rowwise``."""
    plan = getattr(model, "_tp_plan", None) or {}
    if (getattr(model, "_tp_size", None) or 1) == 1 or "sequence_parallel" in plan.values():
        return []  # with the latter, what such a layer is given may be a DTensor
    found = []
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if type(module) is nn.Linear and style in ("colwise", "rowwise") and hasattr(module.weight, "_local_tensor"):
            if style == "rowwise" or module.bias is None:
                found.append((module, style))
    return found


def _reducing(module: nn.Linear, mesh: Any) -> Callable[[Tensor], Tensor]:
    """The forward of a linear layer whose weight is split by columns: the sum of all ranks' products, then the bias."""
    group = _tensor_parallel(mesh).get_group()

    def reducing(x: Tensor) -> Tensor:
        product = F.linear(x, module.weight)
        torch.distributed.all_reduce(product, group=group)
        bias: Any = module.bias  # every rank has all of it
        return product if bias is None else product.add(bias.to_local() if hasattr(bias, "_local_tensor") else bias)

    return reducing


def _tensor_parallel(mesh: Any) -> Any:
    return mesh["tp"] if mesh.ndim > 1 else mesh
