"""What a checkpoint on disk says of its KV cache: the declared format, and the scales among its weights.

transformers drops the scales when it loads a model, so they are read from the safetensors files themselves, of which
only the headers and the scales are touched. Names, for layer 3 (``<attention>`` is ``...layers.3.self_attn`` or alike,
under any prefix, such as ``model.language_model.``):

==================  =====================================================  ==========================================
written by          scales                                                 format declared in
==================  =====================================================  ==========================================
ModelOpt            ``<attention>.k_proj.k_scale``, ``.v_proj.v_scale``,   ``hf_quant_config.json`` or
                    and ``k_bias``, ``v_bias`` of the affine variants      ``quantization_config``: kv_cache_quant_algo
compressed-tensors  ``<attention>.k_scale``, ``.v_scale``, one or one      ``quantization_config``: kv_cache_scheme, or
                    per KV head                                            a config group of attention modules
Quark               ``<attention>.k_proj.output_scale``, ``.v_proj.``      ``quantization_config``: output_tensors
old fp8 exports     ``<attention>.kv_scale``, for K and V together         nothing: fp8_e4m3
==================  =====================================================  ==========================================
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvpass.formats import unknown_name

INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"^(?P<prefix>.*?)(?:layers|layer|blocks|block|h)\.(?P<layer>\d+)\.(?P<rest>.+)$")
_ATTENTION = re.compile(r"^(?P<attention>\w*(?:attn|attention|mixer))\.(?P<rest>.+)$")
_KINDS = {
    "k_scale": re.compile(r"^(?:attn\.|k_proj\.|qkv_proj\.|qkqkv_proj\.)?k_scale$|^k_proj\.output_scale$"),
    "v_scale": re.compile(r"^(?:attn\.|v_proj\.|qkv_proj\.|qkqkv_proj\.)?v_scale$|^v_proj\.output_scale$"),
    "kv_scale": re.compile(r"^(?:\w+\.)?kv_scale$"),
    "k_bias": re.compile(r"^k_proj\.k_bias$"),
    "v_bias": re.compile(r"^v_proj\.v_bias$"),
}
_OTHER_TOWERS = re.compile(r"vision|visual|image|audio|speech|encoder|mtp|draft")
_TEXT_TOWERS = re.compile(r"language_model|text_model|decoder|llm")
_ALGORITHMS = {"FP8": "fp8_e4m3", "NVFP4": "nvfp4", "NVFP4_AFFINE": "nvfp4"}
_DTYPES = {"fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_SCHEMES = {8: "fp8_e4m3", 4: "nvfp4"}
LAYOUTS = {"compressed-tensors": ("fp8_e4m3",), "modelopt": ("fp8_e4m3", "nvfp4")}


@dataclass(frozen=True)
class Declared:
    """The KV formats a checkpoint declares.

    Attributes:
        key, value: Names of our formats.
        where: File and key that say so.
        fnuz: Whether it says that its FP8 is the fnuz variant.
    """

    key: str
    value: str
    where: str
    fnuz: bool = False


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: its name, and the file it is in."""

    name: str
    file: Path

    def __str__(self) -> str:
        return f"{self.name} in {self.file}"

    def load(self) -> torch.Tensor:
        with safe_open(self.file, framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(self.name)
        return tensor


@dataclass(frozen=True)
class Checkpoint:
    """A folder with ``config.json``, whose content is ``config``, and safetensors files."""

    folder: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """The checkpoint in a folder, or of a model in the local hub cache (nothing is downloaded).

        Raises:
            FileNotFoundError: Neither exists.
        """
        if not str(source):
            raise FileNotFoundError("the model was not loaded from a checkpoint")
        folder = Path(source)
        if not folder.is_dir():
            from huggingface_hub import try_to_load_from_cache
            from huggingface_hub.errors import HFValidationError

            try:
                found = try_to_load_from_cache(str(source), "config.json")
            except HFValidationError:
                found = None
            if not isinstance(found, str):
                raise FileNotFoundError(
                    f"{str(source)!r} is neither a folder nor a model in the local hub cache; download the model first"
                )
            folder = Path(found).parent
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} has no config.json, so it is no checkpoint")
        return cls(folder, _read(folder / "config.json"))

    @property
    def files(self) -> list[Path]:
        """Its safetensors files; none where the weights are stored in another way, which is not read."""
        return sorted(self.folder.glob("*.safetensors"))

    @property
    def _text_config(self) -> dict[str, Any]:
        names = ("text_config", "llm_config", "language_config", "decoder")
        inner = [self.config[name] for name in names if isinstance(self.config.get(name), dict)]
        return inner[0] if inner and "num_hidden_layers" in inner[0] else self.config

    @property
    def model_type(self) -> str | None:
        """``model_type`` of the language model."""
        return self._text_config.get("model_type")

    @property
    def kv_heads(self) -> int | None:
        """KV heads of each layer, where the config has one number for all."""
        heads = self._text_config.get("num_key_value_heads") or self._text_config.get("num_attention_heads")
        return heads if isinstance(heads, int) else None

    @property
    def layers(self) -> list[int]:
        """Indexes of the layers with a KV cache; empty where the config does not tell."""
        config = self._text_config
        if types := config.get("layer_types"):
            return [i for i, name in enumerate(types) if "attention" in name and "linear" not in name]
        return list(range(config.get("num_hidden_layers") or config.get("n_layer") or 0))

    @cached_property
    def declared(self) -> Declared | None:
        """The KV formats it declares; None where it says nothing, or that the cache is not quantized.

        Raises:
            ValueError: A quantization there is no format for, or two files that contradict each other.
        """
        found = []
        if (file := self.folder / "hf_quant_config.json").exists():
            found.append((f"{file}", _read(file)))
        quantization = self.config.get("quantization_config") or self._text_config.get("quantization_config")
        if quantization:
            found.append((f"{self.folder / 'config.json'}, quantization_config", quantization))
        said = [declared for where, values in found if (declared := declaration(values, where))]
        if len({(d.key, d.value) for d in said}) > 1:
            raise ValueError(f"{said[0].where} says {said[0].key}, and {said[1].where} says {said[1].key}")
        return said[0] if said else None

    def scale_tensors(self) -> dict[int, dict[str, Stored]]:
        """The scales by layer and kind (``k_scale``, ``v_scale``, ``kv_scale``, ``k_bias``, ``v_bias``).

        Raises:
            ValueError: Two towers or two names claim one scale, or a layer the model does not have.
        """
        towers: dict[str, dict[int, dict[str, Stored]]] = {}
        for name, stored in self._names():
            layer, attention = _split(name)
            kind = attention and next((kind for kind, pattern in _KINDS.items() if pattern.match(attention[1])), None)
            if layer and kind:
                kinds = towers.setdefault(layer["prefix"], {}).setdefault(int(layer["layer"]), {})
                if kind in kinds and not torch.equal(kinds[kind].load().flatten(), stored.load().flatten()):
                    raise ValueError(f"layer {layer['layer']} has two {kind}s: {kinds[kind]}, and {stored}")
                kinds[kind] = stored
        found = towers[self._text_tower(list(towers))] if towers else {}
        for index in sorted(found):
            first = self.layers[-1] + 1 if self.layers else 0
            if self.layers and index not in self.layers:
                if first <= index < first + (self._text_config.get("num_nextn_predict_layers") or 0):
                    del found[index]  # layers of multi-token prediction, which transformers does not run
                    continue
                raise ValueError(
                    f"layer {index} has a scale ({next(iter(found[index].values()))}), and the config's layers with "
                    f"a KV cache are {self.layers[0]} to {self.layers[-1]}, {len(self.layers)} of them"
                )
        return found

    def numbers(self, stored: Stored, layer: int) -> tuple[float, ...]:
        """A scale as one number, or one per KV head; ``ValueError`` for another shape, NaN or infinity."""
        tensor = stored.load()
        if tensor.numel() != 1 and tensor.numel() != self.kv_heads:
            raise ValueError(
                f"layer {layer}: {stored} has shape {list(tensor.shape)}; expected one number, or one for each of "
                f"{self.kv_heads} KV heads"
            )
        return _finite(tensor, stored, layer)

    def rows(self, stored: Stored, layer: int) -> tuple[tuple[float, ...], ...]:
        """A bias as ``[kv_heads][head_dim]``; ``ValueError`` for another shape, NaN or infinity."""
        tensor, heads = stored.load(), self.kv_heads or 1
        config = self._text_config
        head_dim = config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
        if tensor.numel() not in (head_dim, heads * head_dim):
            raise ValueError(
                f"layer {layer}: {stored} has shape {list(tensor.shape)}; expected {heads} heads of {head_dim} values"
            )
        values = _finite(tensor.reshape(-1, head_dim).expand(heads, head_dim), stored, layer)
        return tuple(values[i : i + head_dim] for i in range(0, len(values), head_dim))

    def write_copy(
        self, target: Path, tensors: Mapping[tuple[int, str], torch.Tensor], format: str, layout: str | None
    ) -> None:
        """Copy the folder to ``target`` with ``tensors``, by layer and kind, in one more file; see
        ``KVScales.to_checkpoint``."""
        own = (self.config.get("quantization_config") or {}).get("quant_method")
        layout = layout or ("modelopt" if own == "modelopt" or format == "nvfp4" else "compressed-tensors")
        if layout not in LAYOUTS:
            raise ValueError(unknown_name("layout", layout, list(LAYOUTS)))
        if format not in LAYOUTS[layout]:
            raise ValueError(f"layout {layout!r} holds {', '.join(LAYOUTS[layout])}, not {format}; write JSON")
        if own not in (None, layout):
            raise ValueError(f"{self.folder} is quantized by {own!r}, which does not go with layout {layout!r}")
        if self.scale_tensors():
            raise ValueError(f"{self.folder} holds KV scales already; start from the checkpoint without them")
        if target.exists():
            raise FileExistsError(f"{target} exists; name a new folder")
        names = dict(self._names())
        attention = self._attention_names(names)
        if missing := sorted({layer for layer, _ in tensors} - set(attention)):
            raise ValueError(f"{self.folder} has no attention weights for layer {missing[0]}")
        inner = {"k_scale": "k_proj.", "v_scale": "v_proj."} if layout == "modelopt" else {}
        added = {f"{attention[layer]}.{inner.get(kind, '')}{kind}": tensor for (layer, kind), tensor in tensors.items()}
        per_head = any(tensor.numel() > 1 for tensor in tensors.values())
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            copy = Path(scratch) / target.name
            shutil.copytree(self.folder, copy)
            save_file(added, copy / "kv_scales.safetensors", {"format": "pt"})
            weight_map = {name: stored.file.name for name, stored in names.items()}
            weight_map |= dict.fromkeys(added, "kv_scales.safetensors")
            size = sum(file.stat().st_size for file in copy.glob("*.safetensors"))
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
            (copy / INDEX).write_text(json.dumps(index, indent=2))
            _declare(copy, format, layout, per_head)
            copy.rename(target)

    def _names(self) -> Iterator[tuple[str, Stored]]:
        """Every tensor, with those that a file's metadata says are tied to another (and so not stored again)."""
        files = self.files
        if (index := self.folder / INDEX).exists():
            listed = _read(index).get("weight_map", {})
            files = sorted({self.folder / name for name in listed.values()})
        else:
            listed = {}
        if not files:
            raise ValueError(f"{self.folder} has no safetensors files; other kinds of weights are not read")
        seen = set()
        for file in files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    names, metadata = list(tensors.keys()), tensors.metadata() or {}
            except (FileNotFoundError, SafetensorError) as error:
                raise ValueError(f"{file} is missing or broken: {error}") from error
            for name in names:
                seen.add(name)
                yield name, Stored(name, file)
            for name, kept in metadata.items():
                if kept in names and name not in names:
                    seen.add(name)
                    yield name, Stored(kept, file)
        if lost := sorted(set(listed) - seen):
            raise ValueError(f"{index} lists {lost[0]} in {listed[lost[0]]}, which does not hold it")

    def _text_tower(self, prefixes: list[str]) -> str:
        """Which prefix is the language model's."""
        kept = [p for p in prefixes if not _OTHER_TOWERS.search(p) or _TEXT_TOWERS.search(p)] or prefixes
        kept = [p for p in kept if _TEXT_TOWERS.search(p)] if len(kept) > 1 else kept
        if len(kept) != 1:
            raise ValueError(f"{self.folder}: cannot tell whose KV scales are the language model's: {sorted(prefixes)}")
        return kept[0]

    def _attention_names(self, names: Mapping[str, Stored]) -> dict[int, str]:
        """Name of the attention module of each layer of the language model, from its weights."""
        towers: dict[str, dict[int, str]] = {}
        for name in names:
            layer, attention = _split(name)
            if layer and attention:
                module = name[: -len(attention[1]) - 1]
                towers.setdefault(layer["prefix"], {})[int(layer["layer"])] = module
        return towers[self._text_tower(list(towers))] if towers else {}


