"""``kvpass eval`` and ``kvpass tune``: arguments, and what is written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from kvpass.accuracy.harness import run_tasks
from kvpass.accuracy.plot import check_plot, plot_evaluation, plot_tuning
from kvpass.accuracy.results import Evaluation, plain
from kvpass.accuracy.retrieval import Retrieval
from kvpass.accuracy.statistics import BUCKETS
from kvpass.accuracy.storage import BITS_AT, PREFILL
from kvpass.accuracy.teacher_forced import DEFAULT_FORMATS, evaluate, named_configs
from kvpass.accuracy.tuning import DEFAULT_CANDIDATES, DEFAULT_VALUE_CANDIDATES, tune
from kvpass.bench.record import Output, environment
from kvpass.config import KVQuantConfig, names_a_file
from kvpass.pretrained import add_model_arguments, load_model, require
from kvpass.scale_files import write_whole

EVAL_NOTE = """\
The text runs through the quantized cache token for token as written: every K and V that attention reads, the prompt's
too, comes out of the cache's bytes. Beside it runs the model's own pass. Log-likelihood tasks of common harnesses
(multiple choice, perplexity) score a text in one forward pass that reads no cache: they give the same result whatever
the cache is stored in. --lm-eval therefore takes generative tasks only."""
TUNE_NOTE = f"""\
Measures what each layer's K and V costs in each candidate format alone (KL on a sample of the text), adds the costs up,
and chooses formats for the least sum within the budget: mean bits per value at {BITS_AT} tokens. The choice is then
measured on the text behind the sample. An interrupted run leaves its state beside --out; the same command goes on."""


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass eval``."""
    parser.description = EVAL_NOTE
    add = parser.add_argument
    add_model_arguments(parser)
    add("--text", required=True, type=Path, metavar="FILE", help="text not used for calibration")
    add("--formats", nargs="+", default=list(DEFAULT_FORMATS), metavar="FORMAT", help=_FORMATS)
    add("--tokens", default=40960, type=int, help="where to stop in the text (default: %(default)s)")
    add("--window", default=2048, type=int, help="tokens that attend to each other (default: %(default)s)")
    add("--skip-tokens", default=0, type=int, help="of the text's beginning, left out: what was calibrated on")
    add("--skip-first", default=0, type=int, help="tokens of each window that are read and not scored")
    add("--batch-size", default=1, type=int, help="windows run at once (default: %(default)s)")
    add("--chunk", default=PREFILL, type=int, help="tokens run at once through a window (default: %(default)s)")
    add("--decode", default=0, type=int, metavar="N", help="run the last N tokens of each window singly, compiled")
    add("--buckets", nargs="+", default=list(BUCKETS), type=int, help="where ranges of positions begin")
    add("--no-layers", action="store_true", help="leave out the error of each layer")
    add("--retrieval", action="store_true", help="find passkeys in the text as well")
    add("--lengths", nargs="+", type=int, default=list(Retrieval.lengths), help="of prompts with a passkey")
    add("--depths", nargs="+", type=float, default=list(Retrieval.depths), help="of the passkey, 0 to 1")
    add("--trials", type=int, default=Retrieval.trials, help="passkeys for each length and depth")
    add("--lm-eval", nargs="+", default=[], metavar="TASK", help="generative tasks of lm-evaluation-harness to run")
    add("--limit", type=int, default=None, help="examples of each lm-eval task")
    add("--seed", default=0, type=int, help="of bootstrap and passkeys")
    add("--json", type=Path, metavar="FILE", help="write everything that was found")
    add("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    add("--record", action="store_true", help="append a row per format to benchmarks/results/eval.jsonl")
    add("--quiet", action="store_true", help="no progress bar")


def run_eval(args: argparse.Namespace) -> int:
    """``kvpass eval``."""
    output = Output.choose("eval", args.record, None, as_json=False)
    configs = named_configs(args.formats)
    task = Retrieval(tuple(args.lengths), tuple(args.depths), args.trials, seed=args.seed) if args.retrieval else None
    if args.lm_eval:
        require("lm_eval", "lm-eval", "--lm-eval")
    _check_files(args.text, args.json, args.plot)
    model, tokenizer = load_model(args)
    evaluation = evaluate(
        model,
        args.text,
        configs,
        tokenizer=tokenizer,
        window=args.window,
        max_tokens=args.tokens,
        skip_tokens=args.skip_tokens,
        skip_first=args.skip_first,
        batch_size=args.batch_size,
        chunk=args.chunk,
        decode=args.decode,
        buckets=args.buckets,
        layers=not args.no_layers,
        retrieval=task,
        seed=args.seed,
        progress=not args.quiet,
    )
    output.write(_rows(evaluation, args.text, model.device), str(evaluation))
    if args.json:
        evaluation.to_json(args.json)
    if args.plot:
        plot_evaluation(evaluation, args.plot)
    if args.lm_eval:
        found = plain(run_tasks(model, tokenizer, configs, args.lm_eval, args.limit, args.batch_size))
        print("\n" + json.dumps(found, indent=1))
        if args.json:
            write_whole(args.json, json.dumps({**evaluation.to_dict(), "lm_eval": found}, indent=1) + "\n")
    return 0


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass tune``."""
    parser.description = TUNE_NOTE
    add = parser.add_argument
    add_model_arguments(parser)
    add("--text", required=True, type=Path, metavar="FILE", help="text such as the model will be used for")
    add("--bits", required=True, type=float, help=f"budget: mean bits per value at {BITS_AT} tokens")
    add("--out", required=True, type=Path, help="the configuration, .yaml or .json")
    names = f"of K: {' '.join(DEFAULT_CANDIDATES)}, of V: {' '.join(DEFAULT_VALUE_CANDIDATES)}"
    add("--candidates", nargs="+", metavar="FORMAT", help=f"to choose from (default: {names})")
    add("--value-candidates", nargs="+", default=None, metavar="FORMAT", help="those of V, where they differ")
    add("--base", default=None, metavar="FILE", help="a configuration whose scales, and what else is no format, to use")
    add("--window", default=2048, type=int, help="tokens that attend to each other (default: %(default)s)")
    add("--tokens", default=4096, type=int, help="of the sample (default: %(default)s)")
    add("--check-tokens", default=16384, type=int, help="to measure the result on (default: %(default)s)")
    add("--batch-size", default=1, type=int, help="windows run at once (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write everything that was found")
    add("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    add("--quiet", action="store_true", help="no progress bars")


def run_tune(args: argparse.Namespace) -> int:
    """``kvpass tune``."""
    if not names_a_file(args.out.name):
        raise ValueError(f"--out {args.out}: the name must end in .yaml, .yml or .json")
    _check_files(args.text, args.json, args.plot)
    args.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    base = None if args.base is None else KVQuantConfig.parse(args.base)
    model, tokenizer = load_model(args)
    tuning = tune(
        model,
        args.text,
        args.bits,
        tokenizer=tokenizer,
        candidates=args.candidates,
        value_candidates=args.value_candidates,
        base=base,
        window=args.window,
        sample_tokens=args.tokens,
        check_tokens=args.check_tokens,
        batch_size=args.batch_size,
        resume=args.out.with_name(f"{args.out.name}.partial"),
        progress=not args.quiet,
    )
    tuning.config.to_file(args.out)
    print(tuning)
    print(f"\n{args.out}: {tuning.config}")
    if args.json:
        tuning.to_json(args.json)
    if args.plot:
        plot_tuning(tuning, args.plot)
    return 0


_FORMATS = (
    "names, K and V apart as fp8_e4m3/nvfp4, or JSON and YAML configurations; bf16 shows what chunks and kernels alone "
    "change (default: %(default)s)"
)


def _check_files(text: Path, json_path: Path | None, plot_path: Path | None) -> None:
    """Raise ``ValueError`` for what could not be read before the run, or written after it."""
    if not text.is_file():
        raise ValueError(f"--text {text} is not a file")
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{option} {path}: there is no such folder")
    if plot_path is not None:
        check_plot(plot_path)


def _rows(evaluation: Evaluation, text: Path, device: torch.device) -> list[dict[str, Any]]:
    """A row per format, as :mod:`kvpass.bench.record` keeps them."""
    where = {name: value for name, value in environment(device).items() if name != "clock"}
    found = evaluation.to_dict()
    shared = {"benchmark": "eval", **where, **found["settings"], "text": text.name, "windows": found["windows"]}
    if evaluation.full_retrieval:
        shared["full_retrieval"] = found["full_retrieval"]
    return [{**shared, **row, "name": _without_folder(row["name"])} for row in found["formats"]]


def _without_folder(name: str) -> str:
    """What a format is called, or the file of a configuration: its folder is no one else's business."""
    return Path(name).name if names_a_file(name) else name
