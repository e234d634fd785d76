"""``kvpass bench chart``: the recorded rows of ``kvpass bench generate`` as a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

from kvpass.bench.generate import BASELINES
from kvpass.bench.record import Row
from kvpass.pretrained import require


def newest(path: Path, model: str) -> dict[str, list[Row]]:
    """Of each case, from few tokens to many, the rows with a time of one run, peers first: of the newest run that
    measured the static cache, or without such a one another peer, or none. All are of one GPU, as the newest row's, and
    of its dtype.

    Raises:
        ValueError: The file is not there, or has no such row of ``model``.
    """
    if not path.is_file():
        raise ValueError(f"no file {path}; record rows first: kvpass bench generate --record")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if row.get("benchmark") == "generate" and row.get("model") == model and "ms" in row]
    rows = [row for row in rows if row.get("tp") in (None, 1) and row.get("device_map") is None]
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if all(row.get(name) == rows[-1].get(name) for name in ("gpu", "dtype")):
            found.setdefault(row["case"], {}).setdefault(row["date"], []).append(row)
    if not found:
        raise ValueError(f"{path} has no row of kvpass bench generate with a time for {model!r} on one GPU")
    chosen = {case: max(runs.items(), key=lambda run: (*_peers(run[1]), run[0]))[1] for case, runs in found.items()}
    ordered = sorted(chosen, key=lambda case: (math.prod(map(int, case.split("x"))), case))
    return {case: sorted(chosen[case], key=lambda row: row["kind"] != "peer") for case in ordered}


def _peers(rows: list[Row]) -> tuple[bool, bool]:
    """Whether the static cache is among ``rows``, and whether any peer is."""
    peers = [row["variant"] for row in rows if row["kind"] == "peer"]
    return BASELINES["static"][0] in peers, bool(peers)


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
    matplotlib.rcParams["svg.hashsalt"] = "kvpass"  # the same rows, the same file
    from matplotlib import pyplot

    variants = list(dict.fromkeys(row["variant"] for rows in cases.values() for row in rows))
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    width = 0.8 / len(variants)
    for place, variant in enumerate(variants):
        bars: list[tuple[float, float]] = [
            (index + (place - (len(variants) - 1) / 2) * width, row["ms"])
            for index, rows in enumerate(cases.values())
            for row in rows
            if row["variant"] == variant
        ]
        drawn = axes.bar([x for x, _ in bars], [ms for _, ms in bars], width, label=variant)
        axes.bar_label(drawn, fmt="%.1f", fontsize=7)
    first: Row = next(iter(cases.values()))[0]
    axes.set_xticks(range(len(cases)), [f"{case.replace('x', ' x ')} tokens" for case in cases])
    axes.set_ylabel("ms per decode step")
    axes.set_title(f"{model}, {first['gpu'] or first['cpu']}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot.close(figure)
