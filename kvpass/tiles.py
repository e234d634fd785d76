"""Which tiles the attention kernel gets, by GPU and shape class; nothing is tuned while a model runs.

A table has a :class:`Configuration` for each :class:`ShapeClass`. Its entries come from, in this order:

1. the file that the environment variable ``KVPASS_KERNEL_CONFIGURATIONS`` names;
2. the package's file for the GPU, in ``kvpass/kernels/configurations``, by the name that CUDA gives it;
3. the built-in table, for GPUs never seen.

``kvpass bench configurations`` measures such a file on the GPU at hand. It holds one JSON object: ``gpu``, the name;
``configurations``, a list of objects with the fields of a shape class and those of a configuration (but ``block_m``,
which follows from the rows), and optionally ``ms`` and ``built_in_ms``; and optionally ``made``, whatever is worth
knowing of where it was measured. A file is read once a process.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpass.formats import CODECS, KVFormat

VARIABLE = "KVPASS_KERNEL_CONFIGURATIONS"
FOLDER = Path(__file__).parent / "kernels" / "configurations"
DECODE_ROWS = 16


class Configuration(NamedTuple):
    """How the attention kernel is launched.

    Attributes:
        block_m: Query rows of a program (positions times group).
        block_n: Slots of one step, a multiple of 32.
        num_warps, num_stages: Triton's.
        programs_per_sm: How many programs an SM holds at once, from which the number of splits follows.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int

    def __str__(self) -> str:
        return f"{self.block_n} slots, {self.num_warps} warps, {self.num_stages} stages, {self.programs_per_sm} per SM"


class ShapeClass(NamedTuple):
    """Calls that share a configuration.

    Attributes:
        kind: ``decode``, with at most 16 query rows of a KV head, or ``chunk``, with more.
        bits: Of the wider codec of K and V.
        head_dim: The larger one of K and V, up to the next of those allowed.
    """

    kind: str
    bits: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.bits} bits, head_dim {self.head_dim}"


# What a file may hold. The kernel needs powers of two, and tiles of whole 32 slots: block scales are stored in such.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "kind": ("decode", "chunk"),
    "bits": (4, 8, 16),
    "head_dim": (64, 128, 256, 512),
    "block_n": (32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": tuple(range(1, 9)),
    "programs_per_sm": tuple(range(1, 33)),
}
_TIMES = ("ms", "built_in_ms")

# `programs_per_sm` of decode follows from the registers and the shared memory that these compile to for sm_90; those of
# head_dim 128 in 4 and 8 bits and of head_dim 512 are the fastest of those tried on an H200. The most shared memory is
# taken by int8 in decode, 113 KiB, and by chunks: 96 KiB up to head_dim 256 and 192 KiB above.
_DECODE, _CHUNK = ALLOWED["kind"]
BUILT_IN: Mapping[ShapeClass, Configuration] = {
    ShapeClass(_DECODE, 4, 64): Configuration(16, 64, 4, 3, 5),
    ShapeClass(_DECODE, 4, 128): Configuration(16, 128, 4, 3, 3),
    ShapeClass(_DECODE, 4, 256): Configuration(16, 32, 4, 3, 3),
    ShapeClass(_DECODE, 4, 512): Configuration(16, 32, 4, 3, 2),
    ShapeClass(_DECODE, 8, 64): Configuration(16, 64, 4, 3, 6),
    ShapeClass(_DECODE, 8, 128): Configuration(16, 128, 4, 3, 2),
    ShapeClass(_DECODE, 8, 256): Configuration(16, 32, 4, 3, 2),
    ShapeClass(_DECODE, 8, 512): Configuration(16, 32, 4, 3, 2),
    ShapeClass(_DECODE, 16, 64): Configuration(16, 64, 4, 2, 8),
    ShapeClass(_DECODE, 16, 128): Configuration(16, 64, 4, 2, 5),
    ShapeClass(_DECODE, 16, 256): Configuration(16, 32, 4, 2, 5),
    ShapeClass(_DECODE, 16, 512): Configuration(16, 32, 4, 3, 1),
    ShapeClass(_CHUNK, 4, 64): Configuration(64, 64, 4, 3, 2),
    ShapeClass(_CHUNK, 4, 128): Configuration(64, 64, 4, 3, 2),
    ShapeClass(_CHUNK, 4, 256): Configuration(64, 32, 8, 2, 1),
    ShapeClass(_CHUNK, 4, 512): Configuration(64, 32, 8, 2, 1),
    ShapeClass(_CHUNK, 8, 64): Configuration(64, 64, 4, 3, 2),
    ShapeClass(_CHUNK, 8, 128): Configuration(64, 64, 4, 3, 2),
    ShapeClass(_CHUNK, 8, 256): Configuration(64, 32, 8, 2, 1),
    ShapeClass(_CHUNK, 8, 512): Configuration(64, 32, 8, 2, 1),
    ShapeClass(_CHUNK, 16, 64): Configuration(64, 64, 4, 2, 2),
    ShapeClass(_CHUNK, 16, 128): Configuration(64, 64, 4, 2, 2),
    ShapeClass(_CHUNK, 16, 256): Configuration(64, 32, 8, 2, 1),
    ShapeClass(_CHUNK, 16, 512): Configuration(64, 32, 8, 2, 1),
}
_KIB = 1 << 10


