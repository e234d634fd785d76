"""``KVScales``: the tensor scales of every layer's K and V, from a checkpoint, from JSON or from calibration.

A scale multiplies on the way back, ``value = code * scale``, and is ``amax / range`` of the format it was made for
(448 for fp8_e4m3, 57344 for fp8_e5m2, 2688 = 6 * 448 for nvfp4, whose global scale it is, 127 * 448 for int8). Used in
another format it is converted by the ratio of the two ranges. Checkpoints and files write the same convention; some
write ``amax / 448`` for NVFP4 too, which is a factor of 6 too large and costs nothing, since writer and reader here use
one number.

Nothing is ever replaced by 1.0 without being said: a file that does not fit is an error that names layer and file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpass.checkpoint import Checkpoint
from kvpass.formats import KVFormat, unknown_name
from kvpass.scale_files import (
    SIDES,
    VERSION,
    ModelScales,
    Scale,
    from_checkpoint,
    from_own,
    from_sglang,
    ranges,
    read_json,
    to_sglang,
    write_whole,
)


class ScaleTensors(NamedTuple):
    """Scales (``[1]`` or ``[kv_heads]``) and centres (``[kv_heads, head_dim]``) of a layer, float32; None for none."""

    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    key_centre: torch.Tensor | None
    value_centre: torch.Tensor | None


@dataclass(frozen=True)
class LayerScales:
    """Scales of one layer: its index among the model's layers, and those of K and V."""

    index: int
    key: Scale
    value: Scale

    def tensors(self, key: KVFormat, value: KVFormat) -> ScaleTensors:
        """What these formats take (:meth:`Scale.tensor`)."""
        return ScaleTensors(
            self.key.tensor(key),
            self.value.tensor(value),
            self.key.centre_tensor(key),
            self.value.centre_tensor(value),
        )


