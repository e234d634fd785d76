"""``KVQuantConfig``: the one user-facing configuration, and how it is read from names, dictionaries and files."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvpass.formats import KVFormat, get_format


@dataclass(frozen=True)
class KVQuantConfig:
    """How a model's KV cache is stored.

    Attributes:
        format: Format of K and V, one of :func:`kvpass.format_names`.
        key_format: Format of K, where it differs from ``format``.
        value_format: Format of V, where it differs from ``format``.
        strict: Raise :class:`kvpass.NotFusedError` when a compiled graph has an attention that reads a cache and was
            not fused, instead of warning and running it slowly.

    Raises:
        ValueError: An unknown format, or a ``strict`` that is no boolean.
    """

    format: str = "fp8_e4m3"
    key_format: str | None = None
    value_format: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name in (self.format, self.key_format or self.format, self.value_format or self.format):
            get_format(name)
        if not isinstance(self.strict, bool):
            raise ValueError(f"strict is {self.strict!r}; allowed: True, False")

    @property
    def key(self) -> KVFormat:
        """The format K is stored in."""
        return get_format(self.key_format or self.format)

    @property
    def value(self) -> KVFormat:
        """The format V is stored in."""
        return get_format(self.value_format or self.format)

    @classmethod
    def of(cls, config: ConfigLike) -> KVQuantConfig:
        """``config`` itself, or the configuration that a format's name or a dictionary stands for."""
        if isinstance(config, KVQuantConfig):
            return config
        if isinstance(config, str):
            if config.endswith((".json", ".yaml", ".yml")):
                raise ValueError(f"{config!r} is a file; read it with kvpass.KVQuantConfig.from_file({config!r})")
            return cls(format=config)
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        raise TypeError(f"expected a format's name, a dictionary or a KVQuantConfig, got {type(config).__name__}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVQuantConfig:
        """Build from a dictionary with this class's fields; an unknown key is an error that names the nearest one."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(unknown_name("configuration key", key, known))
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> KVQuantConfig:
        """Read a JSON file, or YAML where the name ends in ``.yaml`` or ``.yml``, that holds this class's fields."""
        path = Path(path)
        text = path.read_text()
        if path.suffix in (".yaml", ".yml"):
            import yaml  # comes with transformers

            values = yaml.safe_load(text)
        else:
            try:
                values = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds a {type(values).__name__}; expected a mapping with keys such as 'format'")
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, and ``format``: what :meth:`from_dict` takes."""
        default = asdict(KVQuantConfig())
        return {key: value for key, value in asdict(self).items() if key == "format" or value != default[key]}


ConfigLike = str | Mapping[str, Any] | KVQuantConfig


def unknown_name(what: str, name: object, known: list[str]) -> str:
    """The message for a name that is not among ``known``: it says what is, and which comes nearest."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"unknown {what} {name!r}; known: {', '.join(known)}." + (f" Did you mean {close[0]!r}?" if close else "")
