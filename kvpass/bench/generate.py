"""``kvpass bench generate``: whole ``generate`` calls, step by step, against transformers' own caches in one run.

Each variant generates twice from the same prompt: the first call compiles, the second is measured. A logits processor,
which transformers calls after every forward, takes the times; nothing else is added to the loop.

Under ``torchrun`` transformers splits the model among the ranks (tensor parallelism). Each of them runs everything, and
the first one's figures are told: times are of all, bytes and memory of its GPU.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from kvpass import hf
from kvpass.bench.models import load_model, streamed_bytes
from kvpass.bench.plan import cache_bytes
from kvpass.bench.record import Output, Row, environment, reasons, summary_of, table, version
from kvpass.bench.shapes import DTYPES, choose
from kvpass.bench.timing import free_memory, interleave, read_ceiling, summarize
from kvpass.config import KVQuantConfig
from kvpass.devices import ranks_of

DEFAULT_CASES = ("1x512", "1x8192", "16x8192", "8x32768")
DEFAULT_FORMATS = ("fp8_e4m3", "nvfp4")
# Label, and what `generate` gets for it.
BASELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("dynamic cache, eager", {}),
    "static": ("static cache, inductor", {"cache_implementation": "static"}),
    "quanto": (
        "transformers quantized, quanto int4",
        {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4}},
    ),
    "hqq": (
        "transformers quantized, hqq int4",
        {"cache_implementation": "quantized", "cache_config": {"backend": "hqq", "nbits": 4}},
    ),
    "fp8": ("transformers quantized, fp8", {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}),
}
_NEEDS = {"quanto": "optimum-quanto", "hqq": "hqq"}
# Fused and unfused logits of one step over the same bytes differ (rms, in deviations of the logits) by how bf16 sums
# are rounded: 0.06 over 32 layers of random weights. Attention to anything else is off by about 1.
MAX_LOGIT_ERROR = 0.1
# The first token of a short prompt takes what the host takes, which varies: the median of calls, up to so many, and as
# long as whole calls take so few seconds.
FIRST_TOKEN_CALLS, FIRST_TOKEN_MS, CALL_SECONDS = 7, 1000.0, 5.0
SETTLED = 4  # decode steps left out of the statistics: CUDA graphs are recorded in them


@dataclass(frozen=True)
class Case:
    """``batch`` prompts of ``prompt`` tokens."""

    batch: int
    prompt: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """``BATCHxPROMPT``, as ``16x8192``."""
        batch, x, prompt = text.partition("x")
        if not (x and batch.isdecimal() and prompt.isdecimal() and int(batch) and int(prompt)):
            raise ValueError(f"case {text!r}; write BATCHxPROMPT, two positive whole numbers, as 16x8192")
        return cls(int(batch), int(prompt))

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt}"


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        model: A name in :data:`kvpass.bench.models.SHAPES`, a folder, or a hub id.
        cases: Batch sizes and prompt lengths.
        formats: Configurations of kvpass, by the text they were given as.
        baselines: Keys of :data:`BASELINES`.
        new_tokens: Tokens generated for each prompt.
        prefill_chunk: Tokens of a chunk of the prefill; 0 for all at once.
        dtype: Key of ``DTYPES``: of weights and activations.
        device: ``cuda`` or ``cpu``.
        ranks: Tensor-parallel ranks, of which this process is one.
        device_map: ``auto``: layers dealt out to all GPUs by accelerate; memory is the first one's. None: one device.
    """

    model: str = "llama-3-8b"
    cases: list[Case] = field(default_factory=lambda: [Case.parse(text) for text in DEFAULT_CASES])
    formats: dict[str, KVQuantConfig] = field(default_factory=dict)
    baselines: list[str] = field(default_factory=lambda: ["dynamic", "static"])
    new_tokens: int = 64
    prefill_chunk: int = 0
    dtype: str = "bf16"
    device: torch.device = torch.device("cuda")
    ranks: int = 1
    device_map: str | None = None

    @classmethod
    def parse(
        cls,
        model: str,
        cases: list[str],
        formats: list[str],
        baselines: list[str],
        new_tokens: int,
        prefill_chunk: int,
        dtype: str,
        device: torch.device,
        ranks: int = 1,
        device_map: str | None = None,
    ) -> Options:
        """Options as they are written on the command line; ``ValueError`` for what is unknown or does not fit."""
        if new_tokens < SETTLED + 2:
            raise ValueError(f"--new-tokens is {new_tokens}; it must be at least {SETTLED + 2}")
        if prefill_chunk < 0:
            raise ValueError(f"--prefill-chunk is {prefill_chunk}; it must be 0 (no chunks) or a number of tokens")
        if device_map not in (None, "auto"):
            raise ValueError(f"--device-map is {device_map!r}; allowed: auto")
        if device_map and (ranks > 1 or torch.cuda.device_count() < 2):
            raise ValueError(
                f"--device-map auto deals a model's layers out to several GPUs of one process; here are "
                f"{torch.cuda.device_count()} GPUs and {ranks} processes"
            )
        names = [] if baselines == ["none"] else [choose("baseline", name, (*BASELINES, "none")) for name in baselines]
        return cls(
            model,
            [Case.parse(text) for text in cases],
            {text: KVQuantConfig.parse(text) for text in formats},
            names,
            new_tokens,
            prefill_chunk,
            choose("dtype", dtype, DTYPES),
            device,
            ranks,
            device_map,
        )


