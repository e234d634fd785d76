"""Signal to quantization noise of each layer's K, V and attention output.

One pass of the model with exact K and V. Each layer's K and V go through the storage of every configuration beside it,
and its attention is computed once more with what comes back; so a layer's error is its own, not that of those before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvpass.accuracy.results import LayerError
from kvpass.accuracy.storage import layer_config, stored
from kvpass.config import KVQuantConfig
from kvpass.windows import WindowLayer, cache_argument

_SIDES = ("key", "value", "output")


class LayerErrors:
    """Signal and noise of every layer under several configurations, summed over windows.

    Args:
        model: A causal LM.
        configs: Resolved for the model's layers.
        layers: How many layers the model has.
    """

    def __init__(self, model: nn.Module, configs: Sequence[KVQuantConfig], layers: int) -> None:
        self.model, self.layers = model, layers
        model_config: Any = model.config
        self.configs = [[layer_config(model_config, config, i) for i in range(layers)] for config in configs]
        self.attentions = [
            module
            for module in model.modules()
            if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")
        ]
        self.power = torch.zeros(len(configs), layers, len(_SIDES), 2, dtype=torch.float64)  # of signal and noise
        self._decoded: list[tuple[Tensor, Tensor]] = []  # of the layer that is being computed, by configuration

    def add(self, ids: Tensor) -> None:
        """Measure windows of tokens, ``[batch, length]`` on the model's device."""
        handles = [module.register_forward_hook(self._repeat, with_kwargs=True) for module in self.attentions]
        readers = [functools.partial(self._read, index) for index in range(self.layers)]
        try:
            cache = Cache(layers=[WindowLayer(reader) for reader in readers])
            self.model(input_ids=ids, use_cache=True, **{cache_argument(self.model): cache})
        finally:
            for handle in handles:
                handle.remove()

    def results(self, config: int) -> tuple[LayerError, ...]:
        """Of the configuration with this index, layer by layer."""
        return tuple(LayerError(*map(_decibels, layer.tolist())) for layer in self.power[config])  # type: ignore[arg-type]

    def _read(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._decoded = [stored(config[index], key, value) for config in self.configs]
        for config, decoded in enumerate(self._decoded):
            for side, (exact, found) in enumerate(zip((key, value), decoded, strict=True)):
                self._add(config, index, side, exact, found)
        return key, value

    def _repeat(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        names = [name for name, value in kwargs.items() if isinstance(value, Cache)]
        for config, decoded in enumerate(self._decoded if names else ()):
            layer = WindowLayer(functools.partial(_given, decoded))
            cache = Cache(layers=[layer] * self.layers)
            found = module.forward(*args, **{**kwargs, names[0]: cache})
            self._add(config, module.layer_idx, _SIDES.index("output"), output[0], found[0])

    def _add(self, config: int, layer: int, side: int, exact: Tensor, found: Tensor) -> None:
        exact, found = exact.double(), found.double()
        power = torch.stack([exact.square().sum(), (found - exact).square().sum()])
        self.power[config, layer, side] += power.cpu()


def _given(decoded: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return decoded


def _decibels(power: Sequence[float]) -> float | None:
    signal, noise = power
    if not signal:
        return None  # never seen
    return 10 * math.log10(signal / noise) if noise else math.inf
