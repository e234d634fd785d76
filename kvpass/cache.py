"""``QuantizedCache``: a transformers ``Cache`` whose storage is quantized.

The cache is right by itself, in eager mode and under any ``torch.compile`` backend: ``update`` writes quantized bytes
and returns what they decode to. The ``kvquant`` backend recognizes that read and fuses it with the attention behind
it, so that the decoded K and V never exist in memory.

The first prefill is exact: it attends to the K and V it just computed, and their quantized bytes are stored beside it.
Where a format is centred and nobody gave the centre, it is the mean of the first tokens, taken before they are stored
and fixed from then on; any vector would be exact, a mean makes what is stored small. So it is with the tensor scale of
a format whose block scales it moves into their range (nvfp4, int8): the largest magnitude of the first tokens gives it.

A layer with a sliding window (or chunked attention) is a ring: the token at position ``p`` is in slot ``p % slots``.
What attention reads is laid out by position all the same, ``max_cache_len`` of them, so that masks and counters of such
a layer are those of any other, and nothing changes when the window fills.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from kvpass import ops, reference
from kvpass.config import ConfigLike, KVQuantConfig, LayerConfig
from kvpass.formats import CODECS, KVBuffers, KVFormat, check_centre
from kvpass.scales import KVScales

FIRST_TOKENS = 256  # of a prompt: centres and tensor scales are taken from them
# Slots of a ring beyond its window. So many tokens can be cropped from a full ring (a rejected draft of assisted
# decoding), and one more added at once, without losing what the window still needs.
SPARE_SLOTS = 32
# Models with a sliding-window cache whose masks know nothing of the window: they rely on the cache dropping tokens.
_MASKS_WITHOUT_WINDOW = (
    *("kyutai_speech_to_text", "moonshine_streaming", "moshi"),
    *("inkling_text", "inkling2_text", "inkling2_loop_text", "zaya"),
)
# Models that cannot have a cache of a fixed size in the place of their own, and why.
_WIDTH = "works with no static cache: it {} by the width of K"
_NO_STATIC_CACHE = {
    "bloom": "makes its biases (alibi) as wide as the cache while it reads a prompt, and K has no such width then",
    "cpmant": _WIDTH.format("places its biases"),
    "gpt_neo": _WIDTH.format("counts tokens"),
    "minimax": "makes a cache of its own kind, which cannot be replaced",
}


class QuantizedCache(Cache):
    """A static KV cache in FP8 or FP4.

    Args:
        config: The model's configuration. Layers of full, sliding-window and chunked attention are quantized; states
            of linear attention, Mamba and convolutions are kept as transformers keeps them.
        format: A format's name, a dictionary, or a :class:`kvpass.KVQuantConfig`.
        max_cache_len: Slots per sequence: the longest prompt plus everything generated after it.

    Attributes:
        quantization: The configuration.
        layer_types: Type of each layer, as the model's config names it.

    Raises:
        ValueError: An unknown format, a ``max_cache_len`` below 1, a head_dim that the format cannot hold, or scales
            of another model.
        NotImplementedError: A layer type or an attention implementation that is not supported.

    For inference: stored tokens carry no gradient.

    The buffers are allocated by the first ``update``, or by ``early_initialization``. Their addresses never change
    afterwards except in ``batch_repeat_interleave`` and ``batch_select_indices``, which change their size.
    """

    _is_part_of_two = False  # with cross attention's, in a kvpass.QuantizedEncoderDecoderCache

    def __init__(self, config: PreTrainedConfig, format: ConfigLike = "fp8_e4m3", max_cache_len: int = 4096) -> None:
        self.quantization = KVQuantConfig.of(format)
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"expected the model's configuration (model.config), got {type(config).__name__}")
        if not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise ValueError(f"max_cache_len is {max_cache_len!r}; it must be a whole number of at least 1")
        text_config = config.get_text_config(decoder=True)
        if text_config.is_encoder_decoder and not self._is_part_of_two:
            raise NotImplementedError(
                f"{config.model_type} is an encoder-decoder; use kvpass.QuantizedEncoderDecoderCache, which holds its "
                "cross attention too"
            )
        likes = layers_of_transformers(text_config, max_cache_len)
        types = (list(getattr(text_config, "layer_types", None) or ()) + ["full_attention"] * len(likes))[: len(likes)]
        self.layer_types = tuple(types)
        self._positions = max_cache_len
        self._most_stored = 0
        self._kv_heads = _in_every_layer(text_config, "num_key_value_heads", "num_attention_heads")
        self._model_types = {config.model_type, text_config.model_type}
        quantization, lengths = self.quantization.resolved(types), Lengths()
        attends = [index for index, like in enumerate(likes) if type(like) in (*_PLAIN, *_HYBRIDS)]
        self._check_scales(self.quantization.scales, attends)
        layers = list(likes)
        for index in attends:
            layers[index] = _quantized_like(likes[index], quantization.layer(index), max_cache_len, lengths)
        super().__init__(layers=layers)
        if (head_dim := _head_dim(text_config)) is not None:
            for fmt in {fmt for layer in self._layers for fmt in (layer.key_format, layer.value_format)}:
                fmt.check_head_dim(head_dim)

    @property
    def max_cache_len(self) -> int:
        """Positions that a sequence can have."""
        return self._positions

    @classmethod
    def without_memory(cls, config: PreTrainedConfig, format: ConfigLike, max_cache_len: int) -> QuantizedCache:
        """A cache for one sequence whose buffers are on the meta device, to be asked for its ``nbytes``.

        Raises:
            NotImplementedError: The configuration does not tell the shape of K and V.
        """
        text_config = config.get_text_config(decoder=True)
        cache = cls(config, format, max_cache_len)
        kv_heads, head_dim = cache._kv_heads, _head_dim(text_config)
        if kv_heads is None or head_dim is None:
            raise NotImplementedError(
                f"{config.model_type}: its configuration does not tell heads and widths of K and V, alike for all "
                "layers, so what its cache occupies is known only once it is allocated"
            )
        states = torch.empty(1, kv_heads, 0, head_dim, dtype=torch.bfloat16, device="meta")
        for layer in cache._layers:
            layer.lazy_initialization(states, states)
        return cache

    def set_scales(self, scales: KVScales) -> None:
        """Use other tensor scales and centres, in place: CUDA graphs recorded over this cache take them from the next
        token on.

        Raises:
            ValueError: Scales of another model, or a cache that holds tokens, which the old scales belong to.
        """
        self._check_scales(scales, [i for i, layer in enumerate(self.layers) if isinstance(layer, QuantizedLayer)])
        if any(not layer.is_empty for layer in self._layers):
            raise ValueError("the cache holds tokens that were stored with its present scales; call reset() first")
        for index, layer in enumerate(self.layers):
            if isinstance(layer, QuantizedLayer):
                old = layer.config
                tensors = scales[index].tensors(old.key, old.value)
                layer.set_scales(LayerConfig(old.key, old.value, *tensors, old.keep_first))

    def saturation(self) -> list[tuple[float, float]]:
        """For each layer the share of K, and of V, that lies at the end of its format's range: codes of an fp8
        format, block scales of nvfp4 and int8. More than a few in a thousand means that the tensor scale is too
        small."""
        return [layer.saturation() if isinstance(layer, QuantizedLayer) else (0.0, 0.0) for layer in self.layers]

    def reset(self) -> None:
        """Forget every token. The buffers, and CUDA graphs recorded over them, stay valid."""
        self._most_stored = 0
        super().reset()  # type: ignore[no-untyped-call]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: A positive argument, more tokens than are stored, tokens before which a sliding window has lost
                what it would need, or states of linear attention. Nothing is changed then.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}; "
                f"crop({-tokens_to_remove}) removes {tokens_to_remove}"
            )
        stored = int(self.get_seq_length()) if tokens_to_remove else 0
        if -tokens_to_remove > stored:
            raise ValueError(f"cannot remove {-tokens_to_remove} tokens from a cache that holds {stored}")
        linear = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]
        if tokens_to_remove and any(
            any(layer.is_recurrent_states_initialized.values()) or not getattr(layer, "record_past", False)
            for layer in linear
        ):
            raise ValueError(f"cannot remove {-tokens_to_remove} tokens: states of linear attention do not go back")
        self._most_stored = max(self._most_stored, stored)
        lost = self._most_stored - (stored + tokens_to_remove)
        for layer in self._layers if tokens_to_remove else ():
            if self._most_stored > layer.slots and lost > layer.slots - layer.window:
                raise ValueError(
                    f"cannot remove {-tokens_to_remove} tokens: a window of {layer.window} has lost what it would need "
                    f"again. At most {layer.slots - layer.window} tokens can be removed from a full window"
                )
        super().crop(tokens_to_remove)

    def _check_scales(self, scales: KVScales | None, layers: list[int]) -> None:
        if scales is not None:
            scales.check(layers, self._kv_heads, self._model_types)

    @property
    def device(self) -> torch.device | None:
        """Device of the first layer's buffers; None before initialization."""
        first = self._layers[0]
        return first.device if first.is_initialized else None

    @property
    def nbytes(self) -> int:
        """Bytes of storage that hold codes and block scales, 0 before initialization."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def eager_reads(self) -> int:
        """Times a layer's decoded cache was read outside a compiled graph since the last reset, hence unfused. A prompt
        of one token is not counted."""
        return sum(layer.eager_reads for layer in self._layers)

    @property
    def _layers(self) -> list[QuantizedLayer]:
        """The layers that are quantized: not those of linear attention, nor those that share another's cache."""
        return [layer for layer in self.layers if isinstance(layer, QuantizedLayer)]