def run(options: Options, output: Output) -> int:
    """Run every case, printing and recording each as it finishes; 1 where a variant of ours failed, otherwise 0."""
    device = options.device
    output.progress("measuring the read bandwidth")
    ceiling = read_ceiling(device)
    bandwidth = ceiling.nbytes / interleave({"read": ceiling.replay}, 10, device)["read"].median / 1e-3
    del ceiling
    free_memory(device)
    output.progress(f"loading {options.model}")
    model = load_model(options.model, DTYPES[options.dtype], device, options.ranks, options.device_map)
    where, failed = environment(device) | {"clock": "cuda events" if device.type == "cuda" else "wall clock"}, False
    where["transformers"] = version("transformers")
    for case in options.cases:
        rows = [row | where for row in run_case(case, model, options, bandwidth, output.progress)]
        title = f"{options.model}, {case.batch} x {case.prompt} tokens, {options.new_tokens} new; {options.dtype}"
        title += f"; {options.ranks} ranks, bytes of one" if options.ranks > 1 else ""
        title += f"; device_map={options.device_map}, memory of the first GPU" if options.device_map else ""
        output.write(rows, render(title, rows))
        failed = failed or any(row["status"] == "FAILED" and row["kind"] == "kvpass" for row in rows)
    return int(failed)


def run_case(
    case: Case, model: PreTrainedModel, options: Options, bandwidth: float, progress: Callable[[str], None]
) -> list[Row]:
    """Rows of one case. ``bandwidth`` is the measured read bandwidth, bytes per second."""
    prompt = torch.randint(
        10, model.config.get_text_config().vocab_size, (case.batch, case.prompt),
        generator=torch.Generator().manual_seed(1),
    ).to(options.device)  # fmt: skip
    weights = streamed_bytes(model)
    rows = []
    for name, kind in [(key, "peer") for key in options.baselines] + [(text, "kvpass") for text in options.formats]:
        label = BASELINES[name][0] if kind == "peer" else name
        progress(f"{case}: {label}")
        row: Row = {"benchmark": "generate", "case": str(case), "variant": label, "kind": kind, "status": "ok"}
        row |= {"model": options.model, "batch": case.batch, "prompt": case.prompt, "new_tokens": options.new_tokens}
        row |= {"dtype": options.dtype, "prefill_chunk": options.prefill_chunk, "weight_bytes": weights}
        row |= {"tp": options.ranks, "device_map": options.device_map}
        try:
            row |= _measured(model, prompt, name, kind, options)
            tokens = case.prompt + options.new_tokens // 2
            floor = 1e3 * (weights + _bytes_read(model, row, tokens, case.batch)) / bandwidth
            row |= {"read_tb_per_s": bandwidth / 1e12, "floor_ms": floor, "times_floor": row["ms"] / floor}
        except _Skipped as reason:
            row |= {"status": "skipped", "reason": str(reason)}
        except Exception as error:  # out of memory, or what a peer's compiler throws: the others go on
            row |= {"status": "FAILED", "reason": summary_of(error)}
        finally:
            hf.disable(model)
            torch.compiler.reset()
            free_memory(options.device)
        rows.append(row)
    _compare(rows)
    return rows


class _Skipped(Exception):
    """Why a baseline cannot run here."""


