"""``calibrate``: measure the tensor scales of a model's KV cache on sample text.

The text runs through the model in windows, each with a cache that stores nothing and looks at the K and V it is given.
What is kept between windows are a few numbers per layer and head, so memory does not grow with the text:

=================  ====================================================================================================
``amax``           the largest magnitude: ``scale = amax / range`` of the format, with which nothing here saturates
``percentile``     a histogram of magnitudes, 64 bins an octave: the scale at which that percentage does not saturate,
                   at most 1/64 larger
``least_squares``  after a first pass for amax a second one: the squared error of storing K and V, for ``amax / range``
                   and eight scales an octave from 0.3 to 2 times it, powers of two among them; the least wins
=================  ====================================================================================================

The first two are rounded up to a power of two unless told otherwise: see :func:`calibrate`.

A centred format also gets its centres: the mean over the first windows. Everything is measured on what is stored then,
K and V less their centre and rotated where the format says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import sys
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvpass import reference
from kvpass.cache import QuantizedCache
from kvpass.config import PRESETS, ConfigLike, KVQuantConfig
from kvpass.devices import ranks_of
from kvpass.formats import KVFormat, format_names, unknown_name
from kvpass.layers import QuantizedLayer
from kvpass.pretrained import add_model_arguments, load_model
from kvpass.scale_files import Scale
from kvpass.scales import KVScales, LayerScales
from kvpass.windows import Data, WindowLayer, cache_argument, token_batches

METHODS = ("amax", "percentile", "least_squares")
GRANULARITIES = ("tensor", "head")
# Bins of the histogram: six bits of mantissa, exponents from 2**-32 to 2**32, told apart by the bits of the number.
_BIN_SHIFT, _FIRST_BIN, _BINS = 17, (127 - 32) << 6, 64 << 6
_STEPS = range(-13, 9)  # eighths of an octave
_SEARCH_TOKENS = 128  # of each window, evenly spread, are stored by way of trial with each factor


def calibrate(
    model: nn.Module,
    data: Data,
    format: ConfigLike = "fp8_e4m3",
    *,
    tokenizer: Any = None,
    method: str = "amax",
    per: str = "tensor",
    percentile: float = 99.99,
    power_of_two: bool = True,
    window: int = 2048,
    batch_size: int = 1,
    max_tokens: int | None = None,
    resume: str | Path | None = None,
    save_every: float = 30.0,
    progress: bool = True,
) -> KVScales:
    """Measure scales for every layer's K and V.

    Args:
        model: A Hugging Face causal LM that :class:`kvpass.QuantizedCache` supports, on any device.
        data: A text, the path of a text file (read piece by piece), texts, or tensors of token ids
            (``[length]`` or ``[batch, length]`` int64).
        format: What the scales are for: a format's name, or a configuration with a format for each layer.
        tokenizer: The model's; needed for text.
        method: ``amax``, ``percentile`` or ``least_squares``.
        per: ``tensor`` for one scale per layer and side, ``head`` for one per KV head.
        percentile: Of the magnitudes, above 0 and at most 100; for the method of that name.
        power_of_two: Round the scales of ``amax`` and ``percentile`` up to powers of two. A power of two moves no
            rounding point of a floating-point code, so that no value is stored worse than with 1.0 (but for values
            that a percentile leaves out); what it costs is at most one of the binades below ``amax``.
        window: Tokens that attend to each other.
        batch_size: Windows run at once.
        max_tokens: Where to stop; None for all of ``data``.
        resume: A file in which the state is kept while this runs. A run that was interrupted goes on from it, to the
            same result; it is removed in the end.
        save_every: Seconds between two savings of the state.
        progress: Whether to show a bar on standard error.

    Raises:
        ValueError: A bad argument; data without a token; K or V with NaN or infinity; a ``resume`` of another
            calibration.
        NotImplementedError: A kind of model that is not supported, or one that is split among ranks.
    """
    _check_arguments(data, tokenizer, method, per, percentile, window, batch_size)
    if (ranks := ranks_of(model)).size > 1:
        raise NotImplementedError(
            f"the model is split among {ranks.size} tensor-parallel ranks, each of which would measure its own heads; "
            "calibrate the whole model, and enable gives each rank its scales"
        )
    config = KVQuantConfig.of(format)
    model_config: Any = model.config
    text_config = model_config.get_text_config(decoder=True)
    probe = QuantizedCache(model_config, dataclasses.replace(config, scales=None), max_cache_len=1)
    if any(type(layer) is not QuantizedLayer for layer in probe.layers):
        raise NotImplementedError(f"{text_config.model_type}: a model with linear attention cannot be calibrated yet")
    formats = [(layer.key_format, layer.value_format) for layer in cast("list[QuantizedLayer]", probe.layers)]
    if not any(fmt.tensor_scale or fmt.centred for pair in formats for fmt in pair):
        raise ValueError(f"{config} has no format with a tensor scale or a centre, so there is nothing to calibrate")
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest and window > longest:
        raise ValueError(f"window is {window}, and the model has {longest} positions")

    run = _Run(model, formats, method, per, fingerprint(model, config, method, per, window, batch_size, max_tokens))
    path = None if resume is None else Path(resume)
    if path is not None and path.exists():
        run.load(path)
    was_training = model.training
    model.eval()
    try:
        for stage in range(run.stage, 2 if method == "least_squares" else 1):
            if stage > run.stage:
                run.next_stage()
            batches = token_batches(data, tokenizer, window, batch_size, max_tokens)
            run.read(batches, path, save_every, max_tokens, progress)
    finally:
        model.train(was_training)
    layers = []
    for index in range(len(formats)):
        key, value = (run.scale(index, side, percentile, power_of_two) for side in range(2))
        layers.append(LayerScales(index, key, value))
    notes: dict[str, Any] = {"method": method, "per": per, "tokens": run.tokens, "window": window}
    notes |= {"percentile": percentile} if method == "percentile" else {}
    notes |= {"power_of_two": power_of_two} if method != "least_squares" else {}
    if path is not None:
        path.unlink(missing_ok=True)
    return KVScales(tuple(layers), text_config.model_type, source="calibration", notes=tuple(notes.items()))


class _Run:
    """The state of one calibration.

    Attributes:
        state: Statistics by name, ``<layer>.<side>.<what>``: ``centre`` ``[kv_heads, head_dim]`` float32, ``amax``
            ``[kv_heads]`` float32, ``histogram``
            ``[kv_heads, bins]`` int64, ``error`` ``[candidates, kv_heads]`` float64.
        stage: 0 while ranges are measured, 1 while scales are tried.
        batches, tokens: Read in this stage.
    """

    def __init__(
        self, model: nn.Module, formats: list[tuple[KVFormat, KVFormat]], method: str, per: str, fingerprint: str
    ) -> None:
        self.model, self.formats, self.method, self.per, self.fingerprint = model, formats, method, per, fingerprint
        self.state: dict[str, Tensor] = {}
        self.stage = self.batches = self.tokens = 0
        self.digest = ""
        self.cache_argument = cache_argument(model)
        self.arguments: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self.arguments["logits_to_keep"] = 1

    def read(
        self, batches: Iterator[Tensor], path: Path | None, save_every: float, total: int | None, progress: bool
    ) -> None:
        """Observe every batch of this stage that was not observed before an interruption."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        device = next(self.model.parameters()).device
        digest, done, saved = hashlib.blake2b(), 0, time.monotonic()
        label = ("measuring", "searching")[self.stage]
        with tqdm(total=total, unit=" tokens", desc=label, disable=not progress, initial=self.tokens) as bar:
            for ids in batches:
                digest.update(ids.numpy().tobytes())
                done += 1
                if done <= self.batches:
                    if done == self.batches and digest.hexdigest() != self.digest:
                        raise ValueError(f"{path} was made with other data; remove it, or calibrate with that data")
                    continue
                observers = [functools.partial(self.observe, index) for index in range(len(self.formats))]
                cache = Cache(layers=[WindowLayer(observer) for observer in observers])
                with torch.no_grad():
                    self.model(input_ids=ids.to(device), **{self.cache_argument: cache}, **self.arguments)
                self.batches, self.digest = done, digest.hexdigest()
                self.tokens += ids.numel()
                bar.update(ids.numel())
                if path is not None and time.monotonic() - saved >= save_every:
                    self.save(path)
                    saved = time.monotonic()
        if done < self.batches:
            raise ValueError(f"{path} was made with more data than this; remove it, or calibrate with that data")
        if not done:
            raise ValueError("the data holds no tokens")
        for name, tensor in self.state.items():
            if name.endswith(("amax", "centre")) and not tensor.isfinite().all():
                layer, side = name.split(".")[:2]
                raise ValueError(f"layer {layer}: {'KV'[int(side)]} holds NaN or infinity; nothing can be calibrated")

    def observe(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take account of K and V of a layer, ``[batch, kv_heads, length, head_dim]``, and return them."""
        for side, x in enumerate((key, value)):
            self._observe_side(index, side, x)
        return key, value

    def _observe_side(self, index: int, side: int, x: Tensor) -> None:
        fmt, name = self.formats[index][side], f"{index}.{side}"
        x = x.detach().float()
        if fmt.centred:
            self.state.setdefault(f"{name}.centre", x.mean((0, 2)))
        if not fmt.tensor_scale:
            return
        x = reference.transform(x, fmt, self._centre(name, x.device))
        fmt = fmt.untransformed
        if self.stage == 1:
            self._try_scales(name, fmt, x)
            return
        amax = x.abs().amax((0, 2, 3))
        self.state[f"{name}.amax"] = torch.maximum(amax, self.state.get(f"{name}.amax", amax).to(amax.device))
        if self.method == "percentile":
            heads = x.shape[1]
            bins = (x.abs().view(torch.int32) >> _BIN_SHIFT) - _FIRST_BIN
            bins = bins.clamp(0, _BINS - 1) + torch.arange(heads, device=x.device).view(-1, 1, 1) * _BINS
            counts = torch.bincount(bins.flatten(), minlength=heads * _BINS).view(heads, _BINS)
            self._add(f"{name}.histogram", counts)

    def _try_scales(self, name: str, fmt: KVFormat, x: Tensor) -> None:
        x = x[:, :, :: -(-x.shape[2] // _SEARCH_TOKENS)]
        heads = x.shape[1]
        scales = self._candidates(name, fmt).to(x.device)
        # Each candidate is tried on heads of its own.
        tried = x.repeat(1, len(scales), 1, 1)
        buffers = fmt.allocate_like(tried, scale=scales.expand(-1, heads).flatten())
        reference.write(buffers, fmt, tried, torch.arange(x.shape[2], device=x.device))
        error = (reference.dequantize(buffers, fmt) - tried).double().square().sum((0, 2, 3))
        self._add(f"{name}.error", error.view(len(scales), heads))

    def _candidates(self, name: str, fmt: KVFormat) -> Tensor:
        """Scales to try, ``[candidates, kv_heads]`` or ``[candidates, 1]`` float32. A power of two rounds like 1.0
        does, so with the next one above ``amax / range`` the best is never worse than 1.0."""
        base = self._base(f"{name}.amax", fmt)
        eighths = torch.tensor(_STEPS, device=base.device).unsqueeze(1) + (base.log2() * 8).floor().long()
        fraction = torch.tensor([2.0 ** (n / 8) for n in range(8)], device=base.device)[eighths % 8]
        return torch.cat([base.unsqueeze(0), torch.ldexp(fraction, eighths.div(8, rounding_mode="floor"))])

    def _centre(self, name: str, device: torch.device | str = "cpu") -> Tensor | None:
        """``[kv_heads, head_dim]`` float32; None where the format is not centred."""
        centre = self.state.get(f"{name}.centre")
        return None if centre is None else centre.to(device)

    def _base(self, name: str, fmt: KVFormat) -> Tensor:
        """``amax / range``, ``[kv_heads]`` or ``[1]`` float32. A side that is zero throughout has nothing to scale."""
        amax = self.state[name] if self.per == "head" else self.state[name].amax(0, keepdim=True)
        return torch.where(amax == 0, 1.0, amax / fmt.range)

    def _add(self, name: str, amount: Tensor) -> None:
        self.state[name] = self.state[name].to(amount.device) + amount if name in self.state else amount

    def scale(self, index: int, side: int, percentile: float, power_of_two: bool) -> Scale:
        """The result for K (side 0) or V (side 1) of a layer."""
        fmt, name = self.formats[index][side], f"{index}.{side}"
        centre = self._centre(name)
        rows = None if centre is None else tuple(map(tuple, centre.tolist()))
        if not fmt.tensor_scale:
            return Scale((), fmt.name, rows)
        scale = self._base(f"{name}.amax", fmt).cpu()
        if not self.state[f"{name}.amax"].any():
            warnings.warn(f"layer {index}: {'KV'[side]} is zero throughout the data; its scale is 1.0", stacklevel=3)
            return Scale((1.0,), fmt.name, rows)
        if self.method == "percentile":
            counts = self.state[f"{name}.histogram"].cpu()
            counts = counts if self.per == "head" else counts.sum(0, keepdim=True)
            wanted = (counts.sum(1, keepdim=True).double() * percentile / 100).ceil().long()
            bins = torch.searchsorted(counts.cumsum(1), wanted).squeeze(1)  # the first that reaches what is wanted
            edges = (bins + 1 + _FIRST_BIN).int() << _BIN_SHIFT
            scale = torch.minimum(scale, edges.view(torch.float32) / fmt.range)
        if power_of_two and self.method != "least_squares":
            fraction, exponent = torch.frexp(scale)  # fraction is at least a half
            scale = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())
        if self.method == "least_squares":
            error = self.state[f"{name}.error"].cpu()
            error = error if self.per == "head" else error.sum(1, keepdim=True)
            scale = self._candidates(name, fmt).cpu().gather(0, error.argmin(0, keepdim=True)).squeeze(0)
        return Scale(tuple(scale.tolist()), fmt.name, rows)

    def next_stage(self) -> None:
        self.stage, self.batches, self.tokens, self.digest = self.stage + 1, 0, 0, ""

    def save(self, path: Path) -> None:
        """Write the state; the file is complete at every moment."""
        place = {"stage": self.stage, "batches": self.batches, "tokens": self.tokens, "digest": self.digest}
        metadata = {"fingerprint": self.fingerprint, "place": json.dumps(place)}
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        save_file({name: tensor.cpu().contiguous() for name, tensor in self.state.items()}, scratch, metadata)
        scratch.replace(path)

    def load(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                state = {name: file.get_tensor(name) for name in file.keys()}
        except Exception as error:
            raise ValueError(f"{path} is not the state of a calibration: {error}") from error
        if metadata.get("fingerprint") != self.fingerprint:
            raise ValueError(f"{path} belongs to another model or other settings; remove it, or use those settings")
        self.state = state
        for name, value in json.loads(metadata["place"]).items():
            setattr(self, name, value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass calibrate``."""
    add = parser.add_argument
    add_model_arguments(parser)
    add("--data", required=True, type=Path, help="text file, such as the model will be used for")
    add("--out", required=True, type=Path, help="a .json file, or a new folder for a copy of the checkpoint")
    names = ", ".join((*format_names(), *PRESETS))
    add("--format", default="fp8_e4m3", help=f"one of {names}, a format with suffixes, or a JSON or YAML configuration")
    add("--method", default="amax", choices=METHODS)
    add("--per", default="tensor", choices=GRANULARITIES, help="one scale per layer, or one per KV head")
    add("--percentile", default=99.99, type=float, help="for that method (default: %(default)s)")
    add("--exact", action="store_true", help="amax / range as it is, not rounded up to a power of two")
    add("--window", default=2048, type=int, help="tokens that attend to each other (default: %(default)s)")
    add("--batch-size", default=1, type=int, help="windows run at once (default: %(default)s)")
    add("--max-tokens", default=131072, type=int, help="where to stop in the text (default: %(default)s)")
    add("--schema", default="kvpass", choices=("kvpass", "sglang"), help="of a .json file")
    add("--layout", choices=("compressed-tensors", "modelopt"), help="of a checkpoint")
    add("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """``kvpass calibrate``: an interrupted run leaves its state beside ``--out``; the same command goes on from it."""
    is_json = args.out.suffix == ".json"
    if not args.data.is_file():
        raise ValueError(f"--data {args.data} is not a file")
    if not is_json and args.out.exists():
        raise ValueError(f"--out {args.out} exists; name a new folder, or a .json file")
    args.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    config = KVQuantConfig.parse(args.format)
    model, tokenizer = load_model(args)
    scales = calibrate(
        model,
        args.data,
        config,
        tokenizer=tokenizer,
        method=args.method,
        per=args.per,
        percentile=args.percentile,
        power_of_two=not args.exact,
        window=args.window,
        batch_size=args.batch_size,
        max_tokens=args.max_tokens,
        resume=args.out.with_name(f"{args.out.name}.partial"),
        progress=not args.quiet,
    )
    if is_json:
        (scales.shared() if args.schema == "sglang" else scales).to_json(args.out, schema=args.schema)
    else:
        scales.to_checkpoint(args.model, args.out, layout=args.layout)
    print(f"{args.out}: {scales}")
    return 0


def _check_arguments(
    data: Data, tokenizer: Any, method: str, per: str, percentile: float, window: int, batch_size: int
) -> None:
    for name, value, known in (("method", method, METHODS), ("granularity", per, GRANULARITIES)):
        if value not in known:
            raise ValueError(unknown_name(name, value, list(known)))
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile is {percentile}; it must be above 0 and at most 100")
    if window < 1 or batch_size < 1:
        raise ValueError(f"window is {window} and batch_size {batch_size}; both must be at least 1")
    if tokenizer is None and isinstance(data, (str, Path)):
        raise ValueError("text needs the model's tokenizer: calibrate(model, data, tokenizer=...)")
    if method == "least_squares" and isinstance(data, Iterator):
        raise ValueError("least_squares reads the data twice, and an iterator can be read once; give a list or a path")


def fingerprint(model: Any, config: KVQuantConfig, *settings: object) -> str:
    """Tells calibrations apart: the model's config, a few of its weights, and the settings."""
    digest = hashlib.blake2b()
    values = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    digest.update(json.dumps([values, config.to_dict(), settings], sort_keys=True, default=str).encode())
    for parameter in model.parameters():
        digest.update(parameter.detach().flatten()[:16].float().cpu().numpy().tobytes())
    return digest.hexdigest()


class _CallableModule(types.ModuleType):
    """``kvpass.calibrate`` is this module once it is imported, and the function before: both can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> KVScales:
        return calibrate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
