"""``kvpass bench attention``: fused attention over every format, against named peers in the same run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

from kvpass.bench.case import Case, Check, Pair, Unsupported, Variant, check, label, stored_variant, unfused_variant
from kvpass.bench.peers import PEERS
from kvpass.bench.record import Output, Row, compare, environment, reasons, summary_of, table, timing_columns
from kvpass.bench.shapes import DTYPES, MASKS, AttentionShape, choose, parse_attention_shape, parse_formats
from kvpass.bench.timing import Ceiling, Replay, Summary, copy_ceiling, free_memory, interleave, prepare, read_ceiling
from kvpass.config import KVQuantConfig
from kvpass.formats import KVFormat

DEFAULT_FORMATS = ("bf16", "fp8_e4m3", "nvfp4", "fp4_mx_block16", "fp8_e4m3/nvfp4")


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        shapes: Label and shape of each case.
        formats: Formats of K and V.
        mask: One of ``MASKS``.
        dtype: Key of ``DTYPES``: that of the query, and of K and V where they are not quantized.
        peers: Keys of ``PEERS``.
        unfused: Also time what runs where attention is not fused.
        rounds: How often each variant is timed.
        device: ``cuda`` or ``cpu``.
        keep: How many of the first and of the newest slots are kept in bf16, by variants beside those that keep none.
    """

    shapes: list[tuple[str, AttentionShape]]
    formats: list[tuple[KVFormat, KVFormat]]
    mask: str = "none"
    dtype: str = "bf16"
    peers: list[str] = field(default_factory=lambda: list(PEERS))
    unfused: bool = True
    rounds: int = 20
    device: torch.device = torch.device("cuda")
    keep: tuple[int, int] = (0, 0)

    @classmethod
    def parse(
        cls,
        shapes: list[str],
        formats: list[str],
        mask: str,
        dtype: str,
        peers: list[str],
        unfused: bool,
        rounds: int,
        device: torch.device,
        keep: tuple[int, int] = (0, 0),
    ) -> Options:
        """Options as they are written on the command line; ``ValueError`` for what is unknown or does not fit."""
        if rounds < 1:
            raise ValueError(f"rounds is {rounds}; it must be at least 1")
        options = cls(
            [parse_attention_shape(text) for text in shapes],
            list(dict.fromkeys(parse_formats(text) for text in formats)),
            choose("mask", mask, MASKS),
            choose("dtype", dtype, DTYPES),
            [] if peers == ["none"] else [choose("peer", peer, (*PEERS, "none")) for peer in peers if peer != "none"],
            unfused,
            rounds,
            device,
            keep,
        )
        kept = KVQuantConfig(keep_first=keep[0], keep_last=keep[1])  # which says what may be
        for _, shape in options.shapes:
            for fmt in (fmt for pair in options.formats for fmt in pair):
                fmt.check_head_dim(shape.head_dim)
            if kept.keep_first + kept.keep_last > shape.max_len:
                raise ValueError(f"{keep[0]} and {keep[1]} slots to keep are more than the {shape.max_len} there are")
        return options


@dataclass
class Entry:
    """A variant on its way through check and timing."""

    name: str
    kind: str
    variant: Variant | None = None
    replay: Replay | None = None
    check: Check | None = None
    problem: str | None = None


def run(options: Options, output: Output) -> int:
    """Run every case, printing and recording each as it finishes; 1 where a kernel of ours failed, otherwise 0."""
    output.progress("measuring the ceilings")
    ceilings = [read_ceiling(options.device), copy_ceiling(options.device)]
    where, failed = environment(options.device), False
    for name, shape in options.shapes:
        rows = [row | where for row in run_case(name, shape, options, ceilings, output.progress)]
        output.write(rows, render(f"{name}: {shape}; {options.dtype}, mask {options.mask}", rows))
        failed = failed or any(row["status"] == "FAILED" and row["kind"] != "peer" for row in rows)
        free_memory(options.device)
    return int(failed)


def run_case(
    name: str, shape: AttentionShape, options: Options, ceilings: list[Ceiling], progress: Callable[[str], None]
) -> list[Row]:
    """Rows of one case: ours, the unfused ones, the peers, the ceilings."""
    progress(f"{name}: building {shape}")
    settings = options.mask, DTYPES[options.dtype], options.device
    case = Case(shape, options.formats, *settings)
    builders = _builders(case, options)
    if any(options.keep):  # of the same seed, hence the same query, K and V
        quantized = [pair for pair in options.formats if {fmt.codec for fmt in pair} != {"bf16"}]
        builders += _stored_builders(Case(shape, quantized, *settings, options.keep), quantized)
    entries = []
    for title, kind, build in builders:
        progress(f"{name}: checking {title}")
        entries.append(checked(case, title, kind, build))
    progress(f"{name}: timing")
    replays = {entry.name: entry.replay for entry in entries if entry.replay and not entry.problem}
    replays |= {ceiling.name: ceiling.replay for ceiling in ceilings}
    times = interleave(replays, options.rounds, options.device)
    rows = [_row(name, shape, options, entry, times.get(entry.name)) for entry in entries]
    for ceiling in ceilings:
        row = {"benchmark": "attention", "case": name, "variant": ceiling.name, "kind": "ceiling", "status": "ok"}
        row |= timing_columns(times[ceiling.name], ceiling.replay.calls, ceiling.nbytes, options.rounds)
        rows.append(row)
    compare(rows, ceilings[0].name)
    return rows


