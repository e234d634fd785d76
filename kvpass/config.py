"""``KVQuantConfig``: the one user-facing configuration, and how it is read from names, dictionaries and files.

A file or dictionary has the fields of the class; only what differs from the defaults needs to be there::

    format: nvfp4+4over6     # of K and V; or a preset: fast, accurate, balanced, compact
    value_format: fp8_e4m3   # or apart
    keep_first: 4            # tokens in bf16, the first
    keep_last: 8             # and the newest
    skip_layers: [0, -1]     # kept in bf16
    layers:                  # later lines win
      "4:8": fp8_e4m3
      "*.layers.9.*": {key_format: fp8_e4m3, value_format: nvfp4}
    scales: kv.json          # beside this file; or the content of such a file
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpass.checkpoint import Checkpoint
from kvpass.formats import KVBuffers, KVFormat, check_centre, check_scale, format_names, get_format, unknown_name
from kvpass.scale_files import read_json, write_whole
from kvpass.scales import KVScales

_RANGE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+))?")
_PATTERN_CHARACTERS = set("*?[")


class LayerConfig(NamedTuple):
    """How one layer is stored.

    Attributes:
        key, value: Formats.
        key_scale, value_scale: Tensor scales, ``[1]`` or ``[kv_heads]`` float32; None for 1, or where the first tokens
            give it (:attr:`kvpass.formats.KVFormat.learns_scale`).
        key_centre, value_centre: ``[kv_heads, head_dim]`` float32; None where the first tokens give it.
        keep_first: First slots that are kept in bf16.
        keep_last: Newest slots that are kept in bf16.
        frequencies: Radians per position by which rotary embedding turns pairs of K's channels, where that is known
            (:func:`kvpass.architecture.rotary_frequencies`); a centre that the first tokens give depends on it.
    """

    key: KVFormat
    value: KVFormat
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    key_centre: torch.Tensor | None = None
    value_centre: torch.Tensor | None = None
    keep_first: int = 0
    keep_last: int = 0
    frequencies: tuple[float, ...] = ()

    @property
    def keep(self) -> int:
        """Slots that are kept in bf16."""
        return self.keep_first + self.keep_last

    def allocate_like(
        self, key: torch.Tensor, value: torch.Tensor, max_len: int | None = None
    ) -> tuple[KVBuffers, KVBuffers]:
        """Buffers for K and V, ``[batch, kv_heads, length, head_dim]``, of ``max_len`` slots rather than ``length``."""
        return (
            self.key.allocate_like(key, max_len, scale=self.key_scale, centre=self.key_centre, keep=self.keep),
            self.value.allocate_like(value, max_len, scale=self.value_scale, centre=self.value_centre, keep=self.keep),
        )

    def check(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise ``ValueError`` for scales or centres that do not suit such K and V (fake tensors will do)."""
        for x, scale, centre in ((key, self.key_scale, self.key_centre), (value, self.value_scale, self.value_centre)):
            check_scale(scale, int(x.shape[1]))
            if centre is not None:
                check_centre(centre, int(x.shape[1]), int(x.shape[3]))


class LayerFormats(NamedTuple):
    """One entry of ``KVQuantConfig.layers``: which layers, and their formats where they differ from the rest."""

    selector: str
    key_format: str | None = None
    value_format: str | None = None


# K needs the bits, V does not, and only K gains from a rotation.
_KEEP = {"keep_first": 4, "keep_last": 8}
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"key_format": "fp8_e4m3+centred", "value_format": "fp8_e4m3"},
    "accurate": {"key_format": "fp8_e4m3+centred+rotated", "value_format": "fp8_e4m3"} | _KEEP,
    "balanced": {"key_format": "fp8_e4m3+centred+rotated", "value_format": "nvfp4+4over6"} | _KEEP,
    "compact": {"key_format": "nvfp4+centred+rotated+4over6", "value_format": "nvfp4+4over6"} | _KEEP,
}


