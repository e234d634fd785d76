"""A retrieval task: a passkey hidden in a text, at several depths and lengths, asked for at its end.

The answer is generated greedily by ``model.generate`` with kvpass enabled, so all of the prompt that a new token reads
is quantized, through the compiled decode step; it counts where it is exactly the passkey.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvpass.config import KVQuantConfig
from kvpass.hf import disable, enable, report
from kvpass.windows import Data, token_windows

TASK = "There is important information hidden in the following text. Find it and memorize it.\n\n"
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
Generate = Callable[[Tensor, int], Tensor]


class RetrievalScore(NamedTuple):
    """Passkeys found, of those asked for, in prompts of ``tokens`` with the passkey at ``depth`` (0 begins, 1 ends)."""

    tokens: int
    depth: float
    found: int
    asked: int


@dataclass(frozen=True)
class Retrieval:
    """The task.

    Attributes:
        lengths: Tokens of the whole prompt.
        depths: Where the passkey is put: 0 at the beginning of the text, 1 at its end.
        trials: Passkeys for each length and depth, each in another part of the text.
        digits: Of a passkey.
        seed: Of the passkeys.

    Raises:
        ValueError: A length, depth or number that cannot be.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048)
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    trials: int = 2
    digits: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth is {depth}; it must be from 0, the beginning of the text, to 1, its end")
        if self.trials < 1 or not 1 <= self.digits <= 18 or not self.lengths or not self.depths:
            raise ValueError(f"{self} asks for nothing; it takes lengths, depths, trials from 1, and 1 to 18 digits")

    def prompts(self, data: Data, tokenizer: Any) -> Iterator[tuple[int, Tensor, list[str]]]:
        """For each length, the longest first: its prompts, ``[depths * trials, length]`` int64, and the passkeys.

        Raises:
            ValueError: A length without room for the question, or a text too short for the longest prompt.
        """
        generator = torch.Generator().manual_seed(self.seed)
        for length in sorted(set(self.lengths), reverse=True):
            texts = _texts(data, tokenizer, length, self.trials)
            prompts, keys = [], []
            for depth in self.depths:
                for text in texts:
                    drawn = torch.randint(10, (self.digits,), generator=generator).tolist()
                    keys.append("".join(map(str, drawn)))
                    prompts.append(_prompt(text, tokenizer, length, depth, keys[-1]))
            yield length, torch.stack(prompts), keys

    def scores(
        self, generate: Generate, data: Data, tokenizer: Any, batch_size: int = 1, device: torch.device | None = None
    ) -> tuple[RetrievalScore, ...]:
        """Ask for every passkey.

        Args:
            generate: Takes prompts (``[rows, length]`` int64) and how many tokens to generate, and returns those, or
                the prompts with them.
            data, tokenizer: As :func:`kvpass.evaluate` takes them.
            batch_size: Prompts answered at once.
            device: Where ``generate`` wants the prompts.
        """
        scores = []
        for length, prompts, keys in self.prompts(data, tokenizer):
            room = max(len(_encode(tokenizer, f" {key}.")) for key in keys)
            answers = torch.cat([generate(part.to(device), room)[:, -room:] for part in prompts.split(batch_size)])
            for index, depth in enumerate(self.depths):
                rows = range(index * self.trials, (index + 1) * self.trials)
                found = sum(_is_answer(tokenizer.decode(answers[row].tolist()), keys[row]) for row in rows)
                scores.append(RetrievalScore(length, depth, found, self.trials))
        return tuple(sorted(scores))


def model_scores(
    model: nn.Module, config: KVQuantConfig | None, task: Retrieval, data: Data, tokenizer: Any, batch_size: int
) -> tuple[RetrievalScore, ...]:
    """Scores of ``model`` with its cache as ``config`` says, or with its own where that is None."""
    causal_lm: Any = model

    def generate(prompts: Tensor, tokens: int) -> Tensor:
        settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "num_beams": 1}
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        mask = torch.ones_like(prompts)
        out: Tensor = causal_lm.generate(prompts, attention_mask=mask, pad_token_id=pad or 0, **settings)
        return out

    with enabled(model, config):
        return task.scores(generate, data, tokenizer, batch_size, causal_lm.device)


@contextmanager
def enabled(model: nn.Module, config: KVQuantConfig | None) -> Iterator[None]:
    """``model`` with kvpass enabled as ``config`` says (None: disabled), and afterwards as it was."""
    before = report(model).config
    disable(model)
    try:
        if config is not None:
            enable(model, config)
        yield
    finally:
        disable(model)
        if before is not None:
            enable(model, before)


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _texts(data: Data, tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """The first ``count`` stretches of ``length`` tokens."""
    texts = [ids[0].tolist() for ids in itertools.islice(token_windows(data, tokenizer, length), count)]
    if len(texts) < count or len(texts[-1]) < length:
        raise ValueError(
            f"the text is too short for {count} prompts of {length} tokens each; give a longer one, fewer trials, or "
            "shorter lengths"
        )
    return texts


def _prompt(text: Sequence[int], tokenizer: Any, length: int, depth: float, key: str) -> Tensor:
    start = tokenizer("")["input_ids"]
    task, needle, question = (_encode(tokenizer, part) for part in (TASK, NEEDLE.format(key=key), QUESTION))
    room = length - sum(map(len, (start, task, needle, question)))
    if room < 0:
        raise ValueError(f"a prompt of {length} tokens has no room for the question, which needs {length - room}")
    text = text[len(start) : len(start) + room]
    place = round(depth * room)
    return torch.tensor([*start, *task, *text[:place], *needle, *text[place:], *question])


def _is_answer(text: str, key: str) -> bool:
    found = re.search(r"\d+", text)
    return found is not None and found.group() == key