Builder = tuple[str, str, Callable[[], Variant]]


def _stored_builders(case: Case, formats: list[Pair]) -> list[Builder]:
    return [(label(pair, case.keep), "kvpass", functools.partial(stored_variant, case, pair)) for pair in formats]


def _builders(case: Case, options: Options) -> list[Builder]:
    """Name and kind of everything that is timed, and how it is built."""
    builders = _stored_builders(case, options.formats)
    for pair in options.formats if options.unfused else []:
        if {fmt.codec for fmt in pair} != {"bf16"}:
            builders.append(
                (f"dequantize + SDPA {label(pair)}", "unfused", functools.partial(unfused_variant, case, pair))
            )
    for peer in (PEERS[key] for key in options.peers):
        builders.append((peer.label, "peer", functools.partial(peer.build, peer.label, case)))
    return builders


def checked(case: Case, name: str, kind: str, build: Callable[[], Variant]) -> Entry:
    """Build, capture and check one variant; what goes wrong becomes the entry's ``problem``."""
    entry = Entry(name, kind)
    try:
        variant = build()
        replay = prepare(variant.call, variant.copies, case.device)
        replay.output.fill_(torch.nan)  # what the replay does not write stays NaN
        replay.run()
        result = replay.output if case.device.type == "cuda" else variant.call(0)
        entry.variant, entry.replay, entry.check = variant, replay, check(case, variant, result)
        if not entry.check.passed:
            entry.problem = f"relative error {entry.check.error:.2e}, allowed {entry.check.budget:.2e}"
    except Unsupported as reason:
        entry.problem = f"skipped: {reason}"
    except Exception as error:  # whatever a peer's compiler throws: it has a row, and the others go on
        entry.problem = summary_of(error)
        if case.device.type == "cuda":
            torch.cuda.synchronize(case.device)
    return entry


def _row(name: str, shape: AttentionShape, options: Options, entry: Entry, summary: Summary | None) -> Row:
    row: Row = {"benchmark": "attention", "case": name, "variant": entry.name, "kind": entry.kind}
    row["status"] = "ok" if summary else "skipped" if (entry.problem or "").startswith("skipped") else "FAILED"
    row |= {"shape": asdict(shape), "dtype": options.dtype, "mask": options.mask}
    if entry.variant and entry.variant.formats:
        row["key_format"], row["value_format"] = entry.variant.formats
        row |= {"keep": list(entry.variant.keep)} if any(entry.variant.keep) else {}
    if entry.problem:
        row["reason"] = entry.problem.removeprefix("skipped: ")
    if entry.check:
        error = entry.check.error if math.isfinite(entry.check.error) else None
        row |= {"relative_error": error, "error_budget": entry.check.budget}
    if entry.variant:
        row |= {"bytes": entry.variant.nbytes, "copies": entry.variant.copies}
        if summary and entry.replay:
            row |= timing_columns(summary, entry.replay.calls, entry.variant.nbytes, options.rounds)
    return row


def render(title: str, rows: list[Row]) -> str:
    """The tables of one case."""
    lines = []
    for row in rows:
        error = f"{row['relative_error']:.1e}" if row.get("relative_error") is not None else ""
        if "ms" in row:
            cells = (f"{row['ms']:.4f}", f"{row['ms_p10']:.4f} - {row['ms_p90']:.4f}", f"{row['tb_per_s']:.2f}")
            lines.append((row["variant"], *cells, f"{row['share_of_ceiling']:.0%}", error))
        else:
            lines.append((row["variant"], row["status"], "", "", "", error))
    parts = [title, table(("variant", "ms", "p10 - p90", "TB/s", "of ceiling", "rel. error"), lines), *reasons(rows)]
    ours = [row for row in rows if row.get("ratios")]
    if ours:
        against = [[name, *(f"{row['ratios'][name]:.2f}" for row in ours)] for name in ours[0]["ratios"]]
        parts.append(table(("times as fast as", *(row["variant"] for row in ours)), against))
    return "\n".join(parts) + "\n"