def names_a_file(text: str) -> bool:
    """Whether ``text``, given where a configuration is expected, is the name of a file of one."""
    return text.endswith((".json", ".yaml", ".yml"))


@dataclass(frozen=True, repr=False)
class KVQuantConfig:
    """How a model's KV cache is stored.

    Attributes:
        format: Format of K and V, one of :func:`kvpass.format_names`, with or without suffixes
            (:func:`kvpass.get_format`).
        key_format: Format of K, where it differs from ``format``.
        value_format: Format of V, where it differs from ``format``.
        strict: Raise :class:`kvpass.NotFusedError` when a compiled graph has an attention that reads a cache and was
            not fused, instead of warning and running it slowly.
        layers: Formats of single layers: a mapping from a selector to a format's name, or to a mapping with
            ``format``, ``key_format``, ``value_format``. A selector is an index (-1 is the last layer), a range as
            Python slices it (``"4:8"``, ``"-2:"``, ``"::2"``), or a pattern (``fnmatch``) of the layer's name
            ``model.layers.<index>.self_attn`` or of its type in the model's ``layer_types``. Later entries win.
        skip_layers: Selectors of layers kept in bf16; they win over ``layers``.
        scales: A :class:`kvpass.KVScales`, the path of a JSON file with scales, or its content. None for 1.0, and for
            those of nvfp4 and int8 and the centres that the first tokens of a prompt give.
        stack_linears: Compute linear layers that read the same input (q, k and v; gate and up) as one. Their weights
            are moved into one tensor, of which the parameters become views, until :func:`kvpass.disable`;
            ``save_pretrained`` works all the same, ``safetensors.torch.save_model`` does not.
        keep_first: How many of the first tokens are kept in bf16 too, and read from there: the "sink" tokens that
            every other one attends to. At most 64. In layers of full self-attention only.
        keep_last: How many of the newest tokens are kept in bf16 too, and read from there. At most 64. In layers of
            self-attention; the ring of a sliding window is rounded up to a multiple of them. A prompt that goes on in a
            cache is one piece: each of its tokens sees the newest of the whole cache so, not those before itself.

    Raises:
        ValueError: An unknown format, a selector that is none of the above, scales that are not valid, a ``strict`` or
            ``stack_linears`` that is no boolean, or a ``keep_first`` or ``keep_last`` out of range.
    """

    format: str = "fp8_e4m3"
    key_format: str | None = None
    value_format: str | None = None
    strict: bool = False
    layers: Any = field(default=())
    skip_layers: Any = field(default=())
    scales: Any = None
    keep_first: int = 0
    keep_last: int = 0
    stack_linears: bool = True

    def __post_init__(self) -> None:
        layers = self.layers.items() if isinstance(self.layers, Mapping) else self.layers
        object.__setattr__(self, "layers", tuple(_layer_formats(entry) for entry in layers))
        skip = [self.skip_layers] if isinstance(self.skip_layers, (int, str)) else self.skip_layers
        object.__setattr__(self, "skip_layers", tuple(_selector(selector) for selector in skip))
        object.__setattr__(self, "scales", _scales(self.scales))
        of_layers = (name for entry in self.layers for name in entry[1:] if name is not None)
        if self.format in PRESETS:
            raise ValueError(f"{self.format!r} is no format but a preset: write KVQuantConfig.preset({self.format!r})")
        for name in (self.format, self.key_format or self.format, self.value_format or self.format, *of_layers):
            get_format(name)
        for name in ("strict", "stack_linears"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: True, False")
        for name in ("keep_first", "keep_last"):
            count = getattr(self, name)
            if not isinstance(count, int) or not 0 <= count <= 64 or isinstance(count, bool):
                raise ValueError(f"{name} is {count!r}; it must be a whole number from 0 to 64")

    @property
    def key(self) -> KVFormat:
        """The format K is stored in, but for what ``layers`` and ``skip_layers`` say."""
        return get_format(self.key_format or self.format)

    @property
    def value(self) -> KVFormat:
        """The format V is stored in, but for what ``layers`` and ``skip_layers`` say."""
        return get_format(self.value_format or self.format)

    @property
    def learns(self) -> tuple[str, ...]:
        """What was not given, and the first tokens of a prompt give: ``"tensor scale of V"``, ``"centre of K"``."""
        found = []
        for side, name in (("key", "K"), ("value", "V")):
            own = (wanted for entry in self.layers if (wanted := getattr(entry, f"{side}_format")))
            formats = [getattr(self, side), *map(get_format, own)]
            if self.scales is None and any(fmt.learns_scale for fmt in formats):
                found.append(f"tensor scale of {name}")
            has_centres = self.scales is not None and all(getattr(i, side).centre for i in self.scales.layers)
            if not has_centres and any(fmt.centred for fmt in formats):
                found.append(f"centre of {name}")
        return tuple(found)

    @property
    def differs_by_layer(self) -> bool:
        """Whether a layer's index is needed to know how it is stored."""
        return bool(self.layers or self.skip_layers or self.scales)

    def layer(self, index: int, types: Sequence[str] | None = None) -> LayerConfig:
        """How layer ``index`` is stored.

        Args:
            index: Of the layer in the model, from 0.
            types: Type of each of the model's layers (``layer_types``); None where the model is not known, which
                indexes from 0 and ranges of them do not need.

        Raises:
            ValueError: Scales without this layer, or a selector that needs to know the model.
        """
        key, value = map(get_format, self._formats_of(index, types))
        config = LayerConfig(key, value, keep_first=self.keep_first, keep_last=self.keep_last)
        if self.scales is None:
            return config
        try:
            return config._replace(**self.scales[index].tensors(key, value)._asdict())
        except ValueError as error:
            raise ValueError(f"{self.scales.source}: layer {index}: {error}") from error

    def resolved(self, types: Sequence[str]) -> KVQuantConfig:
        """The same with plain indexes as selectors, for a model with layers of these types.

        Raises:
            ValueError: A selector that fits no layer.
        """
        for selector in (*(entry.selector for entry in self.layers), *self.skip_layers):
            if not _selected(selector, types):
                raise ValueError(f"layer {selector!r} is none of the model's {len(types)}, 0 to {len(types) - 1}")
        if not (self.layers or self.skip_layers):
            return self
        found = {index: self._formats_of(index, types) for index in range(len(types))}
        usual = [self.key.name, self.value.name]
        layers = [LayerFormats(str(index), *names) for index, names in found.items() if names != usual]
        return replace(self, layers=tuple(layers), skip_layers=())

    @classmethod
    def of(cls, config: ConfigLike) -> KVQuantConfig:
        """``config`` itself, or the configuration that a format's or a preset's name or a dictionary stands for."""
        if isinstance(config, KVQuantConfig):
            return config
        if isinstance(config, str):
            if names_a_file(config):
                raise ValueError(f"{config!r} is a file; read it with kvpass.KVQuantConfig.from_file({config!r})")
            if config in PRESETS:
                return cls.preset(config)
            if config.split("+")[0] not in format_names():
                raise ValueError(unknown_name("KV format", config, [*format_names(), *PRESETS]))
            return cls(format=config)
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        raise TypeError(f"expected a format's name, a dictionary or a KVQuantConfig, got {type(config).__name__}")

    @classmethod
    def parse(cls, text: str) -> KVQuantConfig:
        """What a command line names: whatever :meth:`of` takes, the formats of K and V as ``key/value``, or a file for
        :meth:`from_file`."""
        if names_a_file(text):
            if not Path(text).is_file():
                raise ValueError(f"{text} is not a file")
            return cls.from_file(text)
        key, *rest = text.split("/")
        if len(rest) > 1:
            raise ValueError(f"formats {text!r}: write one name, or that of K and that of V with a slash between them")
        return cls(format=key, value_format=rest[0]) if rest else cls.of(text)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> KVQuantConfig:
        """One of the named configurations; print it to see what it stands for. None of them needs calibration.

        Args:
            name: ``fast`` (FP8 and no work beside it: K is centred, since some models' K does not fit without),
                ``accurate`` (FP8, closest to bf16), ``balanced`` (K in FP8, V in FP4: nearly as close, at 6.25 bits) or
                ``compact`` (FP4 for both).
            changes: Fields that replace the preset's.
        """
        if name not in PRESETS:
            raise ValueError(unknown_name("preset", name, list(PRESETS)))
        return cls(**PRESETS[name] | changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVQuantConfig:
        """Build from a dictionary with this class's fields; an unknown key is an error that names the nearest one.
        ``format`` may name a preset, whose fields the others replace."""
        _check_keys(values, [field.name for field in fields(cls)])
        if (name := values.get("format")) in PRESETS:
            return cls.preset(name, **{key: value for key, value in values.items() if key != "format"})
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> KVQuantConfig:
        """Read a JSON file, or YAML where the name ends in ``.yaml`` or ``.yml``, that holds this class's fields.

        A file of scales (:class:`kvpass.KVScales`) is taken too, with the formats it was made for.
        """
        path = Path(path)
        if path.suffix in (".yaml", ".yml"):
            import yaml  # comes with transformers

            values = yaml.safe_load(path.read_text())
        else:
            values = read_json(path, f"{path}")
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds a {type(values).__name__}; expected a mapping with keys such as 'format'")
        if {"kvpass_scales", "kv_cache"} & values.keys():
            return cls.from_scales(KVScales.from_dict(values, str(path)))
        if isinstance(values.get("scales"), str):
            values["scales"] = path.parent / values["scales"]
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_scales(cls, scales: KVScales, **changes: Any) -> KVQuantConfig:
        """The formats that ``scales`` were made for, and the scales. ``changes`` are further fields."""
        formats = {layer.index: (layer.key.format, layer.value.format) for layer in scales.layers}
        return cls.from_layers(formats, **{"scales": scales, **changes})

    @classmethod
    def from_layers(cls, formats: Mapping[int, tuple[str, str]], **changes: Any) -> KVQuantConfig:
        """Each layer's formats of K and V, by its index. ``changes`` are further fields."""
        (key, value), _ = Counter(formats.values()).most_common(1)[0]
        own = {"format": key} if key == value else {"key_format": key, "value_format": value}
        others = [LayerFormats(str(index), *names) for index, names in formats.items() if names != (key, value)]
        values: dict[str, Any] = {**own, "layers": others, **changes}
        return cls(**values)

    @classmethod
    def from_pretrained(cls, source: str | Path, **changes: Any) -> KVQuantConfig:
        """What a checkpoint declares in ``quantization_config`` or ``hf_quant_config.json``, with its scales.

        Args:
            source: Folder, or id of a model in the local hub cache.
            changes: Fields that replace what the checkpoint says, such as ``format``.

        Returns:
            The defaults, where the checkpoint has neither a word of KV quantization nor scales.

        Raises:
            FileNotFoundError, ValueError: As :meth:`kvpass.KVScales.from_checkpoint`.
        """
        checkpoint = Checkpoint.open(source)
        if checkpoint.declared is None and not (checkpoint.files and checkpoint.scale_tensors()):
            return cls(**changes)
        return cls.from_scales(KVScales.from_checkpoint(checkpoint.folder), **changes)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, and ``format``, as plain data: what :meth:`from_dict` takes."""
        values = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        if self.layers:
            values["layers"] = {
                entry.selector: entry.key_format
                if entry.key_format == entry.value_format
                else {name: own for name, own in zip(entry._fields[1:], entry[1:], strict=True) if own}
                for entry in self.layers
            }
        if self.skip_layers:
            values["skip_layers"] = list(self.skip_layers)
        if self.scales is not None:
            values["scales"] = self.scales.to_dict()
        return {"format": self.format} | values

    def to_file(self, path: str | Path) -> None:
        """Write what :meth:`from_file` reads, as JSON or, by the file's name, YAML."""
        path = Path(path)
        if path.suffix in (".yaml", ".yml"):
            import yaml

            write_whole(path, yaml.safe_dump(self.to_dict(), sort_keys=False))
        else:
            write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def __repr__(self) -> str:
        shown = self.to_dict()
        if self.scales is not None:
            shown["scales"] = self.scales
        return f"KVQuantConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def _formats_of(self, index: int, types: Sequence[str] | None) -> list[str]:
        names = [self.key.name, self.value.name]
        for entry in self.layers:
            if index in _selected(entry.selector, types, index):
                names = [own or name for own, name in zip(entry[1:], names, strict=True)]
        skipped = any(index in _selected(selector, types, index) for selector in self.skip_layers)
        return ["bf16", "bf16"] if skipped else names


ConfigLike = str | Mapping[str, Any] | KVQuantConfig


def _check_keys(values: Mapping[str, Any], known: list[str]) -> None:
    for key in values:
        if key not in known:
            raise ValueError(unknown_name("configuration key", key, known))


def _scales(scales: Any) -> KVScales | None:
    if scales is None or isinstance(scales, KVScales):
        return scales
    if isinstance(scales, (str, Path)):
        return KVScales.from_json(scales)
    if isinstance(scales, Mapping):
        return KVScales.from_dict(scales)
    raise ValueError(f"scales are a {type(scales).__name__}; give a KVScales, the path of a JSON file, or its content")


def _layer_formats(entry: Any) -> LayerFormats:
    """One entry of ``layers``: itself if it is one already, else a selector with a name or a mapping."""
    if isinstance(entry, LayerFormats):
        return LayerFormats(_selector(entry.selector), *entry[1:])
    selector, formats = entry
    if not isinstance(formats, Mapping):
        formats = {"format": formats}
    _check_keys(formats, ["format", "key_format", "value_format"])
    both = formats.get("format")
    return LayerFormats(_selector(selector), formats.get("key_format", both), formats.get("value_format", both))


def _selector(selector: Any) -> str:
    text = str(selector)
    is_index = re.fullmatch(r"-?\d+", text) and not isinstance(selector, bool)
    is_pattern = _PATTERN_CHARACTERS & set(text) or "attention" in text
    if not (is_index or is_pattern or _RANGE.fullmatch(text)):
        raise ValueError(
            f"layer {selector!r} is no index (3, or -1 for the last), no range ('4:8' is 4 to 7), and no pattern "
            "('*.layers.3.*', 'sliding_*')"
        )
    return text


def _selected(selector: str, types: Sequence[str] | None, index: int | None = None) -> Iterable[int]:
    """The layers that ``selector`` selects. Without ``types`` at least ``index`` is decided, or an error raised."""
    span = _RANGE.fullmatch(selector)
    if types is not None:
        everything = range(len(types))
        if span:
            return everything[slice(*(int(part) if part else None for part in span.groups()))]
        if re.fullmatch(r"-?\d+", selector):
            wanted = int(selector)
            return [wanted % len(types)] if -len(types) <= wanted < len(types) else []
        names = [f"model.layers.{i}.self_attn" for i in everything]
        return [i for i in everything if fnmatch.fnmatch(names[i], selector) or fnmatch.fnmatch(types[i], selector)]
    if "-" in selector or not (span or selector.isdigit()):
        raise ValueError(
            f"layer {selector!r} can only be found where the model is known: with kvpass.enable or a "
            "kvpass.QuantizedCache. For a StaticCache write indexes from 0, or ranges of them"
        )
    assert index is not None
    if span:
        return range(index + 1)[slice(*(int(part) if part else None for part in span.groups()))]
    return [int(selector)]
