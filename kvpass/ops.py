"""The ``kvpass::`` operators: the only names the cache and the passes share.

Each takes the cache's buffers (:class:`kvpass.formats.KVBuffers`) as plain tensors and a format by its name. On CUDA
the implementation is the Triton kernels, imported at the first call; everywhere else it is :mod:`kvpass.reference`.

``positions`` (``[length]`` int64, ascending, no two alike) are the slots of the tokens of one call. The cache is
written there, and read up to ``positions[-1]``: nothing past it is touched, whatever it holds. (Of a ring, in which the
token at position ``p`` is in slot ``p % slots``: it is written at those, and once full it is read up to its last slot.
``unroll`` and ``ring_mask`` say which position each slot holds.) During decode it is the cache's own counter, so no
operator needs a launch to find its place. A position past the last slot is an error on CPU; on CUDA, where raising
would mean waiting for the device at every token, nothing is written and attention yields NaN, so a cache that runs over
inside a compiled graph never returns a plausible number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

from kvpass import reference
from kvpass.formats import KVBuffers, get_format
from kvpass.tiles import Configuration

_KEPT = ("kept", "kept_slots")
_library = torch.library.Library("kvpass", "FRAGMENT")


def _operator(
    fake: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    mutates_args: Sequence[str] = (),
    backward: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an operator of a function, which computes it where ``cuda`` does not. Autograd does not see one without
    ``backward``.

    What ``torch.library.custom_op`` does, but for its layers of Python around every call: they take the host far longer
    than the dispatcher does, in each layer of a prompt and of a step that no CUDA graph holds.
    """

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, function, "CompositeExplicitAutograd")
        if cuda is not None:
            _library.impl(name, cuda, "CUDA")
        torch.library.register_fake(f"kvpass::{name}", fake, lib=_library)
        if backward is None:
            _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        else:
            torch.library.register_autograd(f"kvpass::{name}", backward, lib=_library)
        operator: Callable[..., Any] = getattr(torch.ops.kvpass, name).default
        return operator

    return define


def _nothing_fake(*args: object) -> None:
    return None


def _store_cuda(*args: Any) -> None:
    from kvpass.kernels.store import store as launch

    launch(*args)


@_operator(
    _nothing_fake,
    _store_cuda,
    mutates_args=[f"{side}_{name}" for side in ("key", "value") for name in ("codes", "block_scale", *_KEPT)],
)
def store(
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    key_codes: Tensor,
    key_block_scale: Tensor | None,
    key_scale: Tensor | None,
    key_centre: Tensor | None,
    key_kept: Tensor | None,
    key_kept_slots: Tensor | None,
    value_codes: Tensor,
    value_block_scale: Tensor | None,
    value_scale: Tensor | None,
    value_centre: Tensor | None,
    value_kept: Tensor | None,
    value_kept_slots: Tensor | None,
    key_format: str,
    value_format: str,
    keep_first: int = 0,
) -> None:
    """Quantize ``key`` and ``value`` (``[batch, kv_heads, length, head_dim]``) into the slots ``positions``.

    What is kept in bf16 beside them (:func:`kvpass.reference.kept_rows`) is slots below ``keep_first``, and in what is
    left of ``key_kept`` and ``value_kept`` the newest.
    """
    _check_fits(positions, key_codes)
    key_buffers = KVBuffers(key_codes, key_block_scale, key_scale, key_centre, key_kept, key_kept_slots)
    value_buffers = KVBuffers(value_codes, value_block_scale, value_scale, value_centre, value_kept, value_kept_slots)
    reference.write(key_buffers, get_format(key_format), key, positions, keep_first)
    reference.write(value_buffers, get_format(value_format), value, positions, keep_first)


# The kernel has one program for each head. That is one launch in the place of a dozen, which is what counts for a short
# prompt; for many tokens it is few programs, and torch sums them.
_MOST_TOKENS = 1024


def _learn_centre(x: Tensor, centre: Tensor | None, turns: Tensor | None, is_written: Tensor | None) -> None:
    if centre is not None:
        centre.copy_(reference.centre_of(x, turns, is_written))


def _learn_cuda(
    key: Tensor,
    value: Tensor,
    key_scale: Tensor | None,
    key_centre: Tensor | None,
    value_scale: Tensor | None,
    value_centre: Tensor | None,
    turns: Tensor | None,
    is_written: Tensor | None,
    learns_key_centre: bool,
    learns_value_centre: bool,
    *formats: str,
) -> None:
    from kvpass.kernels.learn import learn as launch

    if key.shape[0] * key.shape[2] > _MOST_TOKENS:
        _learn_centre(key, key_centre if learns_key_centre else None, turns, is_written)
        _learn_centre(value, value_centre if learns_value_centre else None, None, is_written)
        turns, learns_key_centre, learns_value_centre = None, False, False
    scales_and_centres = key_scale, key_centre, value_scale, value_centre
    launch(key, value, *scales_and_centres, turns, is_written, learns_key_centre, learns_value_centre, *formats)


