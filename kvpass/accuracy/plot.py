"""Figures of an evaluation and of a tuning (``pip install 'kvpass[plot]'``)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kvpass.accuracy.results import Evaluation
from kvpass.accuracy.tuning import Tuning
from kvpass.pretrained import require

KINDS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise ``ValueError`` where a figure could not be written to ``path``."""
    if path.suffix not in KINDS:
        raise ValueError(f"a plot named {path}: the name must end in one of {', '.join(KINDS)}")
    require("matplotlib", "plot", "a plot")


def plot_evaluation(evaluation: Evaluation, path: Path) -> None:
    """Draw KL and perplexity by position, KL against bits, and SQNR by layer, into a ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        ValueError: Another kind of file, or matplotlib is not installed.
    """
    has_layers = bool(evaluation.formats[0].layers)
    figure, axes = _figure(path, 3 + 3 * has_layers)
    by_position, perplexity, against_bits, *of_layers = axes
    for result in evaluation.formats:
        starts = [edge for edge, _ in result.by_position]
        figures = [figures for _, figures in result.by_position]
        ticks = range(len(starts))
        by_position.plot(ticks, [x.divergence.value for x in figures], marker="o", label=result.name)
        perplexity.plot(ticks, [x.ratio.percent(above=1).value for x in figures], marker="o", label=result.name)
        for axis in (by_position, perplexity):
            axis.set_xticks(ticks, [f"{start}-" for start in starts])
        value, low, high = result.overall.divergence
        spread = None if low is None or high is None else [[max(0.0, value - low)], [max(0.0, high - value)]]
        against_bits.errorbar([result.bits], [value], yerr=spread, marker="o", capsize=3, label=result.name)
        for axis, side in zip(of_layers, ("key", "value", "output"), strict=False):
            decibels = [getattr(layer, side) for layer in result.layers]
            axis.plot([x if x is not None and math.isfinite(x) else math.nan for x in decibels], label=result.name)
    _name(by_position, "KL by position", "position in the window", "KL, nats")
    _name(perplexity, "perplexity by position", "position in the window", "against the model's own pass, %")
    _name(against_bits, "KL", "bits per value", "KL, nats")
    for axis, side in zip(of_layers, ("K", "V", "attention output"), strict=False):
        _name(axis, side, "layer", "signal to quantization noise, dB")
    figure.savefig(path)


def plot_tuning(tuning: Tuning, path: Path) -> None:
    """Draw the frontier of error against bits with what was measured, and each layer's sensitivity; as above."""
    figure, (curve, key, value) = _figure(path, 3)
    curve.plot([p.bits for p in tuning.frontier], [p.error for p in tuning.frontier], label="predicted, best choice")
    curve.plot(
        [point.bits for _, point in tuning.uniform],
        [point.error for _, point in tuning.uniform],
        "x",
        label="predicted, one format",
    )
    for result in tuning.evaluation.formats:
        divergence = result.overall.divergence.value
        curve.plot([result.bits], [divergence], "o", label=f"{result.name}, measured")
    curve.axvline(tuning.budget, linestyle=":", color="gray")
    curve.set_yscale("symlog", linthresh=1e-3)
    curve.set_ylim(bottom=0)
    _name(curve, "error against bits", "bits per value", "KL, nats")
    for axis, side, title in ((key, 0, "K"), (value, 1, "V")):
        for index, option in enumerate(tuning.sensitivity[0][side]):
            axis.plot([layer[side][index].error for layer in tuning.sensitivity], label=option.format)
        axis.set_yscale("symlog", linthresh=1e-5)
        axis.set_ylim(bottom=0)
        _name(axis, f"{title} of one layer quantized", "layer", "KL, nats")
    figure.savefig(path)


def _figure(path: Path, count: int) -> tuple[Any, list[Any]]:
    check_plot(path)
    from matplotlib.figure import Figure

    rows = -(-count // 3)
    figure = Figure(figsize=(15, 4.5 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, 3).flat)


def _name(axis: Any, title: str, x: str, y: str) -> None:
    axis.set(title=title, xlabel=x, ylabel=y)
    if x == "layer":
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize="small")
