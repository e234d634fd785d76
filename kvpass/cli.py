"""The ``kvpass`` command: what formats there are, what this machine runs, calibration, and benchmarks.

A subcommand is one function that adds its parser and sets ``run``, listed in ``COMMANDS`` (or ``BENCHMARKS``).
Bad input is one line on standard error and exit code 2; a benchmark whose numeric check fails exits with 1.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

import kvpass
from kvpass.config import PRESETS, KVQuantConfig
from kvpass.formats import format_names, get_format

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
        scales = [f"{fmt.block_scale} per {fmt.block}"] if fmt.block else []
        scales += ["fp32 per KV head"] if fmt.tensor_scale else []
        row = [name, fmt.codec, ", ".join(scales) or "none", f"{fmt.bits_per_value:g}"]
        try:
            fmt.check_head_dim(head_dim)
        except ValueError:
            rows.append((*row, f"not with head_dim {head_dim}", "", ""))
            continue
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


def _add_benchmark(subparsers: Subparsers, name: str, help: str) -> _Parser:
    """A parser with what all benchmarks take."""
    parser = subparsers.add_parser(name, help=help, description=help)
    parser.add_argument("--device", default="auto", help="cuda, cpu (slow, for tests) or auto")
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


COMMANDS: tuple[Callable[[Subparsers], None], ...] = (_add_formats, _add_env, _add_calibrate, _add_bench)
BENCHMARKS: tuple[Callable[[Subparsers], None], ...] = (_add_bench_attention, _add_bench_store)

if __name__ == "__main__":
    sys.exit(main())