def shape_class(key: KVFormat, value: KVFormat, head_dim: int, rows: int) -> ShapeClass:
    """The class of a call with ``rows`` query rows of a KV head; ``head_dim`` is the larger of K's and V's."""
    bits = max(CODECS[key.codec].bits, CODECS[value.codec].bits)
    width = next(width for width in ALLOWED["head_dim"] if head_dim <= width)
    return ShapeClass(_DECODE if rows <= DECODE_ROWS else _CHUNK, bits, width)


def configuration(
    key: KVFormat, value: KVFormat, head_dim: int, rows: int, is_fp32: bool, device: torch.device
) -> Configuration:
    """The configuration of a call on ``device``; ``is_fp32``: K or V is decoded to fp32. See :func:`shape_class`.

    Raises:
        ValueError: A file of configurations is malformed, or of another GPU.
    """
    if is_fp32:  # no tensor cores: whole rows of both operands in registers
        return Configuration(16, 32, 8 if head_dim > 128 else 4, 1, 2)
    config = table(device)[shape_class(key, value, head_dim, rows)]
    return config if rows > 32 or rows <= DECODE_ROWS else config._replace(block_m=min(32, config.block_m))


@functools.lru_cache
def table(device: torch.device) -> Mapping[ShapeClass, Configuration]:
    """All configurations for ``device``, read and put together once."""
    if device.type != "cuda":
        return BUILT_IN
    path, known = source(device), built_in(device)
    if path is None:
        return known
    own = read(path, torch.cuda.get_device_name(device))
    return {shape: own.get(shape, config)._replace(block_m=config.block_m) for shape, config in known.items()}


def built_in(device: torch.device) -> dict[ShapeClass, Configuration]:
    """The built-in table as it fits ``device``."""
    if device.type != "cuda":
        return dict(BUILT_IN)
    properties = torch.cuda.get_device_properties(device)
    # NVIDIA's allow more than the default where a kernel asks for it, as Triton's do.
    room = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return {shape: _fitting(config, shape, room) for shape, config in BUILT_IN.items()}


def source(device: torch.device) -> Path | None:
    """The file that configurations for ``device`` come from; None for the built-in table alone."""
    if device.type != "cuda":
        return None
    if own := os.environ.get(VARIABLE):
        return Path(own)
    path = packaged(torch.cuda.get_device_name(device))
    return path if path.is_file() else None


def packaged(gpu: str) -> Path:
    """Where the package keeps the file of a GPU: ``NVIDIA_H200.json`` for ``NVIDIA H200``."""
    return FOLDER / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', gpu)}.json"


