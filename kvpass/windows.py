"""Windows of tokens from sample text, read piece by piece, and a cache layer through which one window runs."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

Data = str | Path | Iterable[str] | Iterable[Tensor]
_CHUNK = 1 << 16  # characters tokenized at once


def _texts(data: Any) -> Iterator[str]:
    """The pieces of a text, a file or an iterable of texts."""
    if isinstance(data, Path):
        with data.open(encoding="utf-8") as file:
            while piece := file.read(_CHUNK):
                yield piece
    elif isinstance(data, str):
        yield from (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))
    else:
        yield from data


def token_windows(data: Any, tokenizer: Any, window: int) -> Iterator[Tensor]:
    """Windows of at most ``window`` tokens, ``[1, length]`` int64. Texts are joined; tensors are only cut."""
    if not isinstance(data, (str, Path)):
        pieces = iter(data)
        first = next(pieces, None)
        data = () if first is None else itertools.chain([first], pieces)
        if isinstance(first, Tensor):
            for ids in filter(torch.Tensor.numel, data):
                for row in ids.cpu().reshape(-1, ids.shape[-1]).split(1):
                    yield from row.split(window, dim=1)
            return
    if tokenizer is None:
        raise ValueError("text needs the model's tokenizer: tokenizer=...")
    start: list[int] = tokenizer("")["input_ids"]  # what this tokenizer puts before every text
    if window <= len(start):
        raise ValueError(f"window is {window}, and this tokenizer puts {len(start)} tokens before every text")
    tokens = list(start)
    for text in _texts(data):
        tokens += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        while len(tokens) >= window:
            yield torch.tensor([tokens[:window]])
            tokens = start + tokens[window:]
    if len(tokens) > len(start):
        yield torch.tensor([tokens])


def token_batches(
    data: Any, tokenizer: Any, window: int, batch_size: int, max_tokens: int | None, skip_tokens: int = 0
) -> Iterator[Tensor]:
    """Windows of one length put together, up to ``max_tokens``, without those that begin in the first
    ``skip_tokens``."""
    waiting: list[Tensor] = []
    left = max_tokens if max_tokens is not None else sys.maxsize
    for ids in token_windows(data, tokenizer, window):
        if skip_tokens > 0:
            skip_tokens -= ids.numel()
            continue
        ids = ids[:, :left]
        left -= ids.numel()
        if waiting and (ids.shape[1] != waiting[0].shape[1] or len(waiting) == batch_size):
            yield torch.cat(waiting)
            waiting = []
        if not ids.numel():
            break
        waiting.append(ids)
    if waiting:
        yield torch.cat(waiting)


class WindowLayer(DynamicLayer):
    """A cache layer that stores nothing: a window attends to what ``read`` makes of its own K and V.

    Args:
        read: Takes and returns K and V, ``[batch, kv_heads, length, head_dim]``.
    """

    def __init__(self, read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read = read

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.read(key_states, value_states)


def cache_argument(model: nn.Module) -> str:
    """The argument in which ``model.forward`` takes its cache: transformers renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
