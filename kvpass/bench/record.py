"""What a row says about where it was measured, and where rows go: tables, JSON, a file of JSON lines."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvpass.bench.timing import Summary

RESULTS = Path("benchmarks/results")
Row = dict[str, Any]


def version(distribution: str) -> str | None:
    """Version of an installed distribution, found without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.lru_cache
def driver() -> str | None:
    """Version of the NVIDIA driver; None without one."""
    output = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return output.splitlines()[0].strip() if output else None


@functools.lru_cache
def commit() -> str | None:
    """The git commit of this package, ``-dirty`` where its files differ; None outside a checkout.

    ``KVPASS_COMMIT`` names it for a copy without git.
    """
    if named := os.environ.get("KVPASS_COMMIT"):
        return named
    folder = str(Path(__file__).parent)
    head = _output_of("git", "-C", folder, "rev-parse", "HEAD")
    if not head or not _output_of("git", "-C", folder, "ls-files", __file__):
        return None
    changed = _output_of("git", "-C", str(Path(folder).parent), "status", "--porcelain", "--", ".")
    return head.strip() + ("-dirty" if changed and changed.strip() else "")


def environment(device: torch.device) -> Row:
    """The part of a row that is the same for all rows of a run."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "clock": "cuda graph replay" if device.type == "cuda" else "wall clock",
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver": driver() if device.type == "cuda" else None,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "flashinfer": version("flashinfer-python"),
        "kvpass": version("kvpass"),
        "commit": commit(),
    }


@dataclass(frozen=True)
class Output:
    """Where the rows of a run go.

    Attributes:
        path: File that rows are appended to, one JSON object a line; None for none.
        as_json: Rows on standard output as JSON lines, instead of tables.
        is_quiet: Print and write nothing, another process does; only what failed here is said.
    """

    path: Path | None = None
    as_json: bool = False
    is_quiet: bool = False

    @classmethod
    def choose(cls, benchmark: str, record: bool, out: str | None, as_json: bool) -> Output:
        """``--out FILE``, or for ``--record`` the benchmark's file in :data:`RESULTS`. Of several ranks the first
        speaks.

        Raises:
            ValueError: There is no such folder.
        """
        path = Path(out) if out else RESULTS / f"{benchmark}.jsonl" if record else None
        if path is not None and not path.parent.is_dir():
            raise ValueError(
                f"cannot record to {path}: no folder {path.parent} under {Path.cwd()}; run from a checkout, or name a "
                "file with --out"
            )
        return cls(path, as_json, is_quiet=os.environ.get("RANK", "0") != "0")

    def progress(self, text: str) -> None:
        if not self.is_quiet:
            print(text, file=sys.stderr, flush=True)

    def record(self, rows: Sequence[Row]) -> None:
        """Append ``rows`` to the file."""
        if self.path is not None and not self.is_quiet:
            with self.path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def show(self, rows: Sequence[Row], text: str) -> None:
        """Print ``text``, or ``rows`` as JSON."""
        if not self.is_quiet:
            print("\n".join(json.dumps(row) for row in rows) if self.as_json else text, flush=True)
            return
        for row in rows:
            if row["status"] == "FAILED":
                print(f"rank {os.environ['RANK']}: {row['variant']}: {row['reason']}", file=sys.stderr, flush=True)

    def write(self, rows: Sequence[Row], text: str) -> None:
        """Both: shown, and in the file."""
        self.show(rows, text)
        self.record(rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, all others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def timing_columns(summary: Summary, calls: int, nbytes: int, rounds: int) -> Row:
    """What a row says about the time of one call that moves ``nbytes``."""
    return {
        "ms": round(summary.median, 6),
        "ms_p10": round(summary.p10, 6),
        "ms_p90": round(summary.p90, 6),
        "bytes": nbytes,
        "tb_per_s": round(nbytes / summary.median / 1e9, 6),
        "calls_per_replay": calls,
        "rounds": rounds,
    }


def compare(rows: Sequence[Row], ceiling: str) -> None:
    """Add to each timed row its share of the bandwidth of the row ``ceiling``, and to ours how many times as fast as
    each other one it is (``ratios``, above 1 is faster)."""
    timed = [row for row in rows if "ms" in row]
    reach = next(row["bytes"] / row["ms"] for row in timed if row["variant"] == ceiling)
    others = [row for row in timed if row["kind"] in ("peer", "unfused")]
    for row in timed:
        row["share_of_ceiling"] = round(row["bytes"] / row["ms"] / reach, 4)
        if row["kind"] == "kvpass":
            row["ratios"] = {other["variant"]: round(other["ms"] / row["ms"], 4) for other in others}


def reasons(rows: Sequence[Row]) -> list[str]:
    """A line for each reason why variants have no time, and which those are."""
    grouped: dict[str, list[str]] = {}
    for row in rows:
        if "reason" in row:
            grouped.setdefault(f"{row['status']}: {row['reason']}", []).append(row["variant"])
    return [f"{reason} ({', '.join(variants)})" for reason, variants in grouped.items()]


def summary_of(error: Exception) -> str:
    """Type and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
