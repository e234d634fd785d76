"""Storage formats of a KV cache: frozen rows in a registry, and the buffers one layer's K or V needs.

A format says how one value is encoded (:class:`Codec`), which scales multiply it back and over how many values of
``head_dim`` a block scale reaches. Everything else (buffer shapes, bytes per token, which kernel branch runs) follows
from the row, so a new format built from existing codecs and scale rules is one :func:`register_format` call.

``scale`` always multiplies on the way back: ``value = code * block_scale * tensor_scale``.

Transforms and the scale search are part of a row too, and their names are suffixes of a base row's name:
``nvfp4+centred+rotated+sweep``. :func:`get_format` puts such a row together. What is stored is
``quantize((x - centre) @ R)``, and what is read ``dequantize(stored) @ R + centre``: ``R`` is a symmetric orthonormal
Hadamard matrix (:func:`rotation_block`), ``centre`` one vector per KV head.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

BlockScale = Literal["none", "e4m3", "e8m0"]
ScaleRule = Literal["ceil", "floor"]
Search = Literal["none", "4over6", "sweep"]


@dataclass(frozen=True)
class Codec:
    """How one value is encoded.

    Attributes:
        name: ``bf16``, ``e4m3`` (the ``fn`` variant, no infinities), ``e5m2``, ``int8`` or ``e2m1``.
        bits: Width of one code.
        max: Largest finite magnitude a code stands for.
        dtype: Storage dtype of the codes buffer. Everything but ``bf16`` is kept as raw bytes.
    """

    name: str
    bits: int
    max: float
    dtype: torch.dtype


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("bf16", 16, torch.finfo(torch.bfloat16).max, torch.bfloat16),
        Codec("e4m3", 8, 448.0, torch.uint8),
        Codec("e5m2", 8, 57344.0, torch.uint8),
        Codec("int8", 8, 127.0, torch.uint8),  # two's complement; -128 is not used
        Codec("e2m1", 4, 6.0, torch.uint8),
    )
}


WHOLE_HEAD = 512  # the most values a head has, as a block: one scale per token and head
TURN_MARGIN = 1.001  # by how much the mean square of tokens turned back is larger, at least, where they were turned

# Block scales lie in tiles of 32 slots so that a lane of a tensor-core fragment finds the scales of its tokens side by
# side (kvpass/kernels/attention.py says which those are). Inside a tile the five bits of the slot, b4 to b0, are
# reordered to b2 b0 b4 b3 b1.
SCALE_TILE = 32
SCALE_ORDER = tuple(
    (s >> 2 & 1) << 4 | (s & 1) << 3 | (s >> 4 & 1) << 2 | (s >> 3 & 1) << 1 | (s >> 1 & 1) for s in range(SCALE_TILE)
)


# Suffixes of a format's name in their order, and what they set.
SUFFIXES: dict[str, tuple[str, object]] = {
    "centred": ("centred", True),
    "rotated": ("rotated", True),
    "4over6": ("search", "4over6"),
    "sweep": ("search", "sweep"),
}


@dataclass(frozen=True)
class KVFormat:
    """One storage format of K or V.

    Attributes:
        name: What users write, and the only part of a format that crosses an operator's schema.
        codec: Key of :data:`CODECS`.
        block_scale: Encoding of the scale shared by ``block`` neighbouring values of ``head_dim``: ``none``, ``e4m3``
            (of e2m1 ``e4m3(amax / 6 / tensor_scale)``; of int8 the e4m3 number at or above ``amax / 127 /
            tensor_scale``: next to so many codes, what saturates would weigh more than a coarser step) or ``e8m0`` (a
            power of two by ``scale_rule``).
        block: Values per block scale, or :data:`WHOLE_HEAD`; 0 without block scales.
        tensor_scale: Whether one fp32 factor per KV head multiplies every value as well.
        scale_rule: Which power of two is an e8m0 block scale: ``ceil``, the one at or above ``amax / 6``, with which
            nothing saturates; or ``floor``, the one at or below ``amax / 4``, by the OCP Microscaling specification,
            which also rounds ties of values to even rather than away from zero.
        centred: Whether a vector per KV head is subtracted from every token (``KVBuffers.centre``). Softmax does not
            see that of K, and that of V is added to the output, so it costs nothing at read time.
        rotated: Whether every token is multiplied by a Hadamard matrix, which spreads an outlier over its neighbours.
        search: Which block scales are tried, the one with the smallest squared error winning: ``none``; ``4over6``
            (``amax / 6`` and ``amax / 4``); ``sweep`` (e4m3: nine neighbouring scales, from about ``amax / 7.2`` to
            ``amax / 3.6``; e8m0: the power of two by the rule, and its two neighbours). Readers need not know.
    """

    name: str
    codec: str
    block_scale: BlockScale = "none"
    block: int = 0
    tensor_scale: bool = False
    scale_rule: ScaleRule = "ceil"
    centred: bool = False
    rotated: bool = False
    search: Search = "none"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a format's name is {self.name!r}; it must be a non-empty string")
        if self.codec not in CODECS:
            raise ValueError(f"format {self.name!r}: unknown codec {self.codec!r}; known: {', '.join(CODECS)}")
        if self.block_scale not in ("none", "e4m3", "e8m0"):
            raise ValueError(f"format {self.name!r}: block_scale is {self.block_scale!r}; allowed: none, e4m3, e8m0")
        if self.scale_rule not in ("ceil", "floor") or (self.scale_rule == "floor" and self.block_scale != "e8m0"):
            raise ValueError(
                f"format {self.name!r}: scale_rule is {self.scale_rule!r}; allowed: ceil, and for e8m0 also floor"
            )
        if (self.block_scale == "none") != (self.block == 0):
            raise ValueError(
                f"format {self.name!r}: block is {self.block} with block_scale {self.block_scale!r}; "
                "a block scale needs a block of 16 or 32, no block scale needs block 0"
            )
        if self.block not in (0, 16, 32, WHOLE_HEAD):
            raise ValueError(
                f"format {self.name!r}: block is {self.block}; allowed: 16, 32, {WHOLE_HEAD} for the whole head, or 0 "
                "for none"
            )
        if (self.codec in ("e2m1", "int8")) != (self.block_scale != "none"):
            raise ValueError(
                f"format {self.name!r}: codec {self.codec!r} with block_scale {self.block_scale!r}; "
                "e2m1 and int8 need a block scale, and the other codecs take none"
            )
        if (self.codec == "int8") != (self.block == WHOLE_HEAD) or (
            self.codec == "int8" and self.block_scale != "e4m3"
        ):
            raise ValueError(
                f"format {self.name!r}: codec {self.codec!r} with {self.block_scale!r} scales of blocks of "
                f"{self.block}; int8, and nothing else, takes e4m3 scales of the whole head (block {WHOLE_HEAD})"
            )
        if self.block_scale == "e8m0" and self.tensor_scale:
            raise ValueError(f"format {self.name!r}: an e8m0 block scale covers every magnitude; drop tensor_scale")
        if self.codec == "bf16" and self.tensor_scale:
            raise ValueError(f"format {self.name!r}: bf16 is stored as is; drop tensor_scale")
        if self.codec == "bf16" and (self.centred or self.rotated):
            raise ValueError(f"format {self.name!r}: bf16 is stored as is; it takes neither +centred nor +rotated")
        if self.search not in ("none", "4over6", "sweep"):
            raise ValueError(f"format {self.name!r}: search is {self.search!r}; allowed: none, 4over6, sweep")
        if self.search != "none" and self.codec != "e2m1":
            raise ValueError(f"format {self.name!r}: +{self.search} chooses block scales of e2m1, not of {self.codec}")
        if self.search == "4over6" and self.block_scale != "e4m3":
            raise ValueError(
                f"format {self.name!r}: amax / 6 and amax / 4 are the same power of two, or neighbours; use +sweep"
            )

    @functools.cached_property
    def untransformed(self) -> KVFormat:
        """The row that stores what this one stores after centring and rotation."""
        return replace(self, name=_spell(self.name, self.search), centred=False, rotated=False)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value, block scales included (of a head of 512) and the per-head fp32 factor not."""
        return CODECS[self.codec].bits + (8 / self.block if self.block else 0)

    @property
    def learns_scale(self) -> bool:
        """Whether the first tokens give a tensor scale that nobody else gives (:func:`kvpass.reference.scale_of`):
        where it moves block scales within what e4m3 can tell apart. A wider codec has room for every usual K and V with
        1."""
        return self.tensor_scale and self.block_scale == "e4m3"

    @property
    def learnt_step(self) -> float:
        """That scale, for a magnitude of 1: ``1 / 16`` for e2m1, ``1 / 256`` for int8."""
        return 0.5 ** (int(CODECS[self.codec].max).bit_length() + 1)

    @property
    def range(self) -> float:
        """Largest magnitude that a tensor scale of 1 can hold: 448 for e4m3, 6 * 448 for NVFP4, 127 * 448 for int8."""
        return CODECS[self.codec].max * (CODECS["e4m3"].max if self.block_scale == "e4m3" else 1.0)

    @property
    def ties_to_even(self) -> bool:
        """Whether an e2m1 value halfway between two codes gets the even one; else that farther from zero."""
        return self.block_scale != "e8m0" or self.scale_rule == "floor"

    def code_width(self, head_dim: int) -> int:
        """Elements of the codes buffer per token and head: two e2m1 codes share a byte."""
        return head_dim * CODECS[self.codec].bits // (8 * CODECS[self.codec].dtype.itemsize)

    def head_dim(self, code_width: int) -> int:
        """The head_dim whose codes fill ``code_width`` elements: the inverse of :meth:`code_width`."""
        return code_width * 8 * CODECS[self.codec].dtype.itemsize // CODECS[self.codec].bits

    def scale_width(self, head_dim: int) -> int:
        """Block scales per token and head, one byte each; 0 without block scales."""
        return -(-head_dim // self.block) if self.block else 0

    def bytes_per_token(self, kv_heads: int, head_dim: int) -> int:
        """Bytes that one token of one layer's K (or V) occupies."""
        itemsize = CODECS[self.codec].dtype.itemsize
        return kv_heads * (self.code_width(head_dim) * itemsize + self.scale_width(head_dim))

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ``ValueError`` for a head_dim this format cannot hold."""
        multiple, most = max(self.block % WHOLE_HEAD, 16), 256 if self.rotated else 512
        if head_dim % multiple or not 16 <= head_dim <= most:
            raise ValueError(
                f"format {self.name!r} cannot hold head_dim {head_dim}: it must be a multiple of {multiple}, "
                f"from 16 to {most}"
            )

    def allocate(
        self,
        batch: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        device: torch.device | str,
        scale: torch.Tensor | None = None,
        centre: torch.Tensor | None = None,
        keep: int = 0,
    ) -> KVBuffers:
        """Zeroed buffers for ``max_len`` tokens of one layer's K (or V).

        Args:
            scale: Tensor scale, ``[1]`` or ``[kv_heads]`` float32, copied; None for 1. Unused without a tensor scale.
            centre: ``[kv_heads, head_dim]`` float32, copied; None for 0. Unused where the format is not centred.
            keep: Slots that are kept in bf16 too; without meaning for a bf16 format.

        Raises:
            ValueError: ``head_dim`` does not suit the format, or ``scale`` or ``centre`` the heads.
        """
        self.check_head_dim(head_dim)
        codes_shape = (batch, kv_heads, max_len, self.code_width(head_dim))
        codes = torch.zeros(codes_shape, dtype=CODECS[self.codec].dtype, device=device)
        block_scale = tensor_scale = None
        if self.block:
            scale_shape = (batch, kv_heads, -(-max_len // SCALE_TILE), self.scale_width(head_dim), SCALE_TILE)
            block_scale = torch.zeros(scale_shape, dtype=torch.uint8, device=device)
        if self.tensor_scale and scale is None:
            tensor_scale = torch.ones(kv_heads, dtype=torch.float32, device=device)
        elif self.tensor_scale and scale is not None:
            check_scale(scale, kv_heads)
            tensor_scale = scale.to(device).expand(kv_heads).clone()
        own_centre = kept = kept_slots = None
        if self.centred:
            own_centre = torch.zeros(kv_heads, head_dim, dtype=torch.float32, device=device)
        if own_centre is not None and centre is not None:
            check_centre(centre, kv_heads, head_dim)
            own_centre.copy_(centre)
        if keep and self.codec != "bf16":
            rows = min(keep, max_len)
            kept = torch.zeros(batch, kv_heads, rows, head_dim, dtype=torch.bfloat16, device=device)
            kept_slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
        return KVBuffers(codes, block_scale, tensor_scale, own_centre, kept, kept_slots)

    def allocate_like(self, tensor: torch.Tensor, max_len: int | None = None, **options: Any) -> KVBuffers:
        """Buffers for ``[batch, kv_heads, length, head_dim]`` tensors, of ``max_len`` slots rather than ``length``.
        ``options`` are further arguments of :meth:`allocate`."""
        batch, kv_heads, length, head_dim = tensor.shape
        return self.allocate(batch, kv_heads, max_len or length, head_dim, tensor.device, **options)

    def fields(self, keep: int = 0) -> list[str]:
        """Names of the :class:`KVBuffers` that :meth:`allocate` makes."""
        keeps = keep > 0 and self.codec != "bf16"
        has = (True, self.block > 0, self.tensor_scale, self.centred, keeps, keeps)
        return [name for name, exists in zip(KVBuffers._fields, has, strict=True) if exists]


class KVBuffers(NamedTuple):
    """What one layer's K (or V) is stored in.

    Attributes:
        codes: ``[batch, kv_heads, max_len, code_width]``, bf16 or uint8. ``e2m1`` packs the even index of ``head_dim``
            in the low nibble and the odd index in the high nibble.
        block_scale: ``[batch, kv_heads, ceil(max_len / 32), ceil(head_dim / block), 32]`` uint8, the bits of the e4m3
            or e8m0 scale of each run of ``block`` values, for tiles of 32 slots; slot ``s`` of a tile is at
            ``SCALE_ORDER[s]``. None without block scales.
        scale: ``[kv_heads]`` float32, multiplies every value of its head; None where the format has none.
        centre: ``[kv_heads, head_dim]`` float32, subtracted before rotation and encoding; None where the format is not
            centred.
        kept: ``[batch, kv_heads, keep, head_dim]`` bf16, some slots once more, centred and rotated but not quantized;
            what is read of these slots is this. None where nothing is kept.
        kept_slots: ``[keep]`` int32, the slot that each row of ``kept`` is of, no two alike; -1 for none.
    """

    codes: torch.Tensor
    block_scale: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    centre: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    kept_slots: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of storage behind codes, block scales and kept slots."""
        return sum(t.untyped_storage().nbytes() for t in (self.codes, self.block_scale, self.kept) if t is not None)

    def first(self, length: int) -> KVBuffers:
        """A view of the first ``length`` slots (of the tiles that hold them)."""
        block_scale = None if self.block_scale is None else self.block_scale[:, :, : -(-length // SCALE_TILE)]
        return self._replace(codes=self.codes[:, :, :length], block_scale=block_scale)

    def map_batch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KVBuffers:
        """``change`` of every buffer whose first dimension is the batch, beside the others as they are."""
        block_scale, kept = (None if t is None else change(t) for t in (self.block_scale, self.kept))
        return self._replace(codes=change(self.codes), block_scale=block_scale, kept=kept)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The buffers that exist."""
        return tuple(t for t in self if t is not None)


def check_scale(scale: torch.Tensor | None, kv_heads: int) -> None:
    """Raise ``ValueError`` for a tensor scale that is neither one number nor one per KV head."""
    if scale is not None and scale.numel() not in (1, kv_heads):
        raise ValueError(
            f"{scale.numel()} scales for a layer of {kv_heads} KV heads; give one, or one per head (on a "
            "tensor-parallel rank those of its own heads: KVScales.shard)"
        )


def check_centre(centre: torch.Tensor, kv_heads: int, head_dim: int) -> None:
    """Raise ``ValueError`` for a centre of another shape than ``[kv_heads, head_dim]``."""
    if centre.shape != (kv_heads, head_dim):
        raise ValueError(
            f"a centre of shape {list(centre.shape)} for a layer of {kv_heads} KV heads of {head_dim} values; "
            "give one vector per head (on a tensor-parallel rank those of its own heads: KVScales.shard)"
        )


def rotation_block(head_dim: int) -> int:
    """Neighbouring values that a rotation mixes: the largest power of two that divides ``head_dim``. The rotation is
    the Hadamard matrix of that size over its square root, on each block of ``head_dim``."""
    return head_dim & -head_dim


def unknown_name(what: str, name: object, known: list[str]) -> str:
    """The message for a name that is not among ``known``: it says what is, and which comes nearest."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"unknown {what} {name!r}; known: {', '.join(known)}." + (f" Did you mean {close[0]!r}?" if close else "")


_REGISTRY: dict[str, KVFormat] = {}


def register_format(fmt: KVFormat) -> KVFormat:
    """Make ``fmt`` known by its name, everywhere a format's name is taken.

    Registering an equal row again is allowed; another row under a known name raises ``ValueError``, because caches
    and compiled graphs that exist refer to it.
    """
    if not isinstance(fmt, KVFormat):
        raise TypeError(f"expected a KVFormat, got {type(fmt).__name__}")
    if "+" in fmt.name:
        raise ValueError(f"format {fmt.name!r}: what follows a '+' is derived from a base row; register that one")
    known = _REGISTRY.setdefault(fmt.name, fmt)
    if known != fmt:
        raise ValueError(f"format {fmt.name!r} is registered already, as {known}")
    return fmt


def get_format(name: str) -> KVFormat:
    """The row registered under ``name``, or derived from a registered one by suffixes in any order.

    ``+centred``, ``+rotated`` and one of ``+4over6`` and ``+sweep``; the row's name has them in this order.

    Raises:
        ValueError: A name or suffix that is not known, or a suffix that means nothing for that format.
    """
    if not isinstance(name, str):
        raise ValueError(unknown_name("KV format", name, list(_REGISTRY)))
    return _find(name)


@functools.lru_cache
def _find(name: str) -> KVFormat:
    if name.split("+")[0] not in _REGISTRY:
        raise ValueError(unknown_name("KV format", name, list(_REGISTRY)))
    row, *suffixes = name.split("+")
    return _derive(_REGISTRY[row], tuple(suffixes)) if suffixes else _REGISTRY[row]


def _derive(base: KVFormat, suffixes: tuple[str, ...]) -> KVFormat:
    changes: dict[str, Any] = {}
    for suffix in suffixes:
        if suffix not in SUFFIXES:
            raise ValueError(unknown_name(f"suffix of format {base.name!r},", suffix, list(SUFFIXES)))
        field, value = SUFFIXES[suffix]
        if field in changes or getattr(base, field) == value:
            raise ValueError(f"format {'+'.join((base.name, *suffixes))!r}: +{suffix} comes on top of another {field}")
        changes[field] = value
    ordered = [suffix for suffix in SUFFIXES if suffix in suffixes]
    return replace(base, name=_spell(base.name, *ordered), **changes)


def _spell(name: str, *suffixes: str) -> str:
    return "+".join((name.split("+")[0], *(suffix for suffix in suffixes if suffix != "none")))


def format_names() -> tuple[str, ...]:
    """Names of all registered formats, in the order of registration; each may be followed by :data:`SUFFIXES`."""
    return tuple(_REGISTRY)


register_format(KVFormat("bf16", "bf16"))
register_format(KVFormat("fp8_e4m3", "e4m3", tensor_scale=True))
register_format(KVFormat("fp8_e5m2", "e5m2", tensor_scale=True))
register_format(KVFormat("nvfp4", "e2m1", block_scale="e4m3", block=16, tensor_scale=True))
register_format(KVFormat("fp4_mx_block16", "e2m1", block_scale="e8m0", block=16))
register_format(KVFormat("mxfp4", "e2m1", block_scale="e8m0", block=32, scale_rule="floor"))
register_format(KVFormat("int8", "int8", block_scale="e4m3", block=WHOLE_HEAD, tensor_scale=True))
