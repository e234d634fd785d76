"""Parameters of tests: products of which every member would check the same again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def in_turns(*axes: Sequence, turns: Sequence) -> list[tuple]:
    """The product of ``axes``, and last in each member one of ``turns``, which follow each other along every axis.

    For an axis that changes something else than the others do: all of its values are met, and met by all formats or
    shapes, at the price of one.
    """
    members = itertools.product(*map(enumerate, axes))
    return [(*(value for _, value in m), turns[sum(index for index, _ in m) % len(turns)]) for m in members]
