"""``kvpass bench chart``: the recorded rows of ``kvpass bench generate`` as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpass.bench.record import Row
from kvpass.pretrained import require


def newest(path: Path, model: str) -> dict[str, dict[str, Row]]:
    """Of each case and variant, in the order of the file, the newest row with a time.

    Raises:
        ValueError: The file is not there, or has no row of ``model`` with a time.
    """
    if not path.is_file():
        raise ValueError(f"no file {path}; record rows first: kvpass bench generate --record")
    found: dict[str, dict[str, Row]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row.get("benchmark") == "generate" and row.get("model") == model and "ms" in row:
            found.setdefault(row["case"], {})[row["variant"]] = row
    if not found:
        raise ValueError(f"{path} has no row of kvpass bench generate with a time for the model {model!r}")
    return found


def draw(path: Path, model: str, out: Path) -> None:
    """Draw milliseconds of a decode step, a group of bars for each case, into ``out`` (``.svg``, ``.png`` or ``.pdf``).

    Raises:
        ValueError: As :func:`newest`, matplotlib is not installed, or a kind of file it does not write.
    """
    cases = newest(path, model)
    if out.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--out is {out}; it must end in .svg, .png or .pdf")
    require("matplotlib", "plot", "a chart")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    variants = list(dict.fromkeys(variant for rows in cases.values() for variant in rows))
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    width = 0.8 / len(variants)
    for place, variant in enumerate(variants):
        bars: list[tuple[float, float]] = [
            (index + (place - (len(variants) - 1) / 2) * width, rows[variant]["ms"])
            for index, rows in enumerate(cases.values())
            if variant in rows
        ]
        drawn = axes.bar([x for x, _ in bars], [ms for _, ms in bars], width, label=variant)
        axes.bar_label(drawn, fmt="%.1f", fontsize=7)
    first: Any = next(iter(next(iter(cases.values())).values()))
    axes.set_xticks(range(len(cases)), [f"{case.replace('x', ' x ')} tokens" for case in cases])
    axes.set_ylabel("ms per decode step")
    axes.set_title(f"{model}, {first['gpu'] or first['cpu']}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out)
    pyplot.close(figure)
