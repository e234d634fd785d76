"""The ``kvpass`` command: formats, what this machine runs, what fits, calibration, accuracy, and benchmarks.

A subcommand is one function that adds its parser and sets ``run``, listed in ``COMMANDS`` (or ``BENCHMARKS``).
Bad input is one line on standard error and exit code 2; a benchmark whose numeric check fails exits with 1.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

import kvpass
from kvpass import tiles
from kvpass.config import PRESETS, KVQuantConfig
from kvpass.formats import WHOLE_HEAD, format_names, get_format

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction["_Parser"]


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line; ``--help`` has the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command line ``argv`` (without the program's name); returns the exit code."""
    parser = _Parser(prog="kvpass", description="FP8 and FP4 KV cache for Hugging Face models.")
    parser.add_argument("--version", action="version", version=f"kvpass {kvpass.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(subparsers)
    try:
        arguments = parser.parse_args(argv)
        code: int = arguments.run(arguments)
        return code
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 0
    except (ValueError, NotImplementedError) as error:
        print(f"kvpass: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _add_calibrate(subparsers: Subparsers) -> None:
    from kvpass.calibrate import add_arguments, run

    help = "measure the scales of a model's KV cache on a text"
    parser = subparsers.add_parser("calibrate", help=help, description=help)
    add_arguments(parser)
    parser.set_defaults(run=run)


def _add_eval(subparsers: Subparsers) -> None:
    from kvpass.accuracy.command import add_eval_arguments, run_eval

    parser = subparsers.add_parser("eval", help="measure what formats cost in accuracy on a text")
    add_eval_arguments(parser)
    parser.set_defaults(run=run_eval)


def _add_tune(subparsers: Subparsers) -> None:
    from kvpass.accuracy.command import add_tune_arguments, run_tune

    parser = subparsers.add_parser("tune", help="choose a format for each layer's K and V under a budget of bits")
    add_tune_arguments(parser)
    parser.set_defaults(run=run_tune)


def _add_formats(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("formats", help="storage formats, and what a token costs in each")
    parser.add_argument("--kv-heads", type=int, default=8, metavar="N")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D")
    parser.add_argument("--layers", type=int, default=1, metavar="L")
    parser.set_defaults(run=_formats)


def _formats(arguments: argparse.Namespace) -> int:
    from kvpass.bench.record import table

    kv_heads, head_dim, layers = arguments.kv_heads, arguments.head_dim, arguments.layers
    for name, value in (("--kv-heads", kv_heads), ("--head-dim", head_dim), ("--layers", layers)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    whole = get_format("bf16")
    whole.check_head_dim(head_dim)
    rows = []
    for name in format_names():
        fmt = get_format(name)
        scales = [f"{fmt.block_scale} per {'head' if fmt.block == WHOLE_HEAD else fmt.block}"] if fmt.block else []
        scales += ["fp32 per KV head"] if fmt.tensor_scale else []
        row = [name, fmt.codec, ", ".join(scales) or "none"]
        try:
            fmt.check_head_dim(head_dim)
        except ValueError:
            rows.append((*row, f"{fmt.bits_per_value:g}", f"not with head_dim {head_dim}", "", ""))
            continue
        row.append(f"{8 * fmt.bytes_per_token(1, head_dim) / head_dim:g}")
        per_layer = 2 * fmt.bytes_per_token(kv_heads, head_dim)
        ratio = whole.bytes_per_token(kv_heads, head_dim) / fmt.bytes_per_token(kv_heads, head_dim)
        rows.append((*row, f"{per_layer:,}", f"{layers * per_layer:,}", f"{ratio:.2f}"))
    print(f"K and V of one token: {kv_heads} KV heads, head_dim {head_dim}, {layers} layer{'s' * (layers > 1)}\n")
    header = ("format", "codec", "scales", "bits/value", "bytes/layer", "bytes/token", "tokens vs bf16")
    print(table(header, rows))
    print("\npresets\n" + "\n".join(f"  {name}: {KVQuantConfig.preset(name)}" for name in PRESETS))
    return 0


def _add_env(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("env", help="versions, GPU, and which kernels run here")
    parser.set_defaults(run=_env)


def _env(arguments: argparse.Namespace) -> int:
    from kvpass.bench.record import commit, driver, version

    rows = [("python", platform.python_version()), ("kvpass", kvpass.__version__), ("commit", commit() or "unknown")]
    for name in ("torch", "triton", "transformers", "flashinfer-python"):
        rows.append((name, version(name) or "not installed"))
    rows.append(("CUDA of torch", torch.version.cuda or "none"))
    rows.append(("driver", driver() or "none"))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        rows.append(("GPU", f"{torch.cuda.get_device_name(device)}, compute capability {capability}, {memory:.0f} GiB"))
    else:
        rows.append(("GPU", "none"))
    rows.append(("kernels", _kernels(device)))
    if device.type == "cuda":
        rows.append(("configurations", _configurations(device)))
    rows.append(("Hopper decode", _hopper_decode(device)))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in rows))
    return 0


def _kernels(device: torch.device) -> str:
    """Which implementation the operators have on ``device``."""
    if device.type != "cuda":
        return "none: operators run the PyTorch reference on CPU"
    try:
        codecs: Any = importlib.import_module("kvpass.kernels.codecs")
    except ImportError as error:
        return f"not usable: {error}"
    if codecs.native_float8(device):
        return "Triton, native float8 conversions"
    return "Triton, float8 by operations on bits (native conversions need compute capability 8.9)"


def _configurations(device: torch.device) -> str:
    """Where the Triton kernels' tiles come from on ``device``."""
    try:
        tiles.table(device)
    except ValueError as error:
        return f"not usable: {error}"
    return str(tiles.source(device) or "built in; `kvpass bench configurations` measures those of this GPU")


def _hopper_decode(device: torch.device) -> str:
    """Whether the decode kernel for Hopper takes a plain decode step on ``device``, and why not."""
    try:
        kernel: Any = importlib.import_module("kvpass.kernels.hopper_decode")
        fmt = get_format("nvfp4")
        buffers = fmt.allocate(1, 1, 32, 128, device)
        query = torch.zeros(1, 4, 1, 128, dtype=torch.bfloat16, device=device)
        positions = torch.zeros(1, dtype=torch.int64, device=device)
        reason = kernel.supports(query, *buffers, *buffers, positions, None, 1.0, False, fmt.name, fmt.name)
    except Exception as error:  # Gluon is experimental: whatever it raises, this GPU has no such kernel
        reason = f"{type(error).__name__}: {error}"
    return "usable" if reason is None else f"not usable: {reason}"


def _add_plan(subparsers: Subparsers) -> None:
    help = "how many tokens and sequences fit a GPU, from a model's configuration alone"
    parser = subparsers.add_parser("plan", help=help, description=help)
    parser.add_argument("model", help="a folder, a hub id, or a named shape (an unknown one lists them)")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="as 80GB or 141GiB; default: what this machine's GPU has")
    parser.add_argument(
        "--formats", nargs="+", metavar="FORMAT", help="names, pairs for K and V, or configuration files"
    )
    parser.add_argument("--dtype", default="bf16", help="of the weights: bf16, fp16 or fp32")
    parser.add_argument(
        "--prefill-chunk", type=int, default=512, metavar="N", help="tokens of a prompt computed at once"
    )
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from kvpass.bench.models import load_config
    from kvpass.bench.plan import FORMATS, Plan, parse_bytes
    from kvpass.bench.shapes import DTYPES, choose

    if arguments.gpu_memory is None and not torch.cuda.is_available():
        raise ValueError("this machine has no GPU to plan for; give --gpu-memory, as 80GB")
    memory = parse_bytes(arguments.gpu_memory) if arguments.gpu_memory else torch.cuda.mem_get_info()[1]
    dtype = DTYPES[choose("dtype", arguments.dtype, DTYPES)]
    formats = arguments.formats or FORMATS
    print(Plan.of(load_config(arguments.model), memory, formats, dtype, arguments.prefill_chunk))
    return 0


def _add_bench(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("bench", help="measure kernels against named peers")
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for add in BENCHMARKS:
        add(benchmarks)


def _add_bench_attention(subparsers: Subparsers) -> None:
    parser = _add_benchmark(subparsers, "attention", "decode attention over a cache in every format")
    keys = "batch=..,kv_heads=..,group=..,head_dim=..,tokens=..[,query=1][,slots=tokens]"
    _add_shapes(parser, keys)
    parser.add_argument(
        "--mask", default="none", help="none, bool (all True up to the length) or ragged (left padding)"
    )
    parser.add_argument("--peers", nargs="+", metavar="PEER", help="static sdpa fa2 fa2-fp8 xqa xqa-fp8, or none")
    parser.add_argument("--no-unfused", action="store_true", help="leave out decoding followed by SDPA")
    parser.add_argument(
        "--keep",
        type=int,
        nargs=2,
        default=(0, 0),
        metavar=("FIRST", "LAST"),
        help="time each quantized format also with so many of the first and newest slots in bf16",
    )
    parser.set_defaults(run=_bench_attention)


def _bench_attention(arguments: argparse.Namespace) -> int:
    from kvpass.bench import attention
    from kvpass.bench.peers import PEERS
    from kvpass.bench.record import Output

    device = _device(arguments.device)
    options = attention.Options.parse(
        arguments.shape or (["A", "B"] if device.type == "cuda" else ["tiny"]),
        arguments.formats or list(attention.DEFAULT_FORMATS),
        arguments.mask,
        arguments.dtype,
        arguments.peers or list(PEERS),
        not arguments.no_unfused,
        arguments.rounds,
        device,
        tuple(arguments.keep),
    )
    return attention.run(options, Output.choose("attention", arguments.record, arguments.out, arguments.json))


def _add_bench_store(subparsers: Subparsers) -> None:
    parser = _add_benchmark(subparsers, "store", "quantize-and-store of new tokens in every format")
    _add_shapes(parser, "batch=..[,tokens=1][,kv_heads=8][,head_dim=128]")
    parser.set_defaults(run=_bench_store)


def _bench_store(arguments: argparse.Namespace) -> int:
    from kvpass.bench import store
    from kvpass.bench.record import Output

    device = _device(arguments.device)
    options = store.Options.parse(
        arguments.shape or (list(store.DEFAULT_SHAPES) if device.type == "cuda" else ["tiny"]),
        arguments.formats or list(store.DEFAULT_FORMATS),
        arguments.dtype,
        arguments.rounds,
        device,
    )
    return store.run(options, Output.choose("store", arguments.record, arguments.out, arguments.json))


def _add_bench_generate(subparsers: Subparsers) -> None:
    parser = _add_benchmark(
        subparsers, "generate", "whole generate calls against transformers' own caches", rounds=False
    )
    parser.add_argument("--model", default=None, help="a shape with random weights, a folder, or a hub id")
    parser.add_argument("--case", nargs="+", metavar="BATCHxPROMPT", help="as 16x8192")
    parser.add_argument(
        "--formats",
        nargs="+",
        metavar="FORMAT",
        help="names, pairs for K and V (fp8_e4m3/nvfp4), or configuration files",
    )
    parser.add_argument("--baselines", nargs="+", metavar="CACHE", help="dynamic static quanto hqq fp8, or none")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="generated for each prompt")
    parser.add_argument(
        "--prefill-chunk", type=int, default=0, metavar="N", help="tokens of a prefill's chunk; 0: no chunks"
    )
    parser.add_argument("--dtype", default="bf16", help="of weights and activations: bf16, fp16 or fp32")
    parser.add_argument("--device-map", metavar="MAP", help="auto: deal the layers out to all GPUs")
    parser.set_defaults(run=_bench_generate)


def _bench_generate(arguments: argparse.Namespace) -> int:
    from kvpass.bench import generate
    from kvpass.bench.record import Output

    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun's
    if ranks > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = _device(arguments.device)
    on_gpu = device.type == "cuda"
    options = generate.Options.parse(
        arguments.model or ("llama-3-8b" if on_gpu else "tiny"),
        arguments.case or (list(generate.DEFAULT_CASES) if on_gpu else ["2x32"]),
        arguments.formats or list(generate.DEFAULT_FORMATS),
        arguments.baselines or ["dynamic", "static"],
        arguments.new_tokens,
        arguments.prefill_chunk,
        arguments.dtype,
        device,
        ranks,
        arguments.device_map,
    )
    try:
        return generate.run(options, Output.choose("generate", arguments.record, arguments.out, arguments.json))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _add_bench_capacity(subparsers: Subparsers) -> None:
    parser = _add_benchmark(subparsers, "capacity", "the largest batch that runs, by format", rounds=False)
    parser.add_argument("--model", default="llama-3-8b", help="a shape with random weights, a folder, or a hub id")
    parser.add_argument("--context", type=int, default=32768, metavar="N", help="tokens of each sequence")
    parser.add_argument(
        "--formats", nargs="+", metavar="FORMAT", help="names, pairs for K and V, or configuration files"
    )
    parser.add_argument("--no-static", action="store_true", help="leave out transformers' static cache")
    parser.add_argument(
        "--prefill-chunk", type=int, default=512, metavar="N", help="tokens of a prompt computed at once"
    )
    parser.add_argument("--dtype", default="bf16", help="of weights and activations: bf16, fp16 or fp32")
    parser.set_defaults(run=_bench_capacity)


def _bench_capacity(arguments: argparse.Namespace) -> int:
    from kvpass.bench import capacity
    from kvpass.bench.record import Output

    options = capacity.Options.parse(
        arguments.model,
        arguments.context,
        arguments.formats or ["fp8_e4m3", "nvfp4"],
        not arguments.no_static,
        arguments.prefill_chunk,
        arguments.dtype,
        _device(arguments.device),
    )
    return capacity.run(options, Output.choose("capacity", arguments.record, arguments.out, arguments.json))


def _add_bench_configurations(subparsers: Subparsers) -> None:
    help = "find the fastest tiles of the plain Triton attention on this GPU, and keep them in a file"
    parser = subparsers.add_parser("configurations", help=help, description=help)
    parser.add_argument("--device", default="auto", help="cuda, cpu (in Triton's interpreter, for tests) or auto")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="how often each candidate is timed")
    parser.add_argument("--kind", nargs="+", metavar="KIND", help="decode (at most 16 query rows of a KV head), chunk")
    parser.add_argument("--bits", nargs="+", type=int, metavar="N", help="of the wider one of K and V: 4 8 16")
    parser.add_argument("--head-dim", nargs="+", type=int, metavar="D", help="up to which: 64 128 256 512")
    parser.add_argument("--out", metavar="FILE", help="default: the GPU's file in kvpass/kernels/configurations")
    parser.set_defaults(run=_bench_configurations)


def _bench_configurations(arguments: argparse.Namespace) -> int:
    from kvpass.bench import configurations

    options = configurations.Options.parse(
        arguments.kind, arguments.bits, arguments.head_dim, arguments.out, arguments.rounds, _device(arguments.device)
    )
    return configurations.run(options, lambda text: print(text, file=sys.stderr, flush=True))


def _add_bench_chart(subparsers: Subparsers) -> None:
    help = "draw recorded rows of bench generate"
    parser = subparsers.add_parser("chart", help=help, description=help)
    parser.add_argument(
        "--rows", default="benchmarks/results/generate.jsonl", metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--model", default="llama-3-8b", help="whose rows (default: %(default)s)")
    parser.add_argument("--out", required=True, metavar="FILE", help=".svg, .png or .pdf")
    parser.set_defaults(run=_bench_chart)


def _bench_chart(arguments: argparse.Namespace) -> int:
    from kvpass.bench.chart import draw

    draw(Path(arguments.rows), arguments.model, Path(arguments.out))
    return 0


def _add_benchmark(subparsers: Subparsers, name: str, help: str, rounds: bool = True) -> _Parser:
    """A parser with what all benchmarks take, and ``--rounds`` for those of single kernels."""
    parser = subparsers.add_parser(name, help=help, description=help)
    parser.add_argument("--device", default="auto", help="cuda, cpu (slow, for tests) or auto")
    if rounds:
        parser.add_argument("--rounds", type=int, default=20, metavar="N", help="how often each variant is timed")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines instead of tables")
    parser.add_argument("--record", action="store_true", help=f"append the rows to benchmarks/results/{name}.jsonl")
    parser.add_argument("--out", metavar="FILE", help="append the rows to FILE")
    return parser


def _add_shapes(parser: _Parser, keys: str) -> None:
    """What the benchmarks of single kernels take."""
    parser.add_argument("--shape", nargs="+", metavar="SHAPE", help=f"names (an unknown one lists them), or {keys}")
    parser.add_argument("--formats", nargs="+", metavar="FORMAT", help="names, or pairs for K and V: fp8_e4m3/nvfp4")
    parser.add_argument("--dtype", default="bf16", help="of query, K and V: bf16, fp16 or fp32")


def _device(name: str) -> torch.device:
    if name not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device is {name!r}; allowed: auto, cuda, cpu")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("--device is cuda, but torch sees no CUDA GPU; use --device cpu for a small check")
    return torch.device("cuda", torch.cuda.current_device()) if available and name != "cpu" else torch.device("cpu")


COMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    _add_formats,
    _add_env,
    _add_plan,
    _add_calibrate,
    _add_eval,
    _add_tune,
    _add_bench,
)
BENCHMARKS: tuple[Callable[[Subparsers], None], ...] = (
    _add_bench_attention,
    _add_bench_store,
    _add_bench_generate,
    _add_bench_capacity,
    _add_bench_configurations,
    _add_bench_chart,
)

if __name__ == "__main__":
    sys.exit(main())
