"""Launch attention: on Hopper's decode kernel where that takes a call, on those of
:mod:`kvpass.kernels.attention_kernels` elsewhere, and how many splits these get. Their tiles are those of
:mod:`kvpass.tiles`.

The number of splits depends on shapes and the GPU only, so that one captured graph serves every length.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
import triton
import triton.language as tl

from kvpass.formats import KVBuffers, KVFormat, get_format
from kvpass.kernels import ptxas
from kvpass.kernels.attention_kernels import attention_kernel, reduce_kernel, survey_kernel
from kvpass.kernels.codecs import check_buffers, constexprs, interpreting, native_float8, on_device, padded_width
from kvpass.kernels.rotate import rotate_rows
from kvpass.tiles import Configuration, configuration

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_MASK_DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def _hopper() -> ModuleType | None:
    """The Hopper decode kernel's module; None where this triton's Gluon is not one it can be written in."""
    try:
        from kvpass.kernels import hopper_decode
    except (ImportError, AttributeError):
        return None
    return hopper_decode


def why_not_hopper(
    query: torch.Tensor,
    kv_heads: int,
    value_dim: int,
    mask: torch.Tensor | None,
    scale: float,
    key_format: str,
    value_format: str,
    keep: int,
    softcap: float,
    has_sinks: bool,
) -> str | None:
    """Why the Hopper kernel would not take a call of :func:`attention`; None if it would. Fake tensors will do."""
    if (hopper := _hopper()) is None:
        return f"triton {triton.__version__} has no usable Gluon"
    key, value = get_format(key_format), get_format(value_format)
    reason: str | None = hopper.supports_device(query.device)
    reason = reason or hopper.supports_shapes(query, kv_heads, value_dim, mask, scale, key, value)
    return reason or hopper.supports_form(mask, key, keep, softcap, has_sinks)


@functools.lru_cache
def _sm_count(device: torch.device) -> int:
    # The interpreter has no SMs; a few make it split.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.lru_cache(maxsize=4096)
def split_count(programs: int, slots: int, most: int) -> int:
    """Splits of each of ``programs`` so that a GPU with room for ``slots`` programs at once is well filled.

    The fewest, at most ``most``, that come within 5% of the best share of busy time: rounds of programs are whole.
    """

    def busy(splits: int) -> float:
        rounds = -(-programs * splits // slots)
        return programs * splits / (rounds * slots)

    # Beyond two rounds, more splits only make more to combine.
    candidates = range(1, max(1, min(most, 2 * slots // programs)) + 1)
    best = max(map(busy, candidates))
    return next(splits for splits in candidates if busy(splits) >= 0.95 * best)


def _compute_dtype(fmt: KVFormat, query: torch.dtype) -> torch.dtype:
    """The type a dot product with values of ``fmt`` is done in: every value is exact in it."""
    if query == torch.float32:
        return torch.float32
    if fmt.codec != "bf16" and fmt.block_scale != "e8m0":
        return torch.float16
    # Values of bf16's range; the interpreter multiplies bf16 as integers.
    return torch.bfloat16 if query == torch.bfloat16 and not interpreting() else torch.float32


def attention(
    query: torch.Tensor,
    key_codes: torch.Tensor,
    key_block_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    key_centre: torch.Tensor | None,
    key_kept: torch.Tensor | None,
    key_kept_slots: torch.Tensor | None,
    value_codes: torch.Tensor,
    value_block_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    value_centre: torch.Tensor | None,
    value_kept: torch.Tensor | None,
    value_kept_slots: torch.Tensor | None,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    key_format: str,
    value_format: str,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    *,
    config: Configuration | None = None,
) -> torch.Tensor:
    """Attention of ``query`` to the slots up to ``positions[-1]``, which is read on the device.

    Decode on a Hopper GPU goes to :mod:`kvpass.kernels.hopper_decode`, everything else to the kernel here.

    Args:
        query: ``[batch, heads, length, key_dim]`` bf16, fp16 or fp32, any strides; ``heads`` is a multiple of
            ``kv_heads``.
        key_codes ... value_kept_slots: The buffers, contiguous (:class:`kvpass.formats.KVBuffers`).
        positions: ``[length]`` int64, ascending. If the last is outside the cache (or the mask), the output is NaN.
        mask: None, or ``[batch or 1, heads or 1, length or 1, slots]``, bool (True attends) or bf16, fp16 or fp32
            (added to the scaled scores); any strides.
        scale: Multiplies the scores.
        is_causal: Query ``i`` sees slots up to ``positions[i]`` only.
        key_format, value_format: Names of registered formats.
        softcap: 0 for none, else scaled scores ``s`` become ``softcap * tanh(s / softcap)`` before the mask.
        sinks: None, or ``[heads]`` bf16, fp16 or fp32: logits that join the softmax of every row of their head.
        config: None for what is best known here. Given, it is what the kernel here runs with, on a Hopper GPU too.

    Returns:
        ``[batch, heads, length, value_dim]`` in ``query.dtype``; rows that see nothing are zero.

    Raises:
        ValueError: A dtype or shape outside the above, or buffers that the format does not have.
        NotImplementedError: Sinks over a centred V: part of the softmax then weighs no value.
    """
    key, value = get_format(key_format), get_format(value_format)
    if value.centred and sinks is not None:
        raise NotImplementedError(f"attention sinks over V in {value_format!r}; use a format of V without '+centred'")
    key_buffers = KVBuffers(key_codes, key_block_scale, key_scale, key_centre, key_kept, key_kept_slots)
    value_buffers = KVBuffers(value_codes, value_block_scale, value_scale, value_centre, value_kept, value_kept_slots)
    check_buffers("key", key, key_buffers)
    check_buffers("value", value, value_buffers)
    batch, kv_heads, max_len, key_width = key_codes.shape
    _, heads, length, key_dim = query.shape
    value_dim = value.head_dim(value_codes.shape[3])
    _check(query, key.head_dim(key_width), key_codes, value_codes, positions)
    dtype, out_dtype = query.dtype, torch.float32 if value.rotated else query.dtype
    out = torch.empty((batch, heads, length, value_dim), dtype=out_dtype, device=query.device)
    if out.numel() == 0:
        return out.to(dtype)
    if mask is not None:
        _check_mask(mask, batch, heads, length)
    call = (positions, mask, scale, is_causal, key_format, value_format, softcap, sinks)
    hopper, group = _hopper(), heads // kv_heads
    takes_hopper = (
        config is None and hopper is not None and hopper.supports(query, *key_buffers, *value_buffers, *call) is None
    )
    score_offset = None
    if key_centre is not None and (softcap or sinks is not None):
        # Neither bears the shift of a row's scores that leaving out K's centre is.
        score_offset = scale * (query.float() * key_centre.repeat_interleave(group, 0)[:, None]).sum(-1)
    if key.rotated:
        query = rotate_rows(query, torch.float32)
    if value.rotated and value_centre is not None:  # the sums are rotated, and so must be what is added to them
        value_centre = rotate_rows(value_centre[None, :, None], torch.float32).view(kv_heads, value_dim)
        value_buffers = value_buffers._replace(centre=value_centre)
    if takes_hopper:
        hopper.attention(query, *key_buffers, *value_buffers, *call, out)
        return rotate_rows(out, dtype) if value.rotated else out
    if query.stride(3) != 1:
        query = query.contiguous()
    limit, mask_strides, mask_has_rows, mask_is_bool = max_len, (0, 0, 0, 0), False, False
    if mask is not None:
        limit = min(limit, mask.shape[3])
        mask_strides = tuple(0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True))
        mask_has_rows = mask_strides[1] != 0 or mask_strides[2] != 0
        mask_is_bool = mask.dtype == torch.bool
        if mask_is_bool:
            mask = mask.view(torch.uint8)

    rows = length * group
    key_dtype, value_dtype = _compute_dtype(key, dtype), _compute_dtype(value, dtype)
    if config is None:
        is_fp32 = torch.float32 in (key_dtype, value_dtype)
        config = configuration(key, value, max(key_dim, value_dim), rows, is_fp32, query.device)
    config = ptxas.compilable(config)
    programs = batch * kv_heads * triton.cdiv(rows, config.block_m)
    slots = _sm_count(query.device) * config.programs_per_sm
    splits = split_count(programs, slots, min(256, triton.cdiv(max_len, config.block_n)))
    keep = max(0 if kept is None else kept.shape[2] for kept in (key_kept, value_kept))
    survey, survey_strides = None, (0, 0, 0)
    if mask is not None and rows > config.block_m:
        survey, survey_strides = _survey(mask, mask_strides, mask_is_bool, kv_heads, group, length, config)
    target, partial_max, partial_sum = out, None, None
    if splits > 1:
        partial_shape = (batch * kv_heads, splits, rows)
        target = torch.empty((*partial_shape, value_dim), dtype=torch.float32, device=query.device)
        partial_max, partial_sum = torch.empty((2, *partial_shape), dtype=torch.float32, device=query.device)
    with on_device(query), ptxas.sound(config) as options:
        attention_kernel[(programs, splits)](
            query,
            *query.stride()[:3],
            key_codes,
            key_block_scale,
            key_scale,
            key_kept,
            key_kept_slots,
            value_codes,
            value_block_scale,
            value_scale,
            value_centre,
            value_kept,
            value_kept_slots,
            positions,
            mask,
            *mask_strides,
            survey,
            *survey_strides,
            None if sinks is None else sinks.contiguous(),
            score_offset,
            target,
            partial_max,
            partial_sum,
            scale,
            softcap or None,
            kv_heads,
            length,
            max_len,
            limit,
            GROUP=group,
            KEY_DIM=key_dim,
            KEY_WIDTH=padded_width(key, key_dim),
            KEY_DTYPE=_DTYPES[key_dtype],
            **constexprs(key, "KEY_"),
            VALUE_DIM=value_dim,
            VALUE_WIDTH=padded_width(value, value_dim),
            VALUE_DTYPE=_DTYPES[value_dtype],
            **constexprs(value, "VALUE_"),
            KEEP=keep,
            KEEP_PADDED=triton.next_power_of_2(max(keep, 1)),
            OUT_DTYPE=_DTYPES[out_dtype],
            IS_CAUSAL=is_causal,
            MASK_IS_BOOL=mask_is_bool,
            MASK_HAS_ROWS=mask_has_rows,
            SPLITS=splits,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            NATIVE=native_float8(query.device),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **options,
        )
        if splits > 1:
            block_d = min(64, triton.next_power_of_2(value_dim))
            reduce_kernel[(batch * kv_heads * rows, triton.cdiv(value_dim, block_d))](
                target,
                partial_max,
                partial_sum,
                value_centre,
                positions,
                out,
                kv_heads,
                length,
                limit,
                GROUP=group,
                VALUE_DIM=value_dim,
                OUT_DTYPE=_DTYPES[out_dtype],
                SPLITS=splits,
                SPLITS_PADDED=triton.next_power_of_2(splits),
                BLOCK_D=block_d,
                num_warps=4,
                enable_fp_fusion=False,  # else lanes that all store the same sum may have rounded it differently
            )
    return rotate_rows(out, dtype) if value.rotated else out


def _survey(
    mask: torch.Tensor,
    strides: tuple[int, ...],
    is_bool: bool,
    kv_heads: int,
    group: int,
    length: int,
    config: Configuration,
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """What ``mask`` does in each tile of the attention kernel, int8, and the strides by which a program finds its row:
    of the batch, of the KV heads, and of tiles of rows."""
    batch, heads, _, slots = mask.shape
    row_tiles, tiles = triton.cdiv(length * group, config.block_m), triton.cdiv(slots, config.block_n)
    survey_heads = kv_heads if heads > 1 else 1
    survey = torch.empty(batch * survey_heads * row_tiles, tiles, dtype=torch.int8, device=mask.device)
    with on_device(mask):
        survey_kernel[(len(survey), tiles)](
            mask,
            *strides,
            survey,
            survey_heads,
            length,
            slots,
            GROUP=group,
            IS_BOOL=is_bool,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            num_warps=4,
        )
    return survey, (survey_heads * row_tiles if batch > 1 else 0, row_tiles if heads > 1 else 0, tiles)


def _check(
    query: torch.Tensor, key_dim: int, key_codes: torch.Tensor, value_codes: torch.Tensor, positions: torch.Tensor
) -> None:
    if query.dtype not in _DTYPES:
        raise ValueError(f"query is {query.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    batch, heads, length, dim = query.shape
    kv_heads = key_codes.shape[1]
    if batch != key_codes.shape[0] or dim != key_dim or heads % kv_heads:
        raise ValueError(
            f"query is {tuple(query.shape)}; this cache takes [{key_codes.shape[0]}, a multiple of {kv_heads}, "
            f"length, {key_dim}]"
        )
    if value_codes.shape[:3] != key_codes.shape[:3]:
        raise ValueError(
            f"key codes are {tuple(key_codes.shape)} and value codes {tuple(value_codes.shape)}; "
            "they may differ in width only"
        )
    if positions.shape[0] != length:
        raise ValueError(f"positions hold {positions.shape[0]} slots for {length} query tokens; give one for each")


def _check_mask(mask: torch.Tensor, batch: int, heads: int, length: int) -> None:
    if mask.dtype not in _MASK_DTYPES:
        raise ValueError(f"mask is {mask.dtype}; allowed: {', '.join(map(str, _MASK_DTYPES))}")
    expected = (batch, heads, length)
    if mask.dim() != 4 or any(size not in (1, full) for size, full in zip(mask.shape[:3], expected, strict=True)):
        raise ValueError(
            f"mask is {tuple(mask.shape)}; each dimension but the last must be 1 or that of {expected}, "
            "the last holds the slots"
        )
