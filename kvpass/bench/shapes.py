"""Shapes, formats and masks of the kernel benchmarks, and how they are written on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, TypeVar

import torch

from kvpass.formats import KVFormat, get_format

MASKS = ("none", "bool", "ragged")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RAGGED_STEP = 16  # left padding comes in steps of a page of the paged peers


def _check_positive(shape: Any, optional: tuple[str, ...] = ()) -> None:
    for name, value in asdict(shape).items():
        if value < (0 if name in optional else 1):
            raise ValueError(f"shape: {name} is {value}; it must be a positive whole number")


@dataclass(frozen=True)
class AttentionShape:
    """One decode step of one layer.

    Attributes:
        batch: Sequences.
        kv_heads: KV heads.
        group: Query heads of one KV head.
        head_dim: Width of a head, the same for K and V.
        tokens: Tokens in the cache, those of the query included.
        query: Query tokens; more than one attend causally.
        slots: Tokens the cache has room for; 0 means ``tokens``.
    """

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    tokens: int
    query: int = 1
    slots: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, optional=("slots",))
        if self.query > self.tokens:
            raise ValueError(f"query={self.query} is more than tokens={self.tokens}, which include it")
        if self.slots and self.slots < self.tokens:
            raise ValueError(f"slots={self.slots} cannot hold tokens={self.tokens}; leave slots out or make it larger")

    @property
    def max_len(self) -> int:
        """Slots that the cache is allocated with."""
        return self.slots or self.tokens

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    def padding(self, mask: str) -> list[int]:
        """Hidden slots at the start of each row: 0, or for ``ragged`` from 3/4 of the tokens down to none."""
        if mask != "ragged":
            return [0] * self.batch
        most = [(self.tokens * 3 * (self.batch - 1 - row)) // (4 * self.batch) for row in range(self.batch)]
        return [min(pad, self.tokens - self.query) // RAGGED_STEP * RAGGED_STEP for pad in most]

    def __str__(self) -> str:
        text = f"batch {self.batch}, {self.kv_heads} KV heads x {self.group}, head_dim {self.head_dim}"
        text += f", {self.tokens} tokens" + (f" of {self.slots} slots" if self.slots else "")
        return text + (f", {self.query} query tokens" if self.query > 1 else "")


@dataclass(frozen=True)
class StoreShape:
    """One call of the store: ``tokens`` new tokens for each of ``batch`` sequences."""

    batch: int
    tokens: int = 1
    kv_heads: int = 8
    head_dim: int = 128

    def __post_init__(self) -> None:
        _check_positive(self)

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.tokens} tokens, {self.kv_heads} KV heads, head_dim {self.head_dim}"


ATTENTION_SHAPES: dict[str, AttentionShape] = {
    "A": AttentionShape(batch=32, kv_heads=8, group=4, head_dim=128, tokens=8192),
    "B": AttentionShape(batch=1, kv_heads=8, group=4, head_dim=128, tokens=131072),
    "long": AttentionShape(batch=1, kv_heads=8, group=4, head_dim=128, tokens=262144),
    "decode-1k": AttentionShape(batch=1, kv_heads=8, group=4, head_dim=128, tokens=1024),
    "decode-2k": AttentionShape(batch=1, kv_heads=8, group=4, head_dim=128, tokens=2048),
    "decode-4k": AttentionShape(batch=1, kv_heads=8, group=4, head_dim=128, tokens=4096),
    # A window of 1,024 in a cache of any length, with --mask bool: a full ring of the window and its spare slots.
    "window-1k": AttentionShape(batch=1, kv_heads=8, group=4, head_dim=128, tokens=1024 + 32),
    "partial": AttentionShape(batch=32, kv_heads=8, group=4, head_dim=128, tokens=1024, slots=8192),
    "query-4": AttentionShape(batch=32, kv_heads=8, group=4, head_dim=128, tokens=8192, query=4),
    "g1": AttentionShape(batch=32, kv_heads=32, group=1, head_dim=128, tokens=2048),
    "g8": AttentionShape(batch=32, kv_heads=8, group=8, head_dim=128, tokens=8192),
    "g16": AttentionShape(batch=32, kv_heads=4, group=16, head_dim=128, tokens=8192),
    "batch-64": AttentionShape(batch=64, kv_heads=8, group=4, head_dim=128, tokens=8192),
    "batch-128": AttentionShape(batch=128, kv_heads=8, group=4, head_dim=128, tokens=4096),
    "batch-256": AttentionShape(batch=256, kv_heads=8, group=4, head_dim=128, tokens=2048),
    "batch-8-long": AttentionShape(batch=8, kv_heads=8, group=4, head_dim=128, tokens=65536),
    "d64-g3": AttentionShape(batch=32, kv_heads=3, group=3, head_dim=64, tokens=16384),
    "d64-g4": AttentionShape(batch=32, kv_heads=8, group=4, head_dim=64, tokens=16384),
    "d96-g1": AttentionShape(batch=8, kv_heads=32, group=1, head_dim=96, tokens=8192),
    "d256-g2": AttentionShape(batch=32, kv_heads=4, group=2, head_dim=256, tokens=8192),
    "tiny": AttentionShape(batch=2, kv_heads=2, group=2, head_dim=64, tokens=80),
}
STORE_SHAPES: dict[str, StoreShape] = {
    "token-1": StoreShape(batch=1),
    "token-8": StoreShape(batch=8),
    "token-32": StoreShape(batch=32),
    "token-64": StoreShape(batch=64),
    "prefill": StoreShape(batch=8, tokens=4096),
    "tiny": StoreShape(batch=2, tokens=3, kv_heads=2, head_dim=32),
}

Shape = TypeVar("Shape", AttentionShape, StoreShape)


def parse_attention_shape(text: str) -> tuple[str, AttentionShape]:
    """Label and shape for a name of :data:`ATTENTION_SHAPES`, or ``batch=..,kv_heads=..,...``."""
    return _parse(text, ATTENTION_SHAPES, AttentionShape)


def parse_store_shape(text: str) -> tuple[str, StoreShape]:
    """Label and shape for a name of :data:`STORE_SHAPES`, or ``batch=..,tokens=..,...``."""
    return _parse(text, STORE_SHAPES, StoreShape)


def parse_formats(text: str) -> tuple[KVFormat, KVFormat]:
    """Formats of K and V: one name for both, or ``key/value``."""
    names = text.split("/")
    if len(names) > 2:
        raise ValueError(f"formats {text!r}: write one name, or that of K and that of V with a slash between them")
    return get_format(names[0]), get_format(names[-1])


def choose(what: str, value: str, allowed: Mapping[str, object] | tuple[str, ...]) -> str:
    """``value`` itself; ``ValueError`` with what is allowed when it is not among them."""
    if value not in allowed:
        close = difflib.get_close_matches(value, list(allowed), n=1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {what} {value!r}; known: {', '.join(allowed)}{hint}")
    return value


def _parse(text: str, named: Mapping[str, Shape], kind: type[Shape]) -> tuple[str, Shape]:
    if "=" not in text:
        return text, named[choose("shape", text, named)]
    known = [field.name for field in fields(kind)]
    values: dict[str, int] = {}
    for item in text.split(","):
        key, _, number = item.partition("=")
        if key not in known:
            raise ValueError(f"shape {text!r}: unknown key {key!r}; allowed: {', '.join(known)}")
        if key in values:
            raise ValueError(f"shape {text!r}: {key} is given twice")
        if not number.isdecimal():
            raise ValueError(f"shape {text!r}: {key} is {number!r}; it must be a positive whole number")
        values[key] = int(number)
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in values]
    if missing:
        raise ValueError(f"shape {text!r}: {', '.join(missing)} missing; keys are {', '.join(known)}")
    return "custom", kind(**values)