@dataclass(frozen=True, repr=False)
class KVScales:
    """The scales of all layers of a model that have a KV cache.

    Attributes:
        layers: In ascending order of their index.
        model_type: ``model_type`` of the model's config, if known; a model of another type is refused then.
        tp_size: In how many parts the KV heads were split among tensor-parallel ranks; these scales are one part's, or,
            with ``ranks``, all parts'.
        source: File or folder it came from, for messages.
        notes: How the scales were found, as pairs of name and value.
        ranks: The layers of each rank, from a file that has scales for several, before :meth:`shard` takes one's
            (:func:`kvpass.enable` does); ``layers`` are the first one's. Empty otherwise.
    """

    layers: tuple[LayerScales, ...]
    model_type: str | None = None
    tp_size: int = 1
    source: str = field(default="scales", compare=False)
    notes: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    ranks: tuple[tuple[LayerScales, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(sorted(self.layers, key=lambda layer: layer.index)))
        indexes = [layer.index for layer in self.layers]
        if not indexes:
            raise ValueError(f"{self.source}: no layer has scales")
        if len(set(indexes)) != len(indexes) or indexes[0] < 0:
            raise ValueError(f"{self.source}: layer indexes {indexes} are negative or occur twice")

    @classmethod
    def of(cls, scales: Mapping[int, tuple[Any, Any]], format: str = "fp8_e4m3") -> KVScales:
        """From ``{layer: (key_scale, value_scale)}``, each a number, or one number (or a tensor of them) per head."""
        return cls(
            tuple(LayerScales(i, *(Scale(_numbers(s), format) for s in sides)) for i, sides in scales.items()),
        )

    @classmethod
    def from_json(cls, path: str | Path, *, tp_rank: int = 0, tp_size: int | None = None) -> KVScales:
        """Read our own schema (:meth:`json_schema`) or SGLang's.

        Args:
            path: The file.
            tp_rank, tp_size: This process's place among tensor-parallel ranks. SGLang's schema has scales per rank,
                and must have as many ranks as the model runs on; ours has all heads, of which this rank's are taken.
                Left out, they are those of all ranks, and :func:`kvpass.enable` takes this one's.

        Raises:
            ValueError: The file is not valid, or not for this many ranks. It names file, layer and value.
        """
        values = read_json(Path(path), f"{path}")
        return cls.from_dict(values, str(path), tp_rank=tp_rank, tp_size=tp_size)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], source: str = "scales", *, tp_rank: int = 0, tp_size: int | None = None
    ) -> KVScales:
        """What :meth:`from_json` does, from the data of such a file. ``source`` is what messages call it."""
        if isinstance(values, Mapping) and "kv_cache" in values:
            parts = [cls._made(part, source) for part in from_sglang(values, source)]
            if len(parts) == 1 and tp_size in (None, 1):
                return parts[0]
            every = replace(parts[0], tp_size=len(parts), ranks=tuple(part.layers for part in parts))
            return every if tp_size is None else every.shard(tp_rank, tp_size)
        if not isinstance(values, Mapping) or "kvpass_scales" not in values:
            raise ValueError(
                f"{source} holds no KV scales: expected a mapping with 'kvpass_scales' (kvpass's own schema) or "
                "'kv_cache' (SGLang's)"
            )
        scales = cls._made(from_own(values, source), source)
        return scales.shard(tp_rank, tp_size) if tp_size is not None and scales.tp_size == 1 else scales

    @classmethod
    def from_checkpoint(cls, source: str | Path, *, tp_rank: int = 0, tp_size: int | None = None) -> KVScales:
        """Read the scales stored with a model's weights (:mod:`kvpass.checkpoint` says under which names).

        A layer whose two scales are both missing or not positive gets 1.0, with one warning for all of them. Scales
        of a checkpoint that says ``fnuz`` are doubled, as the engines do that run such checkpoints.

        Args:
            source: Folder, or id of a model in the local hub cache.
            tp_rank, tp_size: As in :meth:`from_json`.

        Raises:
            FileNotFoundError: There is no such folder or cached model.
            ValueError: No scales and no word of KV quantization; one of a layer's two scales missing; NaN or infinity;
                a shape or a number of layers that is not the model's. The message names layer and file.
        """
        checkpoint = Checkpoint.open(source)
        scales = cls._made(from_checkpoint(checkpoint), str(checkpoint.folder))
        return scales if tp_size is None else scales.shard(tp_rank, tp_size)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON schema (draft 2020-12) of our own files; it is ``kvpass/scales.schema.json``."""
        schema: dict[str, Any] = json.loads(resources.files("kvpass").joinpath("scales.schema.json").read_text())
        return schema

    def to_dict(self) -> dict[str, Any]:
        """Plain data in our own schema (in SGLang's while there are ``ranks``); :meth:`from_dict` gives back equal
        scales, bit for bit."""
        if self.ranks:
            return to_sglang([{i.index: i.key for i in layers} for layers in self.ranks], self.model_type)
        head: dict[str, Any] = {"kvpass_scales": VERSION}
        if self.model_type:
            head["model_type"] = self.model_type
        if self.tp_size != 1:
            head["tp_size"] = self.tp_size
        if self.notes:
            head["calibration"] = dict(self.notes)
        return head | {
            "layers": {
                str(layer.index): {side: _plain(getattr(layer, side)) for side in SIDES} for layer in self.layers
            }
        }

    def to_json(self, path: str | Path, *, schema: str = "kvpass", tp_size: int = 1) -> None:
        """Write a JSON file; it appears complete or not at all.

        Args:
            path: The file.
            schema: ``kvpass``, or ``sglang``: one fp8 scale per layer for K and V together (see :meth:`shared`), the
                same for each of ``tp_size`` ranks.

        Raises:
            ValueError: What the schema cannot express: SGLang's has one scale per layer, and ours no scales by rank.
        """
        if schema not in ("kvpass", "sglang"):
            raise ValueError(unknown_name("schema", schema, ["kvpass", "sglang"]))
        if self.ranks and (schema, tp_size) != ("sglang", len(self.ranks)):
            raise ValueError(
                f"{self.source} has scales for {len(self.ranks)} ranks: write them with schema='sglang', "
                f"tp_size={len(self.ranks)}, or one rank's, which shard(tp_rank, tp_size) takes"
            )
        values = self.to_dict() if schema == "kvpass" or self.ranks else self._to_sglang(tp_size)
        write_whole(Path(path), json.dumps(values, indent=1) + "\n")

    def to_checkpoint(self, source: str | Path, target: str | Path, *, layout: str | None = None) -> None:
        """Copy the checkpoint ``source`` to the new folder ``target``, with these scales in it.

        Args:
            source: Folder, or id of a model in the local hub cache.
            target: A folder that does not exist; it appears complete or not at all.
            layout: ``compressed-tensors`` (the default for fp8_e4m3: ``self_attn.k_scale``, ``kv_cache_scheme`` in
                config.json, what SGLang and vLLM read without further flags; transformers then asks for the package of
                that name) or ``modelopt`` (``k_proj.k_scale``, ``hf_quant_config.json``; the default for nvfp4).

        Raises:
            FileExistsError: ``target`` exists.
            ValueError: Formats that ``layout`` cannot express, or a checkpoint quantized in another layout.
        """
        checkpoint = Checkpoint.open(source)
        self.check(checkpoint.layers or [layer.index for layer in self.layers], checkpoint.kv_heads)
        formats = {getattr(layer, side).format for layer in self.layers for side in SIDES}
        if len(formats) != 1 or self.tp_size != 1:
            raise ValueError(f"a checkpoint takes one format and the heads of all ranks; got {sorted(formats)}")
        tensors = {
            (layer.index, kind): torch.tensor(getattr(layer, side).scale, dtype=torch.float32)
            for layer in self.layers
            for side, kind in zip(SIDES, ("k_scale", "v_scale"), strict=True)
        }
        if any(getattr(layer, side).centre for layer in self.layers for side in SIDES):
            raise ValueError("centres cannot be written into a checkpoint; write JSON")
        checkpoint.write_copy(Path(target), tensors, formats.pop(), layout)

    def __getitem__(self, index: int) -> LayerScales:
        for layer in self.layers:
            if layer.index == index:
                return layer
        raise ValueError(f"{self.source} has no scales for layer {index}; it has {ranges(self.indexes)}")

    @property
    def indexes(self) -> list[int]:
        """The layers that have scales."""
        return [layer.index for layer in self.layers]

    def check(self, layers: Collection[int], kv_heads: int | None = None, model_types: Collection[str] = ()) -> None:
        """Raise ``ValueError``, naming layer and file, unless these scales are for a model of this shape.

        Args:
            layers: Indexes of the model's layers that have a KV cache.
            kv_heads: KV heads of the whole model; None where unknown or not the same in each layer.
            model_types: ``model_type`` of the model's config, and of the language model in it.
        """
        if self.ranks:
            raise ValueError(
                f"{self.source} has scales for {len(self.ranks)} tensor-parallel ranks, and the model runs on 1; "
                f"KVScales.shard(tp_rank, {len(self.ranks)}) takes one rank's"
            )
        if self.model_type and model_types and self.model_type not in model_types:
            raise ValueError(f"{self.source} holds scales for a {self.model_type} model; this is a {min(model_types)}")
        if missing := sorted(set(layers) - set(self.indexes)):
            raise ValueError(
                f"{self.source} has scales for layers {ranges(self.indexes)}, none for {ranges(missing)} of the model"
            )
        if extra := sorted(set(self.indexes) - set(layers)):
            raise ValueError(
                f"{self.source} has scales for layers {ranges(extra)}, and the model's layers are {ranges(layers)}"
            )
        if kv_heads is None:
            return
        heads = max(1, kv_heads // self.tp_size)
        for layer in self.layers:
            for side in SIDES:
                scale: Scale = getattr(layer, side)
                for name, count in (("scales", len(scale.scale)), ("centres", len(scale.centre or ()))):
                    if count not in (0, heads) and (name, count) != ("scales", 1):
                        raise ValueError(
                            f"{self.source}: layer {layer.index} has {count} {name} for its {side}, and the model has "
                            f"{heads} KV heads" + (f" on each of {self.tp_size} ranks" if self.tp_size > 1 else "")
                        )

    def shard(self, tp_rank: int, tp_size: int) -> KVScales:
        """Those of rank ``tp_rank`` of ``tp_size``, each of which has an equal run of the KV heads (or, where there
        are more ranks than heads, one head, shared with its neighbours).

        Raises:
            ValueError: No such rank, heads that the ranks cannot share, scales per rank of another number of ranks, or
                one rank's part already.
        """
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"tp_rank is {tp_rank} of {tp_size}; ranks count from 0")
        if self.ranks:
            if len(self.ranks) != tp_size:
                raise ValueError(
                    f"{self.source} has scales for {len(self.ranks)} tensor-parallel ranks, and the model runs on "
                    f"{tp_size}"
                )
            return replace(self, layers=self.ranks[tp_rank], ranks=())
        if self.tp_size != 1:
            raise ValueError(f"{self.source} is one rank's part of {self.tp_size} already")

        def part(values: tuple[Any, ...], index: int) -> tuple[Any, ...]:
            if len(values) % tp_size and tp_size % len(values):
                raise ValueError(
                    f"{self.source}: layer {index} has {len(values)} heads, which {tp_size} ranks cannot share"
                )
            count = max(1, len(values) // tp_size)
            first = tp_rank * len(values) // tp_size
            return values[first : first + count]

        def of(scale: Scale, index: int) -> Scale:
            own = scale.scale if len(scale.scale) <= 1 else part(scale.scale, index)
            return replace(scale, scale=own, centre=scale.centre and part(scale.centre, index))

        layers = tuple(LayerScales(i.index, of(i.key, i.index), of(i.value, i.index)) for i in self.layers)
        return replace(self, layers=layers, tp_size=tp_size)

    def shared(self) -> KVScales:
        """One scale per layer for K and V and all heads: the largest of each layer, with which nothing saturates.

        Raises:
            ValueError: These are the scales of several ranks; :meth:`shard` takes one's.
        """
        if self.ranks:
            raise ValueError(
                f"{self.source} has scales for {len(self.ranks)} ranks; shard(tp_rank, tp_size) takes one's"
            )

        def largest(layer: LayerScales) -> LayerScales:
            one = replace(layer.key, scale=(max(layer.key.scale + layer.value.scale),), centre=None)
            return LayerScales(layer.index, one, one)

        if any(i.key.format != i.value.format or i.key.centre or i.value.centre for i in self.layers):
            raise ValueError("K and V cannot share a scale: their formats differ, or they are centred")
        return replace(self, layers=tuple(map(largest, self.layers)))

    @classmethod
    def _made(cls, found: ModelScales, source: str) -> KVScales:
        layers = tuple(LayerScales(index, *sides) for index, sides in found.layers.items())
        return cls(layers, found.model_type, found.tp_size, source, found.notes)

    def _to_sglang(self, tp_size: int) -> dict[str, Any]:
        for layer in self.layers:
            sides = layer.key, layer.value
            if any(side.format != "fp8_e4m3" or side.centre for side in sides):
                raise ValueError(
                    f"SGLang's schema holds plain fp8_e4m3 scales; layer {layer.index} is {layer.key.format}"
                )
            if len({*layer.key.scale, *layer.value.scale}) != 1:
                raise ValueError(
                    f"SGLang's schema holds one scale per layer; layer {layer.index} has {layer.key.scale} for K and "
                    f"{layer.value.scale} for V: write scales.shared(), or schema='kvpass'"
                )
        return to_sglang([{layer.index: layer.key for layer in self.layers}] * tp_size, self.model_type)

    def __str__(self) -> str:
        lines = []
        for side, name in zip(SIDES, "KV", strict=True):
            found = [(max(s.scale), layer.index) for layer in self.layers if (s := getattr(layer, side)).scale]
            if found:
                (low, first), (high, last) = min(found), max(found)
                lines.append(f"{name} {low:.4g} (layer {first}) to {high:.4g} (layer {last})")
        granularity = "per head" if any(len(i.key.scale) > 1 for i in self.layers) else "per tensor"
        of_first = f", of the first of {len(self.ranks)} ranks" if self.ranks else ""
        found_in = f"from {self.source}{of_first}"
        return f"{len(self.layers)} layers, {granularity}, {found_in}: {', '.join(lines) or 'none needed'}"

    def __repr__(self) -> str:
        return f"<KVScales of {self}>"


def _numbers(values: Any) -> tuple[float, ...]:
    """A number, a list of numbers, or a tensor of them, as a tuple of floats."""
    if isinstance(values, torch.Tensor):
        values = values.double().flatten().tolist()
    return tuple(map(float, values)) if isinstance(values, Iterable) else (float(values),)


def _plain(scale: Scale) -> dict[str, Any]:
    found: dict[str, Any] = {"format": scale.format}
    if scale.scale:
        found["scale"] = scale.scale[0] if len(scale.scale) == 1 else list(scale.scale)
    if scale.centre is not None:
        found["centre"] = [list(row) for row in scale.centre]
    return found
