"""``kvpass bench capacity``: the largest batch at one context length, found by running it.

The first attempt is what ``kvpass plan`` says; the memory it takes says where the next one is. A batch counts as held
when ``generate`` has prefilled every prompt in chunks and decoded a few tokens.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvpass import hf
from kvpass.architecture import head_dim_of
from kvpass.bench.models import load_model
from kvpass.bench.plan import Plan
from kvpass.bench.record import Output, Row, environment, reasons, summary_of, table, version
from kvpass.bench.shapes import DTYPES, choose
from kvpass.bench.timing import free_memory
from kvpass.config import KVQuantConfig

STATIC = "static cache, bf16"
NEW_TOKENS = 4
MAX_ATTEMPTS = 6
STEP_BACK = 0.97  # of a batch that did not fit; twice as far after each that did not either


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        model: A name in :data:`kvpass.bench.models.SHAPES`, a folder, or a hub id.
        context: Slots of each sequence: prompt and the new tokens.
        formats: Configurations of kvpass, by the text they were given as.
        static: Also find the limit of transformers' static cache.
        chunk: Tokens of a prefill's chunk.
        dtype: Key of ``DTYPES``: of weights and activations.
        device: Where.
    """

    model: str
    context: int
    formats: dict[str, KVQuantConfig] = field(default_factory=dict)
    static: bool = True
    chunk: int = 512
    dtype: str = "bf16"
    device: torch.device = torch.device("cuda")

    @classmethod
    def parse(
        cls, model: str, context: int, formats: list[str], static: bool, chunk: int, dtype: str, device: torch.device
    ) -> Options:
        """Options as they are written on the command line; ``ValueError`` for what is unknown or does not fit."""
        if chunk < 1 or context < chunk + NEW_TOKENS:
            raise ValueError(
                f"--context is {context} and --prefill-chunk {chunk}; a chunk has at least 1 token, and the context "
                f"has room for a chunk and {NEW_TOKENS} tokens"
            )
        if device.type != "cuda":
            raise ValueError("the capacity of a CPU's memory is not looked for; run on a CUDA GPU, or use kvpass plan")
        parsed = {text: KVQuantConfig.parse(text) for text in formats}
        return cls(model, context, parsed, static, chunk, choose("dtype", dtype, DTYPES), device)


@dataclass(frozen=True)
class Attempt:
    """One batch that was tried.

    Attributes:
        batch: Sequences.
        peak: Most bytes allocated, or None where memory ran out.
        seconds: How long it took.
    """

    batch: int
    peak: int | None
    seconds: float


def search(guess: int, attempt: Callable[[int], Attempt], base: int, memory: int) -> Iterator[Attempt]:
    """Try batches from ``guess`` on, at most :data:`MAX_ATTEMPTS`, until the memory of the largest one that fits says
    that one more would not, or one more did not.

    Args:
        guess: The first batch.
        attempt: Tries one.
        base: Bytes that do not depend on the batch.
        memory: Bytes there are.
    """
    fits, fails, batch, step = 0, 0, guess, 1 - STEP_BACK
    for _ in range(MAX_ATTEMPTS):
        result = attempt(batch)
        yield result
        if result.peak is None:
            fails, following, step = batch, min(batch - 1, int(batch * (1 - step))), 2 * step
        else:
            fits, row = batch, (result.peak - base) / batch
            following = int((memory - base) / row)
        if fails:
            following = min(following, fails - 1)
        if following <= fits:
            return
        batch = following


