"""The model that a command is given: its arguments, and how it is loaded."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import torch


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """``MODEL``, ``--device`` and ``--dtype``."""
    parser.add_argument("model", metavar="MODEL", help="hub id or folder of a causal LM")
    parser.add_argument("--device", default=None, help="default: cuda where there is one")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model, in eval mode on its device, and its tokenizer.

    Raises:
        ValueError: There is no such model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    except OSError as error:
        raise ValueError(f"cannot load {args.model!r}: {error}") from error
    return model.to(device).eval(), tokenizer


def require(module: str, extra: str, purpose: str) -> None:
    """Raise ``ValueError`` where an optional ``module`` is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{purpose} needs {module}, which is not installed: pip install 'kvpass[{extra}]'")