class Clock(LogitsProcessor):
    """Notes the time after every forward of a ``generate``, and leaves the logits as they are.

    Attributes:
        times: Of the start, and of each forward: CUDA events, or seconds.
        logits: ``[batch, vocab]`` of the last forward.
        steady_bytes: Device memory allocated after the last forward.
        prefill_peak: Most device memory allocated until the first token.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[Any] = []
        self.logits: Tensor | None = None
        self.steady_bytes = self.prefill_peak = 0
        self.tick()

    def tick(self) -> None:
        """Note the time."""
        if self.device.type == "cuda":
            self.times.append(torch.cuda.Event(enable_timing=True))
            self.times[-1].record()
        else:
            self.times.append(time.perf_counter())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.tick()
        self.logits = scores
        if self.device.type == "cuda":
            self.steady_bytes = torch.cuda.memory_allocated(self.device)
            self.prefill_peak = self.prefill_peak or torch.cuda.max_memory_allocated(self.device)
        return scores

    def milliseconds(self) -> list[float]:
        """Between neighbouring times: the first is the time to the first token's logits."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [begin.elapsed_time(end) for begin, end in zip(self.times, self.times[1:], strict=False)]
        return [1e3 * (end - begin) for begin, end in zip(self.times, self.times[1:], strict=False)]


