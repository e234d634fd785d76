"""What an evaluation found: as an object, as tables, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvpass.accuracy.retrieval import RetrievalScore
from kvpass.accuracy.statistics import Estimate, Figures
from kvpass.accuracy.storage import BITS_AT
from kvpass.bench.record import table
from kvpass.config import KVQuantConfig
from kvpass.scale_files import write_whole


class LayerError(NamedTuple):
    """Signal over quantization noise of one layer, in dB, where it alone is quantized: ``10 log10(sum(x**2) /
    sum((quantized x - x)**2))``. Infinite where nothing is lost; ``output`` (of the attention, behind its output
    projection) is None in a model whose attention modules are not found."""

    key: float
    value: float
    output: float | None


@dataclass(frozen=True)
class FormatResult:
    """One format (or configuration).

    Attributes:
        name: What it was called.
        config: The configuration.
        bits: Bits per value that a cache of :data:`kvpass.accuracy.storage.BITS_AT` tokens occupies.
        overall: Figures of all tokens scored.
        by_position: The same by where a range of positions begins; each ends where the next begins.
        layers: For each layer; empty where they were not measured.
        retrieval: Empty where it was not asked for.
    """

    name: str
    config: KVQuantConfig
    bits: float
    overall: Figures
    by_position: tuple[tuple[int, Figures], ...]
    layers: tuple[LayerError, ...] = ()
    retrieval: tuple[RetrievalScore, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """What :func:`kvpass.evaluate` found; print it for tables.

    Attributes:
        formats: One result for each format, in the order asked for.
        windows: How many.
        settings: What it was measured with: window, chunk, decode and the like.
        full_retrieval: Of the model with its own cache; empty where retrieval was not asked for.
    """

    formats: tuple[FormatResult, ...]
    windows: int
    settings: tuple[tuple[str, Any], ...]
    full_retrieval: tuple[RetrievalScore, ...] = ()

    def __getitem__(self, name: str) -> FormatResult:
        """The result of the format called ``name``."""
        return {result.name: result for result in self.formats}[name]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data for JSON; what is infinite (a lossless layer's ratio) is None."""
        formats = [
            {
                "name": result.name,
                "config": result.config.to_dict(),
                "bits": result.bits,
                **result.overall._asdict(),
                "by_position": [{"from": edge, **figures._asdict()} for edge, figures in result.by_position],
                "sqnr_db": result.layers,
                "retrieval": result.retrieval,
            }
            for result in self.formats
        ]
        values = {"settings": dict(self.settings), "windows": self.windows, "full_retrieval": self.full_retrieval}
        found: dict[str, Any] = plain({**values, "formats": formats})
        return found

    def to_json(self, path: str | Path) -> None:
        """Write :meth:`to_dict`."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    def __str__(self) -> str:
        overall = self.formats[0].overall
        parts = [
            f"{overall.tokens:,} tokens scored in {self.windows} windows; perplexity of the model's own pass "
            f"{_number(overall.full_perplexity)}\n(95% intervals: bootstrap over windows, the same for all formats)\n",
            self._overall(),
        ]
        settings = dict(self.settings)
        keeping = [result.name for result in self.formats if result.config.keep_last]
        if keeping and settings["decode"] < settings["window"] - 1 and settings["chunk"] > 1:
            parts.append(
                f"\nThe newest tokens, which {', '.join(keeping)} keep in bf16 (keep_last), are those before each "
                f"token only where tokens run singly, here the last {settings['decode']} of each window: "
                f"decode={settings['window'] - 1} measures what generate does"
            )
        if len(self.formats[0].by_position) > 1:
            parts += ["\nby position: perplexity against the model's own pass, and KL\n", self._by_position()]
        if self.formats[0].layers:
            parts += ["\nsignal to quantization noise, dB: mean over layers (lowest, in which layer)\n", self._layers()]
        if self.full_retrieval:
            parts += ["\npasskeys found, by tokens of the prompt and depth\n", self._retrieval()]
        return "\n".join(parts)

    def _overall(self) -> str:
        header = ("format", f"bits at {BITS_AT}", "perplexity", "against full", "KL", "same top token")
        rows = []
        for result in self.formats:
            figures = result.overall
            row = [result.name, f"{result.bits:.2f}", f"{figures.perplexity.value:.4f}"]
            row += [_number(figures.ratio.percent(above=1), "+.2f", "%"), _number(figures.divergence)]
            rows.append([*row, _number(figures.agreement.percent(), ".2f", "%")])
        return table(header, rows)

    def _by_position(self) -> str:
        edges = [edge for edge, _ in self.formats[0].by_position]
        ends = [*edges[1:], dict(self.settings)["window"]]
        header = ("format", *(f"{edge}-{end - 1}" for edge, end in zip(edges, ends, strict=True)))
        rows = [("tokens", *(f"{figures.tokens:,}" for _, figures in self.formats[0].by_position))]
        for result in self.formats:
            cells = [
                f"{figures.ratio.percent(above=1).value:+.2f}% {figures.divergence.value:.4f}"
                for _, figures in result.by_position
            ]
            rows.append((result.name, *cells))
        return table(header, rows)

    def _layers(self) -> str:
        rows = []
        for result in self.formats:
            columns = zip(*result.layers, strict=True)
            rows.append((result.name, *(_decibels(column) for column in columns)))
        return table(("format", "K", "V", "attention output"), rows)

    def _retrieval(self) -> str:
        header = ("format", *(f"{score.tokens} at {score.depth:g}" for score in self.full_retrieval), "all")
        named = [("full", self.full_retrieval), *((result.name, result.retrieval) for result in self.formats)]
        rows = []
        for name, scores in named:
            found, asked = sum(s.found for s in scores), sum(s.asked for s in scores)
            rows.append((name, *(f"{s.found}/{s.asked}" for s in scores), f"{found / asked:.0%}"))
        return table(header, rows)


def plain(value: Any) -> Any:
    """``value`` as JSON has it: named tuples by name, and None for what is not finite."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(estimate: Estimate, spec: str = ".4f", unit: str = "") -> str:
    value, low, high = estimate
    interval = "" if low is None else f" [{low:{spec}}, {high:{spec}}]"
    return f"{value:{spec}}{unit}{interval}"


def _decibels(values: Sequence[float | None]) -> str:
    finite = [(x, index) for index, x in enumerate(values) if x is not None and math.isfinite(x)]
    if not finite:
        return "exact" if values[0] is not None else "not measured"
    lowest, index = min(finite)
    return f"{sum(x for x, _ in finite) / len(finite):.1f} ({lowest:.1f}, {index})"