class QuantizedLayer(CacheLayerMixin):
    """K and V of one attention layer.

    Attributes:
        max_cache_len: Positions that a sequence can have.
        window: The most positions that a token attends to: ``max_cache_len``, or the sliding window.
        slots: Tokens that the buffers hold. With fewer than ``max_cache_len`` they are a ring.
        is_sliding: Whether masks must be those of a sliding window (or of chunks).
        key, value: :class:`kvpass.formats.KVBuffers`, once initialized.
        last_position: ``[1]`` int64 on the layer's device: position of the newest token, -1 while empty. All layers of
            a device share it; the first of them to be updated (``leads``) advances it, so a decode step launches one
            addition instead of one per layer, and the operators read it as it is.
        behind: Tokens that ``last_position`` counts already and this layer has not been given yet. Not 0 only within a
            forward, between the update of the layer that leads and this one's.
        is_empty: Known on the host, so that a prefill can be told from a later chunk without asking the device.
        eager_reads: Times the decoded cache was read outside a compiled graph since the last reset, hence unfused.
    """

    is_compileable = True
    is_croppable = True

    def __init__(
        self, config: LayerConfig, max_cache_len: int, lengths: Lengths | None = None, window: int | None = None
    ) -> None:
        # The base class would set `keys` and `values`, which are read-only here.
        self.config = config
        self.key_format, self.value_format = config.key, config.value
        self.max_cache_len, self.is_sliding = max_cache_len, window is not None
        self.window = min(window or max_cache_len, max_cache_len)
        self.slots = min(self.window + SPARE_SLOTS, max_cache_len)
        self.is_initialized = False
        self.is_empty = True
        self.eager_reads = 0
        self._lengths = lengths or Lengths()
        self.behind = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for batch, KV heads, head_dims and device of these ``[batch, kv_heads, any, head_dim]`` tensors."""
        with _outside_inference_mode():
            self.key, self.value = self.config.allocate_like(key_states, value_states, self.slots)
            self.last_position, self._sharing = self._lengths.join(self, key_states.device)
        self.batch_size, self.dtype, self.device = key_states.shape[0], key_states.dtype, key_states.device
        self._mark_static()
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Quantize and store new tokens, and return the K and V to attend to.

        Args:
            key_states, value_states: ``[batch, kv_heads, length, head_dim]``.

        Returns:
            The arguments themselves in a first prefill of more than one token, else all ``max_cache_len`` positions,
            decoded, and zero where nothing is stored (yet, or any more). More new tokens than a ring has spare slots
            for are returned as they came, beside the decoded ones before them.

        Raises:
            ValueError: The tokens do not fit the room that is left, or another batch size than the cache was made
                for. Nothing is overwritten then.
        """
        length = key_states.shape[-2]
        if self.is_initialized:
            self._check_rows(key_states, value_states)
        if not self.is_initialized:
            self._check_room(length, 0)
            self.lazy_initialization(key_states, value_states)
        if self.leads:
            # Inside a compiled graph the counter cannot be read; the operators guard there (see kvpass.ops).
            stored = 0 if self.is_empty or torch.compiler.is_compiling() else int(self.last_position) + 1
            self._check_room(length, stored)
            self.last_position.add_(length)
            for layer in self._sharing:
                layer.behind = length
        self.behind = 0
        positions = self.last_position
        if length > 1:
            positions = positions - (length - 1) + torch.arange(length, device=self.device)
        is_first_prefill = self.is_empty and length > 1
        if self.is_empty:
            learn(self.config, self.key, self.value, key_states, value_states)
        elif not torch.compiler.is_compiling():
            self.eager_reads += 1
        overwrites = not is_first_prefill and length > 1 + self.slots - self.window and self.is_ring
        key, value = (
            (self.key, self.key_format, key_states.dtype),
            (self.value, self.value_format, value_states.dtype),
        )
        before = self._read(positions[:1] - 1, key, value) if overwrites else None
        self._store(key_states, value_states, positions)
        self.is_empty = False
        if is_first_prefill:
            return key_states, value_states
        if before is not None:
            at = positions.clamp(max=self.max_cache_len - 1)  # what does not fit is NaN already
            return before[0].index_copy(2, at, key_states), before[1].index_copy(2, at, value_states)
        decoded_key, decoded_value = self._read(positions, key, value)
        return decoded_key, decoded_value

    @property
    def leads(self) -> bool:
        """Whether this layer advances the counter that it shares."""
        return self._sharing[0] is self

    @property
    def is_ring(self) -> bool:
        """Whether there are fewer slots than positions, so that new tokens overwrite those that left the window."""
        return self.slots < self.max_cache_len

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """K at all positions, decoded: ``[batch, kv_heads, max_cache_len, head_dim]``; None before initialization."""
        return self._stored(self.key, self.key_format) if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """V at all positions, decoded: ``[batch, kv_heads, max_cache_len, head_dim]``; None before initialization."""
        return self._stored(self.value, self.value_format) if self.is_initialized else None

    @property
    def nbytes(self) -> int:
        """Bytes of storage that hold codes and block scales, 0 before initialization."""
        return self.key.nbytes + self.value.nbytes if self.is_initialized else 0

    def set_scales(self, config: LayerConfig) -> None:
        """Take the tensor scales and centres of ``config`` instead of the present ones, in place.

        Raises:
            ValueError: The layer holds tokens, which the present ones belong to; or a shape that does not fit it.
        """
        if not self.is_empty:
            raise ValueError("the layer holds tokens that were stored with its present scales; call reset() first")
        self.config = config
        if self.is_initialized:
            new = (self.key, config.key_scale, config.key_centre), (self.value, config.value_scale, config.value_centre)
            for buffers, scale, centre in new:
                if buffers.scale is not None and scale is not None:
                    buffers.scale.copy_(scale)
                if buffers.centre is not None and centre is not None:
                    check_centre(centre, *buffers.centre.shape)
                    buffers.centre.copy_(centre)

    def saturation(self) -> tuple[float, float]:
        """Of K and of V: see :meth:`QuantizedCache.saturation`. 0 where nothing is stored."""
        end = min(int(self.last_position) + 1, self.slots) if self.is_initialized else 0
        if not end:
            return 0.0, 0.0
        pairs = ((self.key, self.key_format), (self.value, self.value_format))
        return tuple(reference.saturation(buffers, fmt, end) for buffers, fmt in pairs)  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the K that ``query_length`` new tokens will attend to."""
        if self.is_empty and query_length > 1:
            return query_length, 0
        return self.max_cache_len, 0

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]
        """Tokens stored: a 0-dim int64 tensor (reading it does not wait for the device), or 0 before initialization."""
        return self.last_position[0] + (1 - self.behind) if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Positions that a sequence can have."""
        return self.max_cache_len

    def reset(self) -> None:
        """Forget every token. The buffers, and CUDA graphs recorded over them, stay valid."""
        self.is_empty, self.eager_reads = True, 0
        if self.is_initialized and self.leads:
            self.last_position.fill_(-1)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens; :meth:`QuantizedCache.crop` checks that it can be done."""
        if self.is_initialized and self.leads:
            self.last_position.add_(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give row ``i`` of the batch what row ``beam_idx[i]`` holds, in place."""
        if self.is_initialized:
            for buffer in self._batched():
                buffer.copy_(buffer.index_select(0, beam_idx.to(self.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows ``indices`` (integers or booleans) of the batch."""
        self._replace(lambda buffer: buffer[indices.to(self.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch ``repeats`` times."""
        self._replace(lambda buffer: buffer.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """Not supported: raises ``NotImplementedError``."""
        raise NotImplementedError("QuantizedCache does not support offloading; use it without offloading=True")

    prefetch = offload

    def _check_rows(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape[0] != self.batch_size:
            raise ValueError(
                f"got a batch of {key_states.shape[0]}, but the cache was allocated for a batch of {self.batch_size}; "
                "make a new QuantizedCache for another batch size"
            )
        for name, x, buffers, fmt in (
            ("K", key_states, self.key, self.key_format),
            ("V", value_states, self.value, self.value_format),
        ):
            kv_heads, head_dim = buffers.codes.shape[1], fmt.head_dim(buffers.codes.shape[3])
            if x.shape[1] != kv_heads or x.shape[3] != head_dim:
                raise ValueError(
                    f"got {name} with {x.shape[1]} heads of {x.shape[3]}, but the cache was allocated for {kv_heads} "
                    f"heads of {head_dim}; it belongs to another model"
                )

    def _check_room(self, length: int, stored: int) -> None:
        if stored + length > self.max_cache_len:
            raise ValueError(
                f"{length} tokens do not fit: the cache holds {stored} of at most {self.max_cache_len}; "
                f"make it with max_cache_len={stored + length} or more"
            )

    def _store(self, key_states: Tensor, value_states: Tensor, positions: Tensor) -> None:
        if self.is_ring:
            key_states, value_states = key_states[:, :, -self.slots :], value_states[:, :, -self.slots :]
            positions = positions[-self.slots :]
            # A position that does not fit stays one, so that the operators see it.
            positions = torch.where(positions < self.max_cache_len, positions % self.slots, positions)
        formats = self.key_format.name, self.value_format.name
        ops.store(key_states, value_states, positions, *self.key, *self.value, *formats)

    def _read(self, positions: Tensor, *sides: tuple[KVBuffers, KVFormat, torch.dtype]) -> list[Tensor]:
        """What ``sides`` decode to when the newest token is at ``positions[-1]``."""
        written = positions
        if self.is_ring:
            written = torch.where(positions < self.max_cache_len, positions.clamp(max=self.slots - 1), positions)
        decoded = [ops.dequantize(*buffers, written, fmt.name, dtype) for buffers, fmt, dtype in sides]
        return [ops.unroll(side, positions, self.max_cache_len) for side in decoded] if self.is_ring else decoded

    def _stored(self, buffers: KVBuffers, fmt: KVFormat) -> Tensor:
        return self._read(self.last_position, (buffers, fmt, self.dtype))[0]

    def _batched(self) -> list[Tensor]:
        return [t for b in (self.key, self.value) for t in (b.codes, b.block_scale, b.kept) if t is not None]

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        with _outside_inference_mode():
            self.key, self.value = self.key.map_batch(change), self.value.map_batch(change)
        self.batch_size = self.key.codes.shape[0]
        self._mark_static()

    def _mark_static(self) -> None:
        """Tell CUDA graphs that these addresses stay; without it every mutated input makes them give up."""
        if not torch.compiler.is_compiling():
            for tensor in (*self.key.tensors(), *self.value.tensors(), self.last_position):
                torch._dynamo.mark_static_address(tensor)


def learn(
    config: LayerConfig,
    key: KVBuffers,
    value: KVBuffers,
    key_states: Tensor,
    value_states: Tensor,
    is_written: Tensor | None = None,
) -> None:
    """Set the centres and tensor scales that nobody gave from the first :data:`FIRST_TOKENS` tokens, in place.

    Args:
        config: What was given.
        key, value: The buffers.
        key_states, value_states: ``[batch, kv_heads, length, head_dim]``.
        is_written: ``[at most FIRST_TOKENS]`` boolean, whether the first slots hold tokens, and not zeros; None where
            all do.
    """
    for buffers, fmt, x, scale, centre in (
        (key, config.key, key_states, config.key_scale, config.key_centre),
        (value, config.value, value_states, config.value_scale, config.value_centre),
    ):
        x = x[:, :, :FIRST_TOKENS].float()
        weight = 1.0 if is_written is None else is_written[:, None].float()
        if buffers.centre is not None and centre is None:
            buffers.centre.copy_(centre_of(x, weight))
        if buffers.scale is not None and fmt.learns_scale and scale is None:
            buffers.scale.copy_(scale_of(x, CODECS[fmt.codec].max, buffers.centre, weight))


def centre_of(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """``[kv_heads, head_dim]``: the mean of ``x`` (``[batch, kv_heads, length, head_dim]`` float32) over rows and
    tokens, 0 where that is not finite. ``weight`` (``[length, 1]``) is 1 for a token and 0 for a slot of zeros."""
    mean = x.mean((0, 2))
    if isinstance(weight, Tensor):
        mean = mean / weight.mean().clamp(min=1 / FIRST_TOKENS)
    return mean.nan_to_num(0.0, 0.0, 0.0)


def scale_of(x: Tensor, code: float = 6.0, centre: Tensor | None = None, weight: Tensor | float = 1.0) -> Tensor:
    """``[kv_heads]`` float32: the tensor scale that a format of e4m3 block scales takes from the tokens ``x``, which
    are stored less ``centre``, in codes up to ``code``; arguments as for :func:`centre_of`.

    With ``p`` the power of two at or below the largest magnitude ``a``, it is ``p / 16`` for e2m1 (``p / 256`` for
    int8): then ``a`` has a block scale ``a / 6 / scale`` from 2.7 to 5.3 (2 to 4), the middle, in octaves, of what e4m3
    holds as a normal number, ``2**-6`` to 448. A later token can be 84 times as large before it saturates, and a block
    scale loses bits only where its block is 170 times as small (128). As a power of two it changes no rounding of any
    other block scale: which of them it is, and so the other rows of a batch and their padding, shows at those two ends
    alone.

    ``a`` is at least a sixteenth of the magnitude before ``centre`` is taken away: a prompt of one token is its own
    centre, and says nothing of how far others lie. A rotation is left out. It changes ``a`` by ``sqrt(head_dim)`` at
    most. What is not finite does not count, and the scale is 1 where nothing is left.
    """
    distance = x if centre is None else (x - centre[:, None]) * weight
    largest = torch.maximum(distance.abs(), x.abs() / 16)
    largest = torch.where(largest.isfinite(), largest, 0.0).amax((0, 2, 3))
    power = (largest.clamp(min=2.0**-100).view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(largest == 0, 1.0, power / 2 ** (int(code).bit_length() + 1))


def _outside_inference_mode() -> AbstractContextManager[object]:
    """For allocations that outlive ``torch.inference_mode``: its tensors could not be written outside it."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


class Lengths:
    """The counters of one cache: one per device, shared by the layers there."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, tuple[Tensor, list[QuantizedLayer]]] = {}

    def join(self, layer: QuantizedLayer, device: torch.device) -> tuple[Tensor, list[QuantizedLayer]]:
        """The counter of ``device``, and the layers that share it: ``layer`` from now on, too."""
        if device not in self._by_device:
            self._by_device[device] = torch.full((1,), -1, dtype=torch.int64, device=device), []
        counter, sharing = self._by_device[device]
        sharing.append(layer)
        return counter, sharing


_LinearAttention: Any = LinearAttentionLayer


class HybridLayer(_LinearAttention, QuantizedLayer):  # type: ignore[misc]
    """K and V of an attention layer, quantized, and beside them the states of linear attention, as they are."""

    def __init__(
        self, config: LayerConfig, max_cache_len: int, lengths: Lengths, window: int | None, number_of_states: int
    ) -> None:
        QuantizedLayer.__init__(self, config, max_cache_len, lengths, window)
        _LinearAttention.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Tensor, **kwargs: Tensor) -> None:
        """Of K and V where they are given by place, of a state where it is given by name."""
        if args:
            QuantizedLayer.lazy_initialization(self, *args)
        else:
            _LinearAttention.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Forget every token."""
        _LinearAttention.reset(self)
        QuantizedLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens."""
        _LinearAttention.crop(self, tokens_to_remove)
        QuantizedLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give row ``i`` of the batch what row ``beam_idx[i]`` holds."""
        _LinearAttention.reorder_cache(self, beam_idx)
        QuantizedLayer.reorder_cache(self, beam_idx)

    def get_max_length(self) -> int:
        """Positions that a sequence can have."""
        return self.max_cache_len

    def batch_select_indices(self, indices: Tensor) -> None:
        """Not supported: raises ``NotImplementedError``."""
        raise NotImplementedError("the states of linear attention cannot be selected or repeated by rows")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not supported: raises ``NotImplementedError``."""
        raise NotImplementedError("the states of linear attention cannot be selected or repeated by rows")

    offload = QuantizedLayer.offload
    prefetch = offload


def layers_of_transformers(config: PreTrainedConfig, max_cache_len: int) -> list[Any]:
    """What transformers itself would cache each layer of the model in, after checking that all can be held."""
    check_attention(config)
    if _in_every_layer(config, "num_attention_heads") is None:
        raise NotImplementedError(f"{config.model_type} has no attention layers, so there is no KV cache to quantize")
    if reason := _NO_STATIC_CACHE.get(config.model_type):
        raise NotImplementedError(f"{config.model_type} {reason}")
    try:
        layers = StaticCache(config=config, max_cache_len=max_cache_len).layers
    except KeyError as error:
        raise NotImplementedError(
            f"{config.model_type}: transformers has no static cache for layers of type {error}"
        ) from error
    known = {*_PLAIN, *_HYBRIDS, *_AS_THEY_ARE}
    for index, layer in enumerate(layers):
        if type(layer) not in known:
            raise NotImplementedError(
                f"{config.model_type}: layer {index} needs a {type(layer).__name__}, which keeps more than K and V; "
                f"supported are {', '.join(sorted(kind.__name__ for kind in known))}"
            )
        if getattr(layer, "is_sliding", False) and config.model_type in _MASKS_WITHOUT_WINDOW:
            raise NotImplementedError(
                f"{config.model_type}: its masks leave the sliding window to the cache, and a ring needs it in the mask"
            )
    if not any(type(layer) in (*_PLAIN, *_HYBRIDS) for layer in layers):
        raise NotImplementedError(f"{config.model_type} has no attention layers, so there is no KV cache to quantize")
    return layers


_AS_THEY_ARE = tuple(
    getattr(cache_utils, name) for name in ("LinearAttentionLayer", "DummyLayer") if hasattr(cache_utils, name)
)
_PLAIN = (StaticLayer, StaticSlidingWindowLayer)
_HYBRIDS = (LinearAttentionAndStaticFullAttentionLayer, LinearAttentionAndStaticSlidingWindowAttentionLayer)


def _quantized_like(like: Any, config: LayerConfig, max_cache_len: int, lengths: Lengths) -> QuantizedLayer:
    """A quantized layer in the place of ``like``."""
    window = like.max_cache_len if like.is_sliding else None
    if window is not None:
        config = config._replace(keep_first=0)  # the first tokens leave the window
    if type(like) in _HYBRIDS:
        return HybridLayer(config, max_cache_len, lengths, window, like.number_of_states)
    return QuantizedLayer(config, max_cache_len, lengths, window)


def _head_dim(config: PreTrainedConfig) -> int | None:
    """The head_dim of every layer, where the configuration tells it plainly; None where it must be seen."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return None  # latent attention: K and V have other widths
    width, heads = _in_every_layer(config, "hidden_size"), _in_every_layer(config, "num_attention_heads")
    return _in_every_layer(config, "head_dim", "d_kv") or (width // heads if width and heads else None)


def _in_every_layer(config: PreTrainedConfig, *names: str) -> int | None:
    """The first of these attributes that is set, if it is the same number in every layer; else None."""
    layers = getattr(config, "per_layer_config", None) or [config]
    found = {next((v for name in names if (v := getattr(layer, name, None)) is not None), None) for layer in layers}
    value = found.pop() if len(found) == 1 else None
    return value if isinstance(value, int) else None


def check_attention(config: PreTrainedConfig) -> None:
    """Raise ``NotImplementedError`` for an attention implementation that would attend to empty slots."""
    implementation = config._attn_implementation
    if implementation not in (None, "sdpa", "eager", "flex_attention"):
        raise NotImplementedError(
            f"attention implementation {implementation!r} takes no mask over a static cache, so it would attend to "
            "empty slots; load the model with attn_implementation='sdpa'"
        )