def run(options: Options, output: Output) -> int:
    """Find the limit of each variant, printing and recording as it goes; 1 where a variant held nothing.

    Interrupted from the keyboard, it keeps what it has found.
    """
    device = options.device
    output.progress(f"loading {options.model}")
    model = load_model(options.model, DTYPES[options.dtype], device)
    memory = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device)
    names = ([STATIC] if options.static else []) + list(options.formats)
    planned = Plan.of(
        model.config, memory, list(dict.fromkeys(["bf16", *options.formats])), DTYPES[options.dtype], options.chunk
    )
    where = environment(device) | {"clock": "wall clock", "transformers": version("transformers")}
    rows: list[Row] = []
    is_interrupted = False
    for name in names:
        text, beside = ("bf16", repeated_bytes(model.config, options)) if name == STATIC else (name, 0)
        guess = max(1, planned.largest_batch(text, options.context, beside))
        row: Row = {"benchmark": "capacity", "model": options.model, "variant": name, "context": options.context}
        row |= {"prefill_chunk": options.chunk, "dtype": options.dtype, "memory_bytes": memory, "planned": guess}
        row |= {"kind": "peer" if name == STATIC else "kvpass", "status": "ok"}
        attempts: list[Attempt] = []
        try:
            base = torch.cuda.memory_allocated(device)
            for tried in search(guess, functools.partial(_attempt, model, name, options), base, memory):
                output.progress(
                    f"{name}: batch {tried.batch}: {'fits' if tried.peak else 'does not fit'}, {tried.seconds:.0f} s"
                )
                attempts.append(tried)
        except KeyboardInterrupt:
            is_interrupted = True
        except Exception as error:  # the row says what happened, and the others go on
            row |= {"status": "FAILED", "reason": summary_of(error)}
        row["attempts"] = [[tried.batch, tried.peak is not None] for tried in attempts]
        if held := max((tried for tried in attempts if tried.peak), key=lambda tried: tried.batch, default=None):
            row |= {"status": "ok", "batch": held.batch, "peak_bytes": held.peak, "seconds": held.seconds}
        elif row["status"] == "ok":
            tried_least = f"not even {attempts[-1].batch} sequences fit" if attempts else "nothing was tried"
            row |= {"status": "FAILED", "reason": tried_least}
        if rows and rows[0]["variant"] == STATIC and "batch" in row and "batch" in rows[0]:
            row["times_static"] = row["batch"] / rows[0]["batch"]
        rows.append(row | where)
        output.record(rows[-1:])
        if is_interrupted:
            break
    output.show(rows, render(options, rows))
    return int(any(row["status"] == "FAILED" for row in rows))


def repeated_bytes(config: PreTrainedConfig, options: Options) -> int:
    """Bytes for each sequence of one layer's K and V, repeated for all query heads, as transformers' attention does."""
    text = config.get_text_config(decoder=True)
    heads, kv_heads = int(text.num_attention_heads), getattr(text, "num_key_value_heads", None)
    if kv_heads in (None, heads):
        return 0
    return 2 * heads * (head_dim_of(text) or 0) * options.context * DTYPES[options.dtype].itemsize


def _attempt(model: PreTrainedModel, name: str, options: Options, batch: int) -> Attempt:
    """Generate for ``batch`` prompts that fill the context."""
    device, begin = options.device, time.perf_counter()
    if name != STATIC:
        hf.enable(model, options.formats[name])
    torch.cuda.reset_peak_memory_stats(device)
    try:
        peak = _peak_of(model, name, options, batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        peak = None
    finally:
        free_memory(device)  # of what failed, before to disable needs some
        hf.disable(model)
        torch.compiler.reset()
        free_memory(device)
    return Attempt(batch, peak, time.perf_counter() - begin)


def _peak_of(model: PreTrainedModel, name: str, options: Options, batch: int) -> int:
    arguments: dict[str, Any] = {"cache_implementation": "static"} if name == STATIC else {}
    arguments |= {"prefill_chunk_size": options.chunk, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    arguments |= {"eos_token_id": None, "pad_token_id": 0}
    vocabulary = model.config.get_text_config().vocab_size
    prompt = torch.randint(10, vocabulary, (batch, options.context - NEW_TOKENS), device=options.device)
    tokens = model.generate(prompt, **arguments)  # type: ignore[operator]
    if tokens.shape != (batch, options.context):
        raise ValueError(f"generate returned {tuple(tokens.shape)} for {batch} sequences of {options.context}")
    return torch.cuda.max_memory_allocated(options.device)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, or what ``error`` was raised from says so: compilers wrap what they meet."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def render(options: Options, rows: list[Row]) -> str:
    """The table."""
    lines = []
    for row in rows:
        held = "batch" in row
        lines.append((
            row["variant"], str(row["batch"]) if held else row["status"], str(row["planned"]),
            f"{row['times_static']:.2f}" if "times_static" in row else "",
            f"{row['peak_bytes'] / 2**30:.1f}" if held else "", f"{row['seconds']:.0f}" if held else "",
        ))  # fmt: skip
    title = f"{options.model}, {options.context} tokens a sequence, prefill in chunks of {options.chunk}"
    header = ("variant", "largest batch", "planned", "times static", "peak GiB", "seconds")
    return "\n".join([title, table(header, lines), *reasons(rows)]) + "\n"