@_operator(
    _nothing_fake,
    _learn_cuda,
    mutates_args=[f"{side}_{name}" for side in ("key", "value") for name in ("scale", "centre")],
)
def learn(
    key: Tensor,
    value: Tensor,
    key_scale: Tensor | None,
    key_centre: Tensor | None,
    value_scale: Tensor | None,
    value_centre: Tensor | None,
    turns: Tensor | None,
    is_written: Tensor | None,
    learns_key_centre: bool,
    learns_value_centre: bool,
    key_format: str,
    value_format: str,
) -> None:
    """Set the scales that are given, and the centres that are to be learnt, from the tokens ``key`` and ``value``
    (``[batch, kv_heads, length, head_dim]``).

    A scale is that of what is left when the centre, where there is one, is subtracted
    (:func:`kvpass.reference.scale_of`). Of ``turns``, which are K's, and ``is_written``
    :func:`kvpass.reference.centre_of` tells.
    """
    for x, scale, centre, learns_centre, factors, format in (
        (key, key_scale, key_centre, learns_key_centre, turns, key_format),
        (value, value_scale, value_centre, learns_value_centre, None, value_format),
    ):
        _learn_centre(x, centre if learns_centre else None, factors, is_written)
        if scale is not None:
            scale.copy_(reference.scale_of(x, get_format(format).learnt_step, centre, is_written))


def _dequantize_fake(codes: Tensor, *args: Any) -> Tensor:
    return codes.new_empty(_dequantized_shape(codes, args[6]), dtype=args[7])


def _dequantize_cuda(*args: Any) -> Tensor:
    from kvpass.kernels.dequantize import dequantize as launch

    return launch(*args)