def _measured(model: PreTrainedModel, prompt: Tensor, name: str, kind: str, options: Options) -> Row:
    """What one variant's columns say."""
    device, arguments = options.device, {}
    if kind == "peer":
        if (package := _NEEDS.get(name)) and version(package) is None:
            raise _Skipped(f"{package} is not installed")
        arguments = dict(BASELINES[name][1])
    begin = time.perf_counter()
    if kind == "kvpass":
        hf.enable(model, options.formats[name])
    if options.prefill_chunk:
        arguments["prefill_chunk_size"] = options.prefill_chunk
    arguments |= {"max_new_tokens": options.new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    counters.clear()
    with fresh_cache(), counted_recordings() as recordings:  # every variant compiles from nothing
        _, tokens = _generate(model, prompt, arguments, device)
        first_seconds = time.perf_counter() - begin
        graphs, recorded = counters["stats"]["unique_graphs"], len(recordings)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        clock, tokens_again = _generate(model, prompt, arguments, device)
        seconds = time.perf_counter() - begin
        recompiles, again = counters["stats"]["unique_graphs"] - graphs, len(recordings) - recorded
        first_token = [clock.milliseconds()[0]]
        while sum(first_token) < FIRST_TOKEN_MS and len(first_token) < FIRST_TOKEN_CALLS and seconds < CALL_SECONDS:
            first_token.append(_generate(model, prompt, arguments, device)[0].milliseconds()[0])
    summary = summarize(clock.milliseconds()[1 + SETTLED :])
    row: Row = {
        "ms": summary.median,
        "ms_p10": summary.p10,
        "ms_p90": summary.p90,
        "tokens_per_s": 1e3 * len(prompt) / summary.median,
        "first_token_ms": statistics.median(first_token),
        "call_s": seconds,
        "first_call_s": first_seconds,
        "compile_s": first_seconds - seconds,
        "recompiles": recompiles,
        "recordings": again,
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        "same_tokens_again": bool(torch.equal(tokens, tokens_again)),
    }
    if device.type == "cuda":
        row |= {
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "prefill_peak_bytes": clock.prefill_peak,
            "steady_bytes": clock.steady_bytes,
        }
    if kind == "kvpass":
        row |= _checked(model, tokens_again, clock)
    elif name == "static":
        slots = prompt.shape[1] + options.new_tokens
        nbytes = _bf16_bytes(model, slots, len(prompt)) * DTYPES[options.dtype].itemsize // 2
        row |= {"cache_bytes": nbytes, "slots": slots}
    return row


def _generate(
    model: PreTrainedModel, prompt: Tensor, arguments: dict[str, Any], device: torch.device
) -> tuple[Clock, Tensor]:
    clock = Clock(device)
    tokens = model.generate(prompt, logits_processor=LogitsProcessorList([clock]), **arguments)  # type: ignore[operator]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock, tokens


def _checked(model: PreTrainedModel, tokens: Tensor, clock: Clock) -> Row:
    """Repeat the last decode step eagerly and unfused over the same bytes.

    Raises:
        ValueError: A layer was not fused, or the logits differ by more than :data:`MAX_LOGIT_ERROR`.
    """
    report, cache = hf.report(model), vars(model)["_kvpass"].spare
    layers = len(cache)
    fused, cache_bytes = report.fused, report.cache_bytes
    if fused != layers:
        raise ValueError(f"{fused} of {layers} layers were fused: {' '.join(str(report).split())[:300]}")
    cache.crop(-1)
    with torch.no_grad():
        plain = type(model).__call__(model, tokens[:, -2:-1], **{hf.CACHE_ARGUMENT: cache}).logits[:, -1].float()
    assert clock.logits is not None
    error = float((clock.logits - plain).square().mean().sqrt() / plain.std())
    if not error <= MAX_LOGIT_ERROR:
        raise ValueError(
            f"the last step's logits differ from the unfused ones by {error:.2e}, {MAX_LOGIT_ERROR} allowed"
        )
    return {"fused": fused, "relative_error": error, "cache_bytes": cache_bytes, "slots": cache.max_cache_len}


@contextlib.contextmanager
def counted_recordings() -> Iterator[list[None]]:
    """The CUDA graphs that Inductor records meanwhile, one entry each."""
    from torch._inductor import cudagraph_trees

    made: list[None] = []
    original = cudagraph_trees.CUDAGraphNode.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(None)
        original(self, *args, **kwargs)

    cudagraph_trees.CUDAGraphNode.__init__ = counted  # type: ignore[method-assign]
    try:
        yield made
    finally:
        cudagraph_trees.CUDAGraphNode.__init__ = original  # type: ignore[method-assign]


def _bytes_read(model: PreTrainedModel, row: Row, tokens: int, batch: int) -> float:
    """Bytes of K and V that a step over ``tokens`` tokens has to read, in the variant's own storage."""
    if "cache_bytes" in row:
        return float(row["cache_bytes"] / row["slots"] * tokens)
    return _bf16_bytes(model, tokens, batch)


def _bf16_bytes(model: PreTrainedModel, tokens: int, batch: int) -> int:
    """Bytes of K and V of ``tokens`` tokens on this rank."""
    return batch * cache_bytes(model.config, KVQuantConfig("bf16"), tokens) // ranks_of(model).parts


def _compare(rows: list[Row]) -> None:
    """Add to each of our rows how many times as fast as each peer a step and the first token are, and how much of its
    time to compile ours takes."""
    peers = [row for row in rows if row["kind"] == "peer" and "ms" in row]
    for row in rows:
        if row["kind"] == "kvpass" and "ms" in row:
            for column, key in (("ms", "ratios"), ("first_token_ms", "first_token_ratios")):
                row[key] = {peer["variant"]: round(peer[column] / row[column], 4) for peer in peers}
            row["compile_ratios"] = {
                peer["variant"]: round(row["compile_s"] / peer["compile_s"], 4)
                for peer in peers
                if peer["compile_s"] > 1
            }


def render(title: str, rows: list[Row]) -> str:
    """The tables of one case."""
    header = (
        "variant", "ms/step", "p10 - p90", "tokens/s", "x floor", "first token", "peak GiB", "steady GiB", "compile s",
        "recompiles", "recorded", "skips", "error",
    )  # fmt: skip
    lines = []
    for row in rows:
        if "ms" not in row:
            lines.append((row["variant"], row["status"], *[""] * (len(header) - 2)))
            continue
        gib = [f"{row[name] / 2**30:.1f}" if name in row else "" for name in ("peak_bytes", "steady_bytes")]
        lines.append((
            row["variant"], f"{row['ms']:.2f}", f"{row['ms_p10']:.2f} - {row['ms_p90']:.2f}",
            f"{row['tokens_per_s']:,.0f}", f"{row['times_floor']:.2f}", f"{row['first_token_ms']:,.0f} ms", *gib,
            f"{row['compile_s']:.1f}", str(row["recompiles"]), str(row["recordings"]), str(row["cudagraph_skips"]),
            f"{row['relative_error']:.1e}" if "relative_error" in row else "",
        ))  # fmt: skip
    parts = [title, table(header, lines), *reasons(rows)]
    ours = [row for row in rows if row.get("ratios")]
    if ours:
        against = [[name, *(f"{row['ratios'][name]:.2f}" for row in ours)] for name in ours[0]["ratios"]]
        parts.append(table(("a step is times as fast as", *(row["variant"] for row in ours)), against))
    return "\n".join(parts) + "\n"