def declaration(values: Mapping[str, Any], where: str) -> Declared | None:
    """The KV formats that a quantization config (``hf_quant_config.json``'s or ``config.json``'s) declares, or None.

    Raises:
        ValueError: A KV quantization there is no format for.
    """
    fnuz = "fnuz" in json.dumps(values, default=str)
    inner = values.get("quantization") if isinstance(values.get("quantization"), Mapping) else values
    assert isinstance(inner, Mapping)
    scheme = inner.get("kv_cache_scheme")
    algorithm = inner.get("kv_cache_quant_algo") or (scheme if isinstance(scheme, str) else None)
    if algorithm and str(algorithm).upper() != "NONE":
        name = _ALGORITHMS.get(str(algorithm).upper())
        if name is None:
            raise ValueError(f"{where}: " + unknown_name("kv_cache_quant_algo", algorithm, list(_ALGORITHMS)))
        return Declared(name, name, f"{where}, kv_cache_quant_algo", fnuz)
    groups = inner.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        targets = group.get("targets") or []
        if not scheme and targets and all("attention" in str(target).lower() for target in targets):
            scheme = group.get("input_activations")
    if isinstance(scheme, Mapping):
        name = _SCHEMES.get(scheme.get("num_bits", 0)) if scheme.get("type") == "float" else None
        if name is None:
            raise ValueError(
                f"{where}: the KV cache is quantized to {scheme.get('num_bits')} bits of type {scheme.get('type')!r}; "
                "supported are float of 8 and 4 bits"
            )
        return Declared(name, name, f"{where}, kv_cache_scheme", fnuz)
    if inner.get("quant_method") == "quark":
        return _quark(inner, where, fnuz)
    return None


