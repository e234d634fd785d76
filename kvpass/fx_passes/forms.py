"""What an attention in a Dynamo graph computes, in whichever form it is written.

:mod:`kvpass.fx_passes.sdpa`, :mod:`kvpass.fx_passes.eager` and :mod:`kvpass.fx_passes.flex` each recognize one form;
:mod:`kvpass.fx_passes.match` decides what can be fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx


@dataclass(frozen=True)
class Added:
    """Something added to the scaled scores before the softmax, or, if boolean, what they are masked by.

    Attributes:
        node: Broadcasts to ``[batch, heads, length, slots]``.
        factor: Multiplies it; 1 if it is boolean.
    """

    node: fx.Node
    factor: float = 1.0


@dataclass(frozen=True)
class Attention:
    """``softmax(cap(scale * query @ key.mT) + added) @ value``, where a sink may join the softmax's denominator.

    Attributes:
        node: The node that computes the result, which a fused attention replaces.
        query, key, value: ``[batch, heads, length or slots, head_dim]``.
        scale: Multiplies the scores.
        added: Masks and biases.
        softcap: 0 for none, else scaled scores ``s`` become ``softcap * tanh(s / softcap)``.
        sinks: None, or ``[heads]``: a logit for each head.
        inner: Nodes between the inputs and ``node``, users before what they use.
        obstacle: What of it the fused attention has no equal for, in words for a user; None where it has all.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    scale: float
    added: tuple[Added, ...] = ()
    softcap: float = 0.0
    sinks: fx.Node | None = None
    inner: tuple[fx.Node, ...] = ()
    obstacle: str | None = None


@dataclass(frozen=True)
class Unrecognized:
    """A softmax that takes part in something other than an attention that can be fused.

    Attributes:
        node: The softmax.
        reason: What is in the way, in words for a user.
        key, value: What it would take for K and V, as far as they are found.
        inner: Nodes around it that were recognized.
    """

    node: fx.Node
    reason: str
    key: fx.Node | None
    value: fx.Node | None
    inner: tuple[fx.Node, ...]


def example(node: fx.Node) -> torch.Tensor:
    """The fake tensor Dynamo recorded for ``node``."""
    value: torch.Tensor = node.meta["example_value"]
    return value


def number(x: object) -> float | None:
    """``x`` as a number; None if it is a tensor. Numbers are symbolic under ``dynamic=True``."""
    if isinstance(x, fx.Node):
        x = x.meta.get("example_value")
    return None if x is None or isinstance(x, (torch.Tensor, tuple, list)) else float(x)  # type: ignore[arg-type]


def name_of(node: fx.Node) -> str:
    """What ``node`` calls, in words."""
    return str(getattr(node.target, "__name__", node.target))