def _fitting(config: Configuration, shape: ShapeClass, room: int) -> Configuration:
    """``config``, or one with fewer bytes on their way where a program may have only ``room`` bytes of shared memory:
    227 KiB on sm_90, 163 on sm_80, 99 on sm_86, sm_89 and sm_120, 64 on sm_75."""
    if shape.kind == _CHUNK and shape.head_dim > 256 and room < 200 * _KIB:
        config = config._replace(block_m=32, num_stages=1)
    if shape.kind == _DECODE and shape.bits == 8 and room < 128 * _KIB:
        config = config._replace(num_stages=2)
    if room < 99 * _KIB:
        config = config._replace(block_m=min(config.block_m, 32), block_n=32, num_stages=1)
    return config


def read(path: Path, gpu: str) -> dict[ShapeClass, Configuration]:
    """The configurations of a file that was measured on ``gpu``, with the built-in ones' ``block_m``.

    Raises:
        ValueError: The file cannot be read, holds what is not allowed, or is of another GPU.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); {_HOW}") from None
    try:
        _check_keys(content, "the file", required=("gpu", "configurations"), optional=("made",))
        if content["gpu"] != gpu:
            raise ValueError(f"gpu is {content['gpu']!r}, and this one is {gpu!r}")
        if not isinstance(content["configurations"], list):
            raise ValueError("configurations is not a list")
        found: dict[ShapeClass, Configuration] = {}
        for number, entry in enumerate(content["configurations"]):
            shape, config = _entry(entry, f"configurations[{number}]")
            if shape in found:
                raise ValueError(f"configurations[{number}] is the second one for {shape}")
            found[shape] = config
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {_HOW}") from None
    return found


_HOW = f"`kvpass bench configurations --out FILE` makes one, and without {VARIABLE} the package's own are used"


def _entry(entry: Any, where: str) -> tuple[ShapeClass, Configuration]:
    _check_keys(entry, where, required=tuple(ALLOWED), optional=_TIMES)
    for name, allowed in ALLOWED.items():
        if type(entry[name]) is not type(allowed[0]) or entry[name] not in allowed:
            raise ValueError(f"{where}: {name} is {entry[name]!r}; allowed: {', '.join(map(str, allowed))}")
    shape = ShapeClass(*(entry[name] for name in ShapeClass._fields))
    fields = {name: entry[name] for name in Configuration._fields if name != "block_m"}
    return shape, BUILT_IN[shape]._replace(**fields)


def _check_keys(mapping: Any, where: str, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    if not isinstance(mapping, dict):
        raise ValueError(f"{where} is not a JSON object")
    for key in mapping:
        if key not in required + optional:
            raise ValueError(f"{where} has an unknown key {key!r}; allowed: {', '.join(required + optional)}")
    if missing := [key for key in required if key not in mapping]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")


def write(path: Path, gpu: str, made: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """Write a file that :func:`read` reads, an entry a line.

    Args:
        path: The file. Entries for other shape classes that it has for the same GPU stay as they are.
        gpu: Name of the GPU.
        made: What is worth knowing of where it was measured.
        entries: Objects as :mod:`kvpass.tiles` says.

    Raises:
        ValueError: An entry is not allowed, or the file is there and malformed, or of another GPU.
    """
    kept = []
    new = {_entry(entry, f"configurations[{number}]")[0] for number, entry in enumerate(entries)}
    if path.is_file():
        read(path, gpu)
        old = json.loads(path.read_text())["configurations"]
        kept = [entry for entry in old if ShapeClass(*(entry[name] for name in ShapeClass._fields)) not in new]
    order = {shape: number for number, shape in enumerate(BUILT_IN)}
    entries = sorted([*kept, *entries], key=lambda entry: order[_entry(entry, "")[0]])
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
    head = f'  "gpu": {json.dumps(gpu)},\n  "made": {json.dumps(made)},\n'
    path.write_text(f'{{\n{head}  "configurations": [\n{lines}\n  ]\n}}\n')
