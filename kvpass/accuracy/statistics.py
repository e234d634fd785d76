"""Per-token figures of one prediction against another, their sums by window and position, and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BUCKETS = (0, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
COVERAGE = 0.95
_BLOCK = 256  # tokens whose distributions over the vocabulary are held in fp32 at once


class Estimate(NamedTuple):
    """A figure and its 95% interval, from resampling windows with replacement; no interval from a single window."""

    value: float
    low: float | None = None
    high: float | None = None

    def percent(self, above: float = 0.0) -> Estimate:
        """In percent, as far as it is above ``above``."""
        low, high = (None if x is None else 100 * (x - above) for x in self[1:])
        return Estimate(100 * (self.value - above), low, high)


class Figures(NamedTuple):
    """What is told of the tokens scored, all of them or those of a range of positions.

    Attributes:
        tokens: How many.
        full_perplexity, perplexity: Of the model's own pass, and with the quantized cache.
        ratio: ``perplexity / full_perplexity``.
        divergence: KL(full || quantized) of the distributions of the next token, mean, in nats.
        agreement: Share of tokens for which both find the same token the most likely.
    """

    tokens: int
    full_perplexity: Estimate
    perplexity: Estimate
    ratio: Estimate
    divergence: Estimate
    agreement: Estimate


# Columns of the sums, and each figure from them (the last dimension holds the columns).
_TOKENS, _FULL_LOSS, _LOSS, _DIVERGENCE, _AGREEMENT = range(5)
_FIGURES: dict[str, Callable[[Tensor], Tensor]] = {
    "full_perplexity": lambda sums: (sums[..., _FULL_LOSS] / sums[..., _TOKENS]).exp(),
    "perplexity": lambda sums: (sums[..., _LOSS] / sums[..., _TOKENS]).exp(),
    "ratio": lambda sums: ((sums[..., _LOSS] - sums[..., _FULL_LOSS]) / sums[..., _TOKENS]).exp(),
    "divergence": lambda sums: sums[..., _DIVERGENCE] / sums[..., _TOKENS],
    "agreement": lambda sums: sums[..., _AGREEMENT] / sums[..., _TOKENS],
}


def compare(full: Tensor, quantized: Tensor, targets: Tensor) -> Tensor:
    """Figures of each token.

    Args:
        full, quantized: Logits, ``[batch, length, vocabulary]``.
        targets: The tokens that follow, ``[batch, length]`` int64.

    Returns:
        ``[batch, length, 4]`` float32: loss of ``full``, loss of ``quantized`` (both in nats), KL(full || quantized),
        and 1 where both have the same most likely token.
    """
    blocks = [x.split(_BLOCK, dim=1) for x in (full, quantized, targets)]
    return torch.cat([_compare(*block) for block in zip(*blocks, strict=True)], 1)


def _compare(full: Tensor, quantized: Tensor, targets: Tensor) -> Tensor:
    same = full.argmax(-1) == quantized.argmax(-1)
    full, quantized = full.float().log_softmax(-1), quantized.float().log_softmax(-1)
    losses = [-x.gather(-1, targets.unsqueeze(-1)).squeeze(-1) for x in (full, quantized)]
    # 0 * log(0) is 0: a token that is impossible in the full pass takes no part.
    divergence = torch.where(full == -torch.inf, 0.0, full.exp() * (full - quantized)).sum(-1)
    return torch.stack([*losses, divergence, same.float()], -1)


class Tally:
    """Sums of :func:`compare` by window and range of positions.

    Args:
        edges: Where ranges of positions begin, ascending from 0; the last has no end.

    Attributes:
        sums: ``[windows, ranges, 5]`` float64: tokens scored, and the columns of :func:`compare`.
    """

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = tuple(edges)
        self.sums = torch.zeros(0, len(self.edges), 5, dtype=torch.float64)

    @property
    def tokens(self) -> int:
        """Tokens scored so far."""
        return int(self.sums[..., _TOKENS].sum())

    def start(self, windows: int) -> None:
        """Go on to the next ``windows``, a batch of them."""
        self.sums = torch.cat([self.sums, self.sums.new_zeros(windows, *self.sums.shape[1:])])

    def add(self, figures: Tensor, first: int) -> None:
        """Count ``figures`` (``[batch, length, 4]``) of the present windows, for positions from ``first`` on."""
        positions = torch.arange(first, first + figures.shape[1])
        ranges = torch.bucketize(positions, torch.tensor(self.edges), right=True) - 1
        figures = torch.cat([torch.ones_like(figures[..., :1]), figures], -1).double().cpu()
        self.sums[-figures.shape[0] :].index_add_(1, ranges, figures)

    def figures(self, resamples: int, seed: int) -> tuple[Figures, list[tuple[int, Figures]]]:
        """Of all tokens, and of each range of positions that has any, by where it begins.

        The windows of each resample depend on ``seed`` and the number of windows alone, so intervals of several
        formats over the same windows are paired.
        """
        windows = len(self.sums)
        draws = torch.randint(windows, (resamples, windows), generator=torch.Generator().manual_seed(seed))
        times = torch.zeros(resamples, windows, dtype=torch.float64).scatter_add_(
            1, draws, torch.ones(draws.shape).double()
        )
        by_range = torch.einsum("rw,wbc->rbc", times, self.sums)
        whole = _figures(self.sums.sum((0, 1)), by_range.sum(1), windows)
        ranges = [
            (edge, _figures(sums, by_range[:, index], windows))
            for index, (edge, sums) in enumerate(zip(self.edges, self.sums.sum(0), strict=True))
            if sums[_TOKENS]
        ]
        return whole, ranges


def _figures(sums: Tensor, resampled: Tensor, windows: int) -> Figures:
    """From sums over all windows (``[5]``), and over those of each resample (``[resamples, 5]``)."""
    estimates = {}
    tails = torch.tensor([(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], dtype=torch.float64)
    for name, figure in _FIGURES.items():
        # A resample may hold no token of a range that short windows do not reach.
        interval = torch.nanquantile(figure(resampled), tails).tolist() if windows > 1 else (None, None)
        estimates[name] = Estimate(float(figure(sums)), *interval)
    return Figures(int(sums[_TOKENS]), **estimates)
