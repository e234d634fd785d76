"""Choosing a format for each layer's K and V under a budget of bits, from the error that each choice costs alone.

The errors are taken to add up: the KL of a model with many sides quantized is the sum of the KLs with each of them
quantized alone. They come from noise that is small and independent, whose effect on the logits is additive and on the
KL quadratic, so this holds where the total is small; the choice is measured afterwards, not trusted.

With it the choice is a knapsack. Every side starts with the format of fewest bits, and its further formats are the
corners of the lower convex hull of error over bits; then the step with the most error saved per bit is taken, again and
again. After each step the choice is the best there is for exactly its bits (Lagrange); where the next step does not
fit the budget, the following ones that do are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """One format of one side (a layer's K or V): its bits per value, and the KL it costs alone."""

    format: str
    bits: float
    error: float


class Point(NamedTuple):
    """A choice for all sides: mean bits per value, and the sum of errors.

    Attributes:
        formats: By side.
    """

    bits: float
    error: float
    formats: tuple[str, ...]


def hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of error over bits, from the fewest bits to the least error."""
    corners: list[Option] = []
    for option in sorted(options, key=lambda option: (option.bits, option.error)):
        if corners and option.error >= corners[-1].error:
            continue
        while len(corners) > 1 and _saving(corners[-2], corners[-1]) <= _saving(corners[-2], option):
            corners.pop()
        corners.append(option)
    return corners


def frontier(sides: Sequence[Sequence[Option]]) -> list[Point]:
    """The choices from the fewest bits to the least error, step by step."""
    return _walk(sides, float("inf"))


def choose(sides: Sequence[Sequence[Option]], budget: float) -> Point:
    """The choice of least error with at most ``budget`` bits per value on average.

    Raises:
        ValueError: The budget is below the fewest bits possible, or above the most.
    """
    fewest, most = (sum(limit(o.bits for o in side) for side in sides) / len(sides) for limit in (min, max))
    if not fewest <= budget <= most:
        raise ValueError(
            f"a budget of {budget:g} bits per value cannot be met: the formats to choose from take {fewest:g} to "
            f"{most:g} bits"
        )
    return _walk(sides, budget)[-1]


def uniform(sides: Sequence[Sequence[Option]], names: Sequence[str]) -> Mapping[str, Point]:
    """The choices that take one format for all sides, where it is open to all of them."""
    points = {}
    for name in names:
        taken = [option for side in sides for option in side if option.format == name]
        if len(taken) == len(sides):
            points[name] = _point(taken)
    return points


def _walk(sides: Sequence[Sequence[Option]], budget: float) -> list[Point]:
    hulls = [hull(side) for side in sides]
    taken = [corners[0] for corners in hulls]
    steps = [
        (_saving(before, after), index, before, after)
        for index, corners in enumerate(hulls)
        for before, after in zip(corners, corners[1:], strict=False)
    ]
    points = [_point(taken)]
    room = budget * len(sides) + 1e-9  # sums of bits per value are not exact
    for _, index, before, after in sorted(steps, key=lambda step: (-step[0], step[1])):
        used = sum(option.bits for option in taken)
        if taken[index] == before and used + after.bits - before.bits <= room:
            taken[index] = after
            points.append(_point(taken))
    return points


def _saving(before: Option, after: Option) -> float:
    """Error saved per bit. Two options of a hull never have the same bits."""
    return (before.error - after.error) / (after.bits - before.bits)


def _point(options: Sequence[Option]) -> Point:
    bits = sum(option.bits for option in options) / len(options)
    return Point(bits, sum(option.error for option in options), tuple(option.format for option in options))