def _quark(values: Mapping[str, Any], where: str, fnuz: bool) -> Declared | None:
    """Quark quantizes the outputs of the K and V projections: by pattern, each with the dtype of its output."""
    found: dict[str, str] = {}
    for section in ("kv_cache_quant_config", "layer_quant_config"):
        patterns = values.get(section)
        for pattern, config in patterns.items() if isinstance(patterns, Mapping) else ():
            output = config.get("output_tensors") if isinstance(config, Mapping) else None
            dtype = output.get("dtype") if isinstance(output, Mapping) else None
            for side in ("k_proj", "v_proj"):
                if dtype and side in pattern:
                    known = _DTYPES.get(str(dtype).removesuffix("fnuz"), _DTYPES.get(str(dtype).replace("fnuz", "fn")))
                    if known is None:
                        raise ValueError(f"{where}, {section}: " + unknown_name("dtype", dtype, list(_DTYPES)))
                    found[side] = known
    if not found:
        return None
    if len(found) == 1:
        raise ValueError(f"{where} quantizes the output of {next(iter(found))} only; K and V are needed")
    return Declared(found["k_proj"], found["v_proj"], where, fnuz)


def _declare(folder: Path, format: str, layout: str, per_head: bool) -> None:
    """Write into the copied configs that the KV cache is quantized."""
    config = _read(folder / "config.json")
    quantization = config.get("quantization_config") or {}
    if layout == "modelopt":
        file, algorithm = folder / "hf_quant_config.json", {"fp8_e4m3": "FP8", "nvfp4": "NVFP4"}[format]
        values = _read(file) if file.exists() else {"producer": {"name": "modelopt"}}
        inner = {"quant_algo": None} | values.get("quantization", {}) | {"kv_cache_quant_algo": algorithm}
        file.write_text(json.dumps(values | {"quantization": inner}, indent=2))
        if not quantization:
            return
        quantization["kv_cache_quant_algo"] = algorithm
    else:
        strategy = "attn_head" if per_head else "tensor"
        scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
        plain = {"quant_method": layout, "format": "dense", "quantization_status": "compressed", "config_groups": {}}
        quantization = plain | {"ignore": []} | quantization | {"kv_cache_scheme": scheme}
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _split(name: str) -> tuple[re.Match[str] | None, tuple[str, str] | None]:
    """A tensor's layer (prefix, index, rest), and under it its attention module and the rest of its name."""
    layer = _LAYER.match(name)
    attention = _ATTENTION.match(layer["rest"]) if layer else None
    return layer, (attention["attention"], attention["rest"]) if attention else None


def _finite(tensor: torch.Tensor, stored: Stored, layer: int) -> tuple[float, ...]:
    values: list[float] = tensor.double().flatten().tolist()
    if bad := [value for value in values if not math.isfinite(value)]:
        raise ValueError(f"layer {layer}: {stored} holds {bad[0]}")
    return tuple(values)


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__}; expected an object")
    return values
