"""``tune``: a format for each layer's K and V, chosen by measured sensitivity to meet a budget of bits per value.

1. **Sensitivity.** The sample runs through the model once exactly, and once for each layer, side and candidate format
   with that alone quantized: one forward pass a window, in which the side's K or V goes through its storage before
   attention reads it. The KL of the predictions is the error of that choice.
2. **Choice.** :mod:`kvpass.accuracy.selection`.
3. **Check.** :func:`kvpass.evaluate` runs the chosen configuration as a whole over text behind the sample, beside each
   candidate alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvpass.accuracy.results import Evaluation, plain
from kvpass.accuracy.selection import Option, Point, choose, frontier, uniform
from kvpass.accuracy.statistics import compare
from kvpass.accuracy.storage import BITS_AT, bits_per_value, kept_fields, layer_config, stored
from kvpass.accuracy.teacher_forced import check_window, evaluate
from kvpass.bench.record import table
from kvpass.cache import QuantizedCache
from kvpass.calibrate import fingerprint
from kvpass.config import ConfigLike, KVQuantConfig
from kvpass.formats import get_format
from kvpass.scale_files import write_whole
from kvpass.windows import Data, WindowLayer, cache_argument, token_batches

# What K and V can be stored in unless told otherwise. bf16 costs a bf16 model no error, and nothing to measure.
DEFAULT_CANDIDATES = ("nvfp4+centred+rotated+4over6", "fp8_e4m3+centred+rotated", "bf16")
DEFAULT_VALUE_CANDIDATES = ("nvfp4+4over6", "fp8_e4m3", "bf16")
DEFAULT_BASE = KVQuantConfig(keep_first=4, keep_last=8)
_SIDES = ("K", "V")
_ROWS_SHOWN = 12


@dataclass(frozen=True)
class Tuning:
    """What :func:`kvpass.tune` found; print it for tables.

    Attributes:
        config: The chosen configuration.
        budget: Bits per value asked for.
        bits: Bits per value that a cache of :data:`kvpass.accuracy.storage.BITS_AT` tokens occupies.
        predicted: KL of ``config``, as the sum of the errors of its choices.
        sensitivity: By layer and side (K, V): what each candidate costs alone.
        frontier: The choices for every budget.
        uniform: By name, each candidate for all layers and sides.
        evaluation: Of ``config`` (called ``tuned``) and each candidate, measured.
    """

    config: KVQuantConfig
    budget: float
    bits: float
    predicted: float
    sensitivity: tuple[tuple[tuple[Option, ...], tuple[Option, ...]], ...]
    frontier: tuple[Point, ...]
    uniform: tuple[tuple[str, Point], ...]
    evaluation: Evaluation

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data for JSON."""
        found: dict[str, Any] = plain(
            {
                "config": self.config.to_dict(),
                "budget": self.budget,
                "bits": self.bits,
                "predicted_divergence": self.predicted,
                "sensitivity": [dict(zip(_SIDES, layer, strict=True)) for layer in self.sensitivity],
                "frontier": self.frontier,
                "uniform": dict(self.uniform),
                "evaluation": self.evaluation.to_dict(),
            }
        )
        return found

    def to_json(self, path: str | Path) -> None:
        """Write :meth:`to_dict`."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    def __str__(self) -> str:
        measured = self.evaluation["tuned"].overall
        return "\n".join(
            [
                f"{self.bits:.3f} bits per value at {BITS_AT} tokens, of {self.budget:g} allowed; KL predicted "
                f"{self.predicted:.4f}, measured {measured.divergence.value:.4f}\n",
                self._choices(),
                "\nbits against predicted KL (errors of single choices added up)\n",
                self._frontier(),
                "\nmeasured, on text behind the sample\n",
                str(self.evaluation),
            ]
        )

    def _choices(self) -> str:
        """Layers in rows of the same choice."""
        rows: dict[tuple[str, str], list[int]] = {}
        for index in range(len(self.sensitivity)):
            layer = self.config.layer(index)
            rows.setdefault((layer.key.name, layer.value.name), []).append(index)
        return table(("layers", "K", "V"), [(" ".join(map(str, which)), *names) for names, which in rows.items()])

    def _frontier(self) -> str:
        every = max(1, -(-len(self.frontier) // _ROWS_SHOWN))
        shown = {*self.frontier[::every], self.frontier[-1]}
        named = [("", point) for point in shown] + [(f"{name} alone", point) for name, point in self.uniform]
        rows = [(f"{p.bits:.3f}", f"{p.error:.4f}", name) for name, p in sorted(named, key=lambda entry: entry[1][:2])]
        return table(("bits", "KL", ""), rows)


def tune(
    model: nn.Module,
    data: Data,
    bits: float,
    *,
    tokenizer: Any = None,
    candidates: Sequence[str] | None = None,
    value_candidates: Sequence[str] | None = None,
    base: ConfigLike | None = None,
    window: int = 2048,
    sample_tokens: int = 4096,
    check_tokens: int = 16384,
    batch_size: int = 1,
    resume: str | Path | None = None,
    save_every: float = 30.0,
    progress: bool = True,
) -> Tuning:
    """Choose a format for each layer's K and V.

    Args:
        model: A Hugging Face causal LM that :class:`kvpass.QuantizedCache` supports, on any device.
        data: As :func:`kvpass.evaluate` takes it: the sample, and behind it the text to check with.
        bits: Budget: bits per value of K and V, all layers together, that a cache of 2,048 tokens may occupy.
        tokenizer: The model's; needed for text.
        candidates: Formats to choose from; None for :data:`DEFAULT_CANDIDATES` and, of V,
            :data:`DEFAULT_VALUE_CANDIDATES`.
        value_candidates: Those of V, where they differ.
        base: A configuration whose scales, and whatever else is no format, the result shall have; None for
            :data:`DEFAULT_BASE` where the candidates are the default ones, and for the defaults otherwise.
        window: Tokens that attend to each other.
        sample_tokens: To measure sensitivity on.
        check_tokens: To measure the result on, behind the sample.
        batch_size: Windows run at once.
        resume: A file in which measured errors are kept while this runs. A run that was interrupted goes on from it;
            it is removed in the end.
        save_every: Seconds between two savings.
        progress: Whether to show bars on standard error.

    Raises:
        ValueError: An unknown format, a budget that the candidates cannot meet, too little text, a ``resume`` of other
            settings.
        NotImplementedError: A kind of model that is not supported.
    """
    if isinstance(data, Iterator):
        raise ValueError("tune reads the data more than once, and an iterator can be read once; give a list or a path")
    if value_candidates is None:
        value_candidates = DEFAULT_VALUE_CANDIDATES if candidates is None else candidates
    sides = (tuple(DEFAULT_CANDIDATES if candidates is None else candidates), tuple(value_candidates))
    if not all(sides):
        raise ValueError("no candidates to choose from")
    check_window(model, window)
    model_config: Any = cast(Any, model).config
    if base is None:
        base = DEFAULT_BASE if candidates is None else KVQuantConfig()
    kept = kept_fields(KVQuantConfig.of(base))
    run = _Sensitivity(model, sides, kept)
    costs = [{name: run.bits(side, name) for name in names} for side, names in enumerate(sides)]
    free = [[Option(name, cost, 0.0) for name, cost in side.items()] for side in costs]
    choose(free * run.layers, bits)  # raises what it can before anything is measured
    behind = token_batches(data, tokenizer, window, batch_size, check_tokens, sample_tokens)
    if not any(ids.shape[1] > 1 for ids in behind):
        raise ValueError(f"the text is too short: the sample of {sample_tokens} tokens leaves none to check with")

    settings = (sides, kept, window, sample_tokens, batch_size)
    run.path = None if resume is None else Path(resume)
    run.load(fingerprint(model, KVQuantConfig(), *map(repr, settings)))
    batches = token_batches(data, tokenizer, window, batch_size, sample_tokens)
    tokens = run.measure(batches, save_every, progress)

    options = [
        tuple(Option(name, costs[side][name], run.error(layer, side, name) / tokens) for name in sides[side])
        for layer in range(run.layers)
        for side in range(2)
    ]
    point = choose(options, bits)
    config = _config(point.formats, kept)
    alone = uniform(options, [name for name in sides[0] if name != "bf16"])
    evaluation = evaluate(
        model,
        data,
        {"tuned": config, **{name: KVQuantConfig.from_dict({"format": name, **kept}) for name in alone}},
        tokenizer=tokenizer,
        window=window,
        max_tokens=check_tokens,
        skip_tokens=sample_tokens,
        batch_size=batch_size,
        layers=False,
        progress=progress,
    )
    if run.path is not None:
        run.path.unlink(missing_ok=True)
    return Tuning(
        config=config,
        budget=bits,
        bits=bits_per_value(model_config, config),
        predicted=point.error,
        sensitivity=tuple(zip(options[0::2], options[1::2], strict=True)),
        frontier=tuple(frontier(options)),
        uniform=tuple(alone.items()),
        evaluation=evaluation,
    )


class _Sensitivity:
    """The KL of each layer's side in each candidate format, as it is measured.

    Attributes:
        layers: How many the model has.
        path: Where errors are kept; None for nowhere.
        batches: What tells the batches of this sample from others: a hash of their tokens.
        errors: Sums over tokens, by ``<batch>.<layer>.<side>.<format>``.
    """

    def __init__(self, model: nn.Module, sides: tuple[tuple[str, ...], ...], kept: dict[str, Any]) -> None:
        self.model, self.sides, self.kept = model, sides, kept
        self.model_config: Any = cast(Any, model).config
        for name in {*sides[0], *sides[1]}:
            get_format(name)
        self.layers = len(QuantizedCache(self.model_config, self._config(0, 0, sides[0][0]), max_cache_len=1).layers)
        self.path: Path | None = None
        self.batches: list[str] = []
        self.errors: dict[str, float] = {}

    def bits(self, side: int, name: str) -> float:
        """Bits per value of one side in a format: what a cache takes with it, less what the other side takes."""
        together = bits_per_value(self.model_config, self._config(0, side, name))
        return 2 * together - bits_per_value(self.model_config, self._config(0, side, "bf16"))

    def error(self, layer: int, side: int, name: str) -> float:
        """Summed over tokens."""
        return sum(self.errors[f"{batch}.{layer}.{side}.{name}"] for batch in self.batches)

    def measure(self, batches: Iterator[Tensor], save_every: float, progress: bool) -> int:
        """Measure what was not measured before, and return how many tokens there are."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        device, tokens, saved = next(self.model.parameters()).device, 0, time.monotonic()
        was_training = self.model.training
        self.model.eval()
        probes = [(layer, side, name) for layer in range(self.layers) for side in range(2) for name in self.sides[side]]
        try:
            for number, ids in enumerate(batches):
                if ids.shape[1] < 2:
                    continue
                batch = hashlib.blake2b(ids.numpy().tobytes(), digest_size=8).hexdigest()
                self.batches.append(batch)
                ids = ids.to(device)
                tokens += ids[:, 1:].numel()
                exact = self._logits(ids)
                for layer, side, name in tqdm(probes, desc=f"sensitivity, batch {number + 1}", disable=not progress):
                    key = f"{batch}.{layer}.{side}.{name}"
                    if key not in self.errors:
                        lossless = name == "bf16" and exact.dtype == torch.bfloat16
                        logits = exact if lossless else self._logits(ids, layer, side, name)
                        self.errors[key] = float(compare(exact, logits, ids[:, 1:])[..., 2].double().sum())
                    if self.path is not None and time.monotonic() - saved >= save_every:
                        self.save()
                        saved = time.monotonic()
        finally:
            self.model.train(was_training)
        if not tokens:
            raise ValueError("the text is too short: no window has a token to predict from another")
        return tokens

    def load(self, mark: str) -> None:
        """Go on from ``path``, if there is such a file. ``mark`` tells runs apart."""
        self.mark = mark
        if self.path is None or not self.path.exists():
            return
        try:
            values = json.loads(self.path.read_text())
            self.errors = dict(values["errors"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is not the state of a tuning: {error!r}") from error
        if values.get("mark") != mark:
            raise ValueError(
                f"{self.path} belongs to another model or other settings; remove it, or use those settings"
            )

    def save(self) -> None:
        assert self.path is not None
        write_whole(self.path, json.dumps({"mark": self.mark, "errors": self.errors}))

    @torch.no_grad()
    def _logits(self, ids: Tensor, layer: int = -1, side: int = 0, name: str = "bf16") -> Tensor:
        """Logits for all tokens but the last, with one side of one layer in a format; exact where ``layer`` is -1."""
        layers: list[Any] = [WindowLayer(lambda key, value: (key, value)) for _ in range(self.layers)]
        if layer >= 0:
            config = layer_config(self.model_config, self._config(layer, side, name), layer)

            def read(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
                both = stored(config, key, value)
                return (both[0], value) if side == 0 else (key, both[1])

            layers[layer] = WindowLayer(read)
        arguments = {cache_argument(self.model): Cache(layers=layers), "use_cache": True}
        logits: Tensor = self.model(input_ids=ids, **arguments).logits[:, :-1]
        return logits

    def _config(self, layer: int, side: int, name: str) -> KVQuantConfig:
        names = (name, "bf16") if side == 0 else ("bf16", name)
        return KVQuantConfig.from_layers({layer: names}, **self.kept)


def _config(formats: Sequence[str], kept: dict[str, Any]) -> KVQuantConfig:
    """From the formats of K and V of each layer in turn."""
    pairs = zip(formats[0::2], formats[1::2], strict=True)
    return KVQuantConfig.from_layers(dict(enumerate(pairs)), **kept)
