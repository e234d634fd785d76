"""One tensor scale, and how the scales of a model are read: our JSON schema, SGLang's, and checkpoints."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from kvpass.checkpoint import Checkpoint
from kvpass.formats import KVFormat, get_format, unknown_name

VERSION = 1
SIDES = ("key", "value")
_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e4m3fnuz": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
# Engines double the scales of a checkpoint on hardware whose e4m3 is the fnuz variant, which reaches half as far. For
# e4m3fn that never saturates, and costs one of fifteen binades at the small end.
FNUZ_FACTOR = 2.0
# Times any block scale, and that times any midpoint of e2m1, these are normal numbers, also as another format's scale.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100


@dataclass(frozen=True)
class Scale:
    """Scale of one layer's K, or of its V.

    Attributes:
        scale: One value for all heads, or one per KV head; empty where ``format`` has no tensor scale.
        format: Name of the format it was made for. With a centre it is a centred one: ``+centred`` is added if missing.
        centre: ``[kv_heads][head_dim]``: what was subtracted from every token before ``scale`` was measured.

    Raises:
        ValueError: A scale that is not from ``2**-100`` to ``2**100``, an unknown format, a ragged centre.
    """

    scale: tuple[float, ...] = (1.0,)
    format: str = "fp8_e4m3"
    centre: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.centre is not None and not get_format(self.format).centred:
            object.__setattr__(self, "format", get_format(f"{self.format}+centred").name)
        if bool(self.scale) != get_format(self.format).tensor_scale:
            what = "needs a scale" if not self.scale else "has no tensor scale, so it takes none"
            raise ValueError(f"format {self.format!r} {what}; got {self.scale}")
        for value in self.scale:
            if not _SMALLEST <= value <= _LARGEST:  # false for NaN
                raise ValueError(f"scale is {value}; it must be positive, from 2**-100 to 2**100")
        if self.centre is not None:
            if len({len(row) for row in self.centre}) != 1 or not all(map(math.isfinite, sum(self.centre, ()))):
                raise ValueError("centre must be finite, with as many values for each head")

    def tensor(self, fmt: KVFormat) -> torch.Tensor | None:
        """The scale to store ``fmt`` with: ``[1]`` or ``[kv_heads]`` float32; None where ``fmt`` has none.

        Another format than the scale was made for gets it by the ratio of ranges. Where ``fmt`` does not subtract the
        centre, the scale is widened by ``max|centre| / range``, with which nothing saturates.

        Raises:
            ValueError: ``fmt`` needs a scale, and this was made for a format without one; or one of the two is rotated,
                and the other is not, so that their ranges have nothing to do with each other.
        """
        if not fmt.tensor_scale:
            return None
        if not self.scale:
            raise ValueError(f"scales made for {self.format!r} hold none for {fmt.name!r}; calibrate for {fmt.name!r}")
        scale, made_for = torch.tensor(self.scale, dtype=torch.float32), get_format(self.format)
        if made_for.rotated != fmt.rotated:
            raise ValueError(
                f"scales made for {self.format!r} do not fit {fmt.name!r}, as only one of them is rotated; "
                f"calibrate for {fmt.name!r}"
            )
        if self.centre is not None and not fmt.centred:
            scale = scale + torch.tensor(self.centre, dtype=torch.float32).abs().amax(-1) / made_for.range
        return scale if made_for.range == fmt.range else scale * (made_for.range / fmt.range)

    def centre_tensor(self, fmt: KVFormat) -> torch.Tensor | None:
        """The centre to store ``fmt`` with, ``[kv_heads, head_dim]`` float32; None where there is none, or no need."""
        if self.centre is None or not fmt.centred:
            return None
        return torch.tensor(self.centre, dtype=torch.float32)


class ModelScales(NamedTuple):
    """What a file says.

    Attributes:
        layers: Scales of K and V by layer.
        model_type, tp_size, notes: As in :class:`kvpass.KVScales`.
    """

    layers: dict[int, tuple[Scale, Scale]]
    model_type: str | None = None
    tp_size: int = 1
    notes: tuple[tuple[str, Any], ...] = ()


def read_json(path: Path, source: str) -> Any:
    """The data of a JSON file; ``ValueError`` naming ``source`` if it is not valid or an object repeats a key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{source}: key {sorted(twice)[0]!r} occurs twice")
        return dict(pairs)

    try:
        return json.loads(path.read_text(), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it appears complete or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def from_own(values: Mapping[str, Any], source: str) -> ModelScales:
    """Read our own schema (``scales.schema.json``); ``ValueError`` names file, layer and value."""
    if values["kvpass_scales"] != VERSION:
        raise ValueError(f"{source} has version {values['kvpass_scales']!r} of the schema; this kvpass reads {VERSION}")
    _check_keys(values, ["kvpass_scales", "model_type", "tp_size", "calibration", "layers"], source)
    layers = {}
    for name, sides in _mapping(values.get("layers"), f"{source}: 'layers'").items():
        where = f"{source}: layer {name}"
        index = _index(name, where)
        _check_keys(_mapping(sides, where), list(SIDES), where)
        found = {}
        for side in SIDES:
            here = f"{where}, {side}"
            found[side] = _own_scale(_mapping(sides.get(side), here), here)
        layers[index] = (found["key"], found["value"])
    notes = tuple(_mapping(values.get("calibration", {}), f"{source}: 'calibration'").items())
    return ModelScales(layers, values.get("model_type"), values.get("tp_size", 1), notes)


def _own_scale(entry: Mapping[str, Any], where: str) -> Scale:
    """One side of one layer of our schema."""
    _check_keys(entry, ["format", "scale", "centre"], where)
    if not isinstance(entry.get("format"), str):
        _fail(where, f"format is {entry.get('format')!r}; it must be a format's name")
    scale, centre = entry.get("scale", []), entry.get("centre")
    if centre is not None and not (isinstance(centre, list) and all(isinstance(row, list) for row in centre)):
        _fail(where, "centre must be a list with a list of numbers for each head")
    numbers = scale if isinstance(scale, list) else [scale]
    if not all(_is_number(x) for row in [numbers, *(centre or [])] for x in row):
        _fail(where, f"scale is {scale!r}; scale and centre must be numbers")
    rows = None if centre is None else tuple(tuple(map(float, row)) for row in centre)
    try:
        return Scale(tuple(map(float, numbers)), entry["format"], rows)
    except ValueError as error:
        _fail(where, str(error))


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def from_sglang(values: Mapping[str, Any], source: str) -> list[ModelScales]:
    """Read SGLang's schema, rank by rank; ``ValueError`` names file, rank, layer and value."""
    _check_keys(values, ["model_type", "kv_cache"], source)
    cache = _mapping(values["kv_cache"], f"{source}: 'kv_cache'")
    _check_keys(cache, ["dtype", "scaling_factor"], f"{source}: 'kv_cache'")
    dtype = cache.get("dtype")
    if dtype not in _DTYPES:
        raise ValueError(f"{source}: " + unknown_name("dtype", dtype, list(_DTYPES)))
    ranks = {
        _index(rank, f"{source}: rank {rank}"): _mapping(layers, f"{source}: rank {rank}")
        for rank, layers in _mapping(cache.get("scaling_factor"), f"{source}: 'scaling_factor'").items()
    }
    if sorted(ranks) != list(range(len(ranks))) or not ranks:
        raise ValueError(f"{source} has scales for ranks {sorted(ranks)}; they must count from 0 without a gap")
    if len({frozenset(layers) for layers in ranks.values()}) != 1:
        raise ValueError(f"{source}: the ranks do not have scales for the same layers")
    factor = FNUZ_FACTOR if dtype.endswith("fnuz") else 1.0
    made = []
    for rank in sorted(ranks):
        found = {}
        for name, number in ranks[rank].items():
            where = f"{source}: layer {name} of rank {rank}"
            if not _is_number(number):
                _fail(where, f"scale is {number!r}; it must be a number")
            try:
                scale = Scale((float(number) * factor,), _DTYPES[dtype])
            except ValueError as error:
                _fail(where, str(error))
            found[_index(name, where)] = (scale, scale)
        made.append(ModelScales(found, values.get("model_type"), len(ranks)))
    return made


def to_sglang(ranks: Sequence[Mapping[int, Scale]], model_type: str | None) -> dict[str, Any]:
    """Data in SGLang's schema: for each rank the scale of each layer. What cannot be expressed is not checked here."""
    factors = {
        str(rank): {str(index): scale.scale[0] for index, scale in layers.items()} for rank, layers in enumerate(ranks)
    }
    dtype = next(name for name, fmt in _DTYPES.items() if fmt == next(iter(ranks[0].values())).format)
    head: dict[str, Any] = {"model_type": model_type} if model_type else {}
    return head | {"kv_cache": {"dtype": dtype, "scaling_factor": factors}}


def from_checkpoint(checkpoint: Checkpoint) -> ModelScales:
    """Assemble the scales of a checkpoint; errors and the one warning are those of ``KVScales.from_checkpoint``."""
    found, declared, folder = checkpoint.scale_tensors(), checkpoint.declared, str(checkpoint.folder)
    if not found and declared is None:
        raise ValueError(
            f"{folder} holds no KV scales and says nothing of a quantized KV cache; `kvpass calibrate` makes scales"
        )
    formats = (declared.key, declared.value) if declared else ("fp8_e4m3", "fp8_e4m3")
    factor = FNUZ_FACTOR if declared and declared.fnuz else 1.0
    layers, ones = {}, []
    for index in checkpoint.layers or sorted(found):
        tensors, sides, centres = found.get(index, {}), [], []
        for kind in ("k_scale", "v_scale"):
            entry = tensors.get(kind) or tensors.get("kv_scale")
            values = checkpoint.numbers(entry, index) if entry else None
            if values and min(values) <= 0 < max(values):
                raise ValueError(f"{entry}: layer {index} has scales for some of its heads only: {values}")
            sides.append(tuple(v * factor for v in values) if values and min(values) > 0 else None)
            centre = tensors.get(kind.replace("scale", "bias"))
            centres.append(checkpoint.rows(centre, index) if centre else None)
        if (sides[0] is None) != (sides[1] is None):
            name, other = ("k_scale", "v_scale") if sides[0] is None else ("v_scale", "k_scale")
            raise ValueError(f"layer {index} has a {other} in {tensors.get(other) or folder}, and no positive {name}")
        if sides[0] is None and any(get_format(name).tensor_scale for name in formats):
            ones.append(index)
        try:
            key, value = (
                Scale((side or (1.0,)) if get_format(name).tensor_scale else (), name, centre)
                for side, name, centre in zip(sides, formats, centres, strict=True)
            )
        except ValueError as error:
            raise ValueError(f"{folder}: layer {index}: {error}") from error
        layers[index] = (key, value)
    if ones:
        reach = " and ".join(sorted({f"±{get_format(name).range:g}" for name in formats}))
        warnings.warn(
            f"{folder} has no positive K and V scales for layers {ranges(ones)}; they get 1.0. What lies beyond "
            f"{reach} there saturates and small values lose bits, so accuracy suffers for models with large or very "
            "small K or V; `kvpass calibrate` measures the right scales",
            stacklevel=3,
        )
    return ModelScales(layers, checkpoint.model_type)


def _mapping(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        _fail(where, f"expected a mapping, got {values!r}")
    return values


def _check_keys(values: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in values:
        if key not in known:
            _fail(where, unknown_name("key", key, known))


def _index(name: Any, where: str) -> int:
    if not str(name).isascii() or not str(name).isdigit() or str(int(name)) != str(name):
        _fail(where, f"{name!r} is no index")
    return int(name)


def _fail(where: str, message: str) -> NoReturn:
    raise ValueError(f"{where}: {message}")


def ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