@_operator(_dequantize_fake, _dequantize_cuda)
def dequantize(
    codes: Tensor,
    block_scale: Tensor | None,
    scale: Tensor | None,
    centre: Tensor | None,
    kept: Tensor | None,
    kept_slots: Tensor | None,
    positions: Tensor,
    format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Decode a buffer: ``[batch, kv_heads, max_len, head_dim]`` in ``dtype``, zero past slot ``positions[-1]``.

    On CUDA all of it is NaN if ``positions[-1]`` is past the last slot.
    """
    _check_fits(positions, codes)
    end = int(positions[-1]) + 1
    out = codes.new_zeros(_dequantized_shape(codes, format), dtype=dtype)
    written = KVBuffers(codes, block_scale, scale, centre, kept, kept_slots).first(end)
    out[:, :, :end] = reference.dequantize(written, get_format(format), dtype)
    return out


def _attention_fake(query: Tensor, *args: Any) -> Tensor:
    value_codes, value_format = args[6], args[17]
    return query.new_empty((*query.shape[:-1], get_format(value_format).head_dim(value_codes.shape[-1])))


def _attention_cuda(query: Tensor, *args: Any) -> Tensor:
    from kvpass.kernels.attention import attention as launch

    _check_softmax(query, *args[18:])
    return launch(query, *args)


def _no_gradient(context: object, *gradients: Tensor) -> tuple[None, ...]:
    """torch 2.11 traces a backward graph even where nothing asks for gradients, which must not fail; it never runs."""
    if TracingContext.try_get() is None:
        raise NotImplementedError(
            "kvpass::attention is for inference: it has no gradient; run it under torch.no_grad()"
        )
    return (None,) * 21


@_operator(_attention_fake, _attention_cuda, backward=_no_gradient)
def attention(
    query: Tensor,
    key_codes: Tensor,
    key_block_scale: Tensor | None,
    key_scale: Tensor | None,
    key_centre: Tensor | None,
    key_kept: Tensor | None,
    key_kept_slots: Tensor | None,
    value_codes: Tensor,
    value_block_scale: Tensor | None,
    value_scale: Tensor | None,
    value_centre: Tensor | None,
    value_kept: Tensor | None,
    value_kept_slots: Tensor | None,
    positions: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
    key_format: str,
    value_format: str,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of ``query`` (``[batch, heads, length, head_dim]``) to the cache, decoded on the fly.

    The arguments are those of :func:`kvpass.reference.attention`, K and V as buffers. Returns
    ``[batch, heads, length, value_head_dim]`` in ``query.dtype``.
    """
    _check_softmax(query, softcap, sinks)
    _check_fits(positions, key_codes)
    end = int(positions[-1]) + 1
    if mask is not None and mask.shape[-1] < end:
        raise ValueError(f"the mask covers {mask.shape[-1]} slots, but the newest token is in slot {end - 1}")
    key_buffers = KVBuffers(key_codes, key_block_scale, key_scale, key_centre, key_kept, key_kept_slots)
    value_buffers = KVBuffers(value_codes, value_block_scale, value_scale, value_centre, value_kept, value_kept_slots)
    key = reference.dequantize(key_buffers.first(end), get_format(key_format))
    value = reference.dequantize(value_buffers.first(end), get_format(value_format))
    return reference.attention(query, key, value, positions, mask, scale, is_causal, softcap, sinks)


# Operators that are other operators put together.
_library.define("unroll(Tensor ring, Tensor positions, SymInt max_cache_len) -> Tensor")
_library.define("newest_for(Tensor positions, Tensor query) -> Tensor")
_library.define("ring_mask(Tensor mask, Tensor positions, Tensor ring) -> Tensor")


def _unroll(ring: Tensor, positions: Tensor, max_cache_len: int) -> Tensor:
    """Lay out by position what a ring holds, when the newest token is at ``positions[-1]``.

    Args:
        ring: ``[batch, kv_heads, slots, head_dim]``, position ``p`` in slot ``p % slots``.
        positions: ``[length]`` int64, ascending.

    Returns:
        ``[batch, kv_heads, max_cache_len, head_dim]``: zero at positions that no slot holds, NaN throughout if
        ``positions[-1]`` is none of the ``max_cache_len``.
    """
    slots, last = ring.shape[2], positions[-1]
    position = torch.arange(max_cache_len, device=ring.device)
    is_held = (position <= last) & (position > last - slots)
    nothing = torch.where(last < max_cache_len, 0.0, torch.nan).to(ring.dtype)
    return torch.where((is_held & (last < max_cache_len))[:, None], ring.index_select(2, position % slots), nothing)


def _ring_mask(mask: Tensor, positions: Tensor, ring: Tensor) -> Tensor:
    """The columns of ``mask`` (``[..., positions]``) in the order of the slots of ``ring`` (``[_, _, slots, _]``):
    ``[..., slots]``."""
    slots, last = ring.shape[2], positions[-1]
    slot = torch.arange(slots, device=mask.device)
    position = last - (last - slot) % slots  # of the token in each slot; negative where there is none yet
    return mask.index_select(mask.dim() - 1, position.clamp(min=0, max=mask.shape[-1] - 1))


def _newest_for(positions: Tensor, query: Tensor) -> Tensor:
    """``positions[-1]`` for each token of ``query`` (``[batch, heads, length, head_dim]``): what several tokens need
    that read a cache, such as that of cross attention, to which none of them was added."""
    return positions[-1:].repeat(query.shape[2])


_library.impl("unroll", _unroll, "CompositeImplicitAutograd")
_library.impl("newest_for", _newest_for, "CompositeImplicitAutograd")
_library.impl("ring_mask", _ring_mask, "CompositeImplicitAutograd")


def unroll(ring: Tensor, positions: Tensor, max_cache_len: int) -> Tensor:
    """What a ring holds, laid out by position; see :func:`_unroll`."""
    result: Tensor = torch.ops.kvpass.unroll.default(ring, positions, max_cache_len)
    return result


def attention_kernel(
    query: Tensor,
    kv_heads: int,
    value_dim: int,
    mask: Tensor | None,
    scale: float,
    key_format: str,
    value_format: str,
    keep: int,
    softcap: float,
    has_sinks: bool,
) -> str:
    """The kernel that :func:`attention` runs for such arguments (fake tensors will do), and why no faster one.

    ``keep`` is the number of slots kept in bf16.
    """
    if not query.is_cuda:
        return "PyTorch"
    from kvpass.kernels.attention import why_not_hopper

    form = (keep, softcap, has_sinks)
    reason = why_not_hopper(query, kv_heads, value_dim, mask, scale, key_format, value_format, *form)
    return "Hopper" if reason is None else f"Triton (not the Hopper one: {reason})"


def attention_in(config: Configuration, *arguments: Any) -> Tensor:
    """:func:`attention` by the plain Triton kernel in these tiles, whatever is faster here: for benchmarks.

    Takes tensors on CUDA, or on CPU in Triton's interpreter.
    """
    from kvpass.kernels.attention import attention as launch

    return launch(*arguments, config=config)


def _dequantized_shape(codes: Tensor, format: str) -> tuple[int, ...]:
    return (*codes.shape[:-1], get_format(format).head_dim(codes.shape[-1]))


def _check_fits(positions: Tensor, codes: Tensor) -> None:
    last = int(positions[-1])
    if last >= codes.shape[2]:
        raise ValueError(f"position {last} does not fit a cache of {codes.shape[2]} slots; make max_cache_len larger")


def _check_softmax(query: Tensor, softcap: float = 0.0, sinks: Tensor | None = None) -> None:
    heads = query.shape[1]
    if not softcap >= 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or 0 for none")
    if sinks is not None and not (sinks.shape == (heads,) and sinks.dtype.is_floating_point):
        raise ValueError(
            f"sinks are {sinks.dtype} of shape {tuple(sinks.shape)}; give a floating number for each of {heads} heads"
        )


def _released_fake(buffer: Tensor) -> Tensor:
    return torch.empty_like(buffer)


@_operator(_released_fake)
def released(buffer: Tensor) -> Tensor:
    """Marks, in a traced graph, the use of a ``StaticCache`` buffer whose storage was quantized and released.

    The ``kvquant`` backend removes it. Anywhere else it raises, since ``buffer`` holds no data any more.
    """
    raise RuntimeError(
        "this StaticCache was quantized by the kvquant backend and holds no bf16 data any more: run the compiled model "
        "it was used with, make a new cache, or use kvpass.QuantizedCache, which works under every backend"
    )
