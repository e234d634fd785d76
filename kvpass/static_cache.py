"""The buffers of a transformers ``StaticCache``, once the ``kvquant`` backend has quantized them.

``generate`` fills such a cache eagerly, in bf16, and only then calls the compiled decode step. At the first such call
:func:`quantize_pair` moves a layer's K and V into quantized storage, releases the bf16 bytes, and turns the two
tensors into :class:`ReleasedBuffer`: the same Python objects, which the cache still holds, now without data of their
own. Whatever eager code does with them afterwards is answered from the quantized storage or refused; freed memory is
never read. Inside ``torch.compile`` their use is marked with ``kvpass::released``, which only ``kvquant`` understands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kvpass import ops, reference
from kvpass.config import LayerConfig
from kvpass.first_tokens import FIRST_TOKENS, learn
from kvpass.formats import KVBuffers, get_format

# Attributes that hold data; every other one can be asked of a tensor without storage, and so can these methods.
_DATA_ATTRIBUTES = {getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_METADATA_METHODS = {
    getattr(Tensor, name)
    for name in ("size", "dim", "stride", "numel", "nelement", "is_floating_point", "is_complex", "is_contiguous")
    + ("element_size", "get_device", "storage_offset", "untyped_storage")
}


class ReleasedBuffer(Tensor):
    """K or V of one ``StaticCache`` layer, stored quantized.

    Attributes:
        buffers: Where the data is.
        format: The format's name.
        keep_first, keep_last: How many of the first and of the newest slots are kept in bf16.
    """

    buffers: KVBuffers
    format: str
    keep_first: int
    keep_last: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_dynamo_compiling():  # Dynamo is tracing this very function
                args = tuple(ops.released(a) if isinstance(a, ReleasedBuffer) else a for a in args)
                return func(*args, **kwargs)
            is_metadata = func in _METADATA_METHODS or (func.__name__ == "__get__" and func not in _DATA_ATTRIBUTES)
            if is_metadata or torch.compiler.is_compiling():  # the compiler itself looks at the tensor
                return func(*args, **kwargs)
            return _eager(func, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReleasedBuffer(shape={tuple(self.shape)}, format={self.format!r})"


def quantize_pair(key: Tensor, value: Tensor, config: LayerConfig) -> None:
    """Move K and V (``[batch, kv_heads, max_len, head_dim]``, each alone in its storage) into quantized storage.

    Both become :class:`ReleasedBuffer`; where they already are, nothing happens. Centres and tensor scales that are not
    given are taken from the first tokens that are there (:func:`kvpass.first_tokens.learn`): a mean, since nothing
    here tells of the model's rotary embedding. The newest tokens, where some are kept in bf16, are taken to end with
    the last slot that is not zero.

    Raises:
        ValueError: The cache was quantized in other formats before.
    """
    for tensor, fmt in ((key, config.key), (value, config.value)):
        wanted = (fmt.name, config.keep_first, config.keep_last)
        if isinstance(tensor, ReleasedBuffer) and (tensor.format, tensor.keep_first, tensor.keep_last) != wanted:
            names = [
                f"{name} with {first} + {last} tokens kept in bf16" if first or last else name
                for name, first, last in ((tensor.format, tensor.keep_first, tensor.keep_last), wanted)
            ]
            raise ValueError(f"this StaticCache is stored as {names[0]}, and {names[1]} is asked for; make a new one")
    if isinstance(key, ReleasedBuffer):
        return
    slots = torch.arange(key.shape[2], device=key.device)
    new = config.allocate_like(key, value)
    first = key[:, :, :FIRST_TOKENS]
    is_written = (first != 0).transpose(0, 2).flatten(1).any(1)  # transformers makes its buffers of zeros
    learn(config, *new, first, value, key.shape[2], is_written)
    settings = config.key.name, config.value.name, config.keep_first
    ops.store(key, value, slots, *new[0], *new[1], *settings)
    if config.keep_last and any(buffers.kept is not None for buffers in new):
        last = torch.where(key.any(dim=(0, 1, 3)), slots, 0).amax()
        newest = (last + 1 - config.keep_last).clamp(min=0) + slots[: config.keep_last]
        tokens = (x.index_select(2, newest) for x in (key, value))
        ops.store(*tokens, newest, *new[0], *new[1], *settings)
    for tensor, buffers, fmt in ((key, new[0], config.key), (value, new[1], config.value)):
        for buffer in buffers.tensors():
            torch._dynamo.mark_static_address(buffer)
        tensor.data = _hollow(tensor)
        tensor.__class__ = ReleasedBuffer
        tensor.buffers, tensor.format = buffers, fmt.name  # type: ignore[attr-defined]
        tensor.keep_first, tensor.keep_last = config.keep_first, config.keep_last  # type: ignore[attr-defined]


def _hollow(tensor: Tensor) -> Tensor:
    """A tensor like ``tensor`` whose storage has no bytes. What ``tensor`` had is freed with its last user, so that a
    view of it that somebody still holds stays valid."""
    hollow = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    hollow.untyped_storage().resize_(0)
    return hollow


class _DecodedView(Tensor):
    """A view of what a released buffer decodes to: reads are reads, but a write would be lost, so it is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _writes_to(func, args, kwargs or {}, _DecodedView):
            raise RuntimeError(
                f"{_name(func)} on a view of a StaticCache buffer that the kvquant backend has quantized: the write "
                "would be lost. Write whole tokens with index_copy_ along dimension 2 of the buffer itself"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return _as_view(result, [a for a in args if isinstance(a, _DecodedView)])


def _eager(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What eager code asks of a released buffer: erase, write tokens, or read it decoded."""
    target = args[0] if args and isinstance(args[0], ReleasedBuffer) else None
    if target is not None and _name(func) == "zero_":
        target.buffers.map_batch(torch.Tensor.zero_)
        if target.buffers.centre is not None:
            target.buffers.centre.zero_()
        return target
    if target is not None and _name(func) == "index_copy_" and len(args) == 4 and args[1] == 2:
        reference.write(target.buffers, get_format(target.format), args[3], args[2], target.keep_first)
        return target
    if _writes_to(func, args, kwargs, ReleasedBuffer) or _name(func) == "data_ptr":
        raise RuntimeError(
            f"{_name(func)} on a StaticCache buffer that the kvquant backend has quantized to {_format_of(args)}: its "
            "bf16 storage is released. Supported are index_copy_ along dimension 2, zero_, and reads; make a new cache "
            "for anything else"
        )
    decoded: list[Tensor] = []

    def decode(x: Any) -> Any:
        if not isinstance(x, ReleasedBuffer):
            return x
        last = torch.full((1,), x.shape[2] - 1, device=x.device)
        decoded.append(ops.dequantize(*x.buffers, last, x.format, x.dtype))
        return decoded[-1]

    result = func(*tree_map(decode, args), **tree_map(decode, kwargs))
    return _as_view(result, decoded)


def _writes_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[Tensor]) -> bool:
    """Whether ``func`` changes a tensor of ``kind`` in place: its first argument, or ``out``."""
    name = _name(func)
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__", "__iadd__")
    in_place = in_place or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return (in_place and bool(args) and isinstance(args[0], kind)) or isinstance(kwargs.get("out"), kind)


def _as_view(result: Any, sources: list[Tensor]) -> Any:
    """``result``, read-only where it shares memory with one of ``sources``."""
    storages = {source.untyped_storage().data_ptr() for source in sources}
    if isinstance(result, Tensor) and result.numel() and result.untyped_storage().data_ptr() in storages:
        return result.as_subclass(_DecodedView)
    return result


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _format_of(args: tuple[Any, ...]) -> str:
    return next((a.format for a in args if isinstance(a, ReleasedBuffer)), "another format")
