"""``QuantizedCache``: a transformers ``Cache`` whose storage is quantized.

The cache is right by itself, in eager mode and under any ``torch.compile`` backend: ``update`` writes quantized bytes
and returns what they decode to. The ``kvquant`` backend recognizes that read and fuses it with the attention behind
it, so that the decoded K and V never exist in memory.

The first prefill is exact: it attends to the K and V it just computed, and their quantized bytes are stored beside it.
Where a format is centred and nobody gave the centre, it is the mean of the first tokens, taken before they are stored
and fixed from then on; any vector would be exact, a mean makes what is stored small.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, StaticCache, StaticLayer

from kvpass import ops, reference
from kvpass.config import ConfigLike, KVQuantConfig, LayerConfig
from kvpass.formats import KVBuffers, check_centre
from kvpass.scales import KVScales

CENTRE_TOKENS = 256  # from how many of the first tokens a centre is taken


class QuantizedCache(Cache):
    """A static KV cache in FP8 or FP4.

    Args:
        config: The model's configuration. Every attention layer must be a full-attention layer.
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

    def __init__(self, config: PreTrainedConfig, format: ConfigLike = "fp8_e4m3", max_cache_len: int = 4096) -> None:
        self.quantization = KVQuantConfig.of(format)
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"expected the model's configuration (model.config), got {type(config).__name__}")
        if not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise ValueError(f"max_cache_len is {max_cache_len!r}; it must be a whole number of at least 1")
        text_config = config.get_text_config(decoder=True)
        lengths, types = _Lengths(), layer_types(text_config)
        self.layer_types = tuple(types)
        self._kv_heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
        self._model_types = {config.model_type, text_config.model_type}
        self._check_scales(self.quantization.scales, len(types))
        layers = [self.quantization.resolved(types).layer(index) for index in range(len(types))]
        head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
        for fmt in {fmt for layer in layers for fmt in (layer.key, layer.value)}:
            fmt.check_head_dim(head_dim)
        super().__init__(layers=[QuantizedLayer(layer, max_cache_len, lengths) for layer in layers])

    @property
    def max_cache_len(self) -> int:
        """Slots per sequence."""
        return self._layers[0].max_cache_len

    def set_scales(self, scales: KVScales) -> None:
        """Use other tensor scales and centres, in place: CUDA graphs recorded over this cache take them from the next
        token on.

        Raises:
            ValueError: Scales of another model, or a cache that holds tokens, which the old scales belong to.
        """
        self._check_scales(scales, len(self._layers))
        if any(not layer.is_empty for layer in self._layers):
            raise ValueError("the cache holds tokens that were stored with its present scales; call reset() first")
        old = [layer.config for layer in self._layers]
        new = [
            LayerConfig(config.key, config.value, *scales[index].tensors(config.key, config.value), config.keep_first)
            for index, config in enumerate(old)
        ]
        for layer, config in zip(self._layers, new, strict=True):
            layer.set_scales(config)

    def saturation(self) -> list[tuple[float, float]]:
        """For each layer the share of K, and of V, that lies at the end of its format's range: codes of an fp8
        format, block scales of nvfp4. More than a few in a thousand means that the tensor scale is too small."""
        return [layer.saturation() for layer in self._layers]

    def _check_scales(self, scales: KVScales | None, count: int) -> None:
        if scales is not None:
            heads = self._kv_heads if isinstance(self._kv_heads, int) else None
            scales.check(range(count), heads, self._model_types)

    @property
    def device(self) -> torch.device | None:
        """Device of the first layer's buffers; None before initialization."""
        return self._layers[0].device if self._layers[0].is_initialized else None

    @property
    def nbytes(self) -> int:
        """Bytes of storage that hold codes and block scales, 0 before initialization."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def eager_reads(self) -> int:
        """Times a layer's decoded cache was read outside a compiled graph since the last reset, hence unfused."""
        return sum(layer.eager_reads for layer in self._layers)

    @property
    def _layers(self) -> list[QuantizedLayer]:
        return self.layers  # type: ignore[return-value]


class QuantizedLayer(CacheLayerMixin):
    """K and V of one full-attention layer.

    Attributes:
        key, value: :class:`kvpass.formats.KVBuffers`, once initialized.
        last_position: ``[1]`` int64 on the layer's device: the slot of the newest token, -1 while empty. All layers of
            a device share it; the first of them to be updated (``leads``) advances it, so a decode step launches one
            addition instead of one per layer, and the operators read it as it is.
        is_empty: Known on the host, so that a prefill can be told from a later chunk without asking the device.
        eager_reads: Times the decoded cache was read outside a compiled graph since the last reset, hence unfused.
    """

    is_compileable = True
    is_croppable = True
    is_sliding = False

    def __init__(self, config: LayerConfig, max_cache_len: int, lengths: _Lengths | None = None) -> None:
        # The base class would set `keys` and `values`, which are read-only here.
        self.config = config
        self.key_format, self.value_format = config.key, config.value
        self.max_cache_len = max_cache_len
        self.is_initialized = False
        self.is_empty = True
        self.eager_reads = 0
        self._lengths = lengths or _Lengths()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for batch, KV heads, head_dims and device of these ``[batch, kv_heads, any, head_dim]`` tensors."""
        with _outside_inference_mode():
            self.key, self.value = self.config.allocate_like(key_states, value_states, self.max_cache_len)
            self.last_position, self.leads = self._lengths.join(key_states.device)
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
            The arguments themselves in a first prefill of more than one token, else all ``max_cache_len`` decoded
            slots (zero where nothing is stored yet).

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
        positions = self.last_position
        if length > 1:
            positions = positions - (length - 1) + torch.arange(length, device=self.device)
        if self.is_empty:
            self._centre(key_states, value_states)
        formats = self.key_format.name, self.value_format.name
        ops.store(key_states, value_states, positions, *self.key, *self.value, *formats)
        is_first_prefill = self.is_empty and length > 1
        self.is_empty = False
        if is_first_prefill:
            return key_states, value_states
        if not torch.compiler.is_compiling():
            self.eager_reads += 1
        return (
            ops.dequantize(*self.key, positions, formats[0], key_states.dtype),
            ops.dequantize(*self.value, positions, formats[1], value_states.dtype),
        )

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """All slots of K, decoded: ``[batch, kv_heads, max_cache_len, head_dim]``; None before initialization."""
        return self._decode(self.key, self.key_format.name) if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """All slots of V, decoded: ``[batch, kv_heads, max_cache_len, head_dim]``; None before initialization."""
        return self._decode(self.value, self.value_format.name) if self.is_initialized else None

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
        end = int(self.last_position) + 1 if self.is_initialized else 0
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
        return self.last_position[0] + 1 if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Slots per sequence."""
        return self.max_cache_len

    def reset(self) -> None:
        """Forget every token. The buffers, and CUDA graphs recorded over them, stay valid."""
        self.is_empty, self.eager_reads = True, 0
        if self.is_initialized and self.leads:
            self.last_position.fill_(-1)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: A positive argument, or more tokens than are stored.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}; "
                f"crop({-tokens_to_remove}) removes {tokens_to_remove}"
            )
        if tokens_to_remove == 0 or not self.is_initialized or not self.leads:
            return
        stored = int(self.last_position) + 1
        if -tokens_to_remove > stored:
            raise ValueError(f"cannot remove {-tokens_to_remove} tokens from a cache that holds {stored}")
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

    def _centre(self, key_states: Tensor, value_states: Tensor) -> None:
        """Set the centres that are taken from the first tokens."""
        for buffers, x, given in (
            (self.key, key_states, self.config.key_centre),
            (self.value, value_states, self.config.value_centre),
        ):
            if buffers.centre is not None and given is None:
                buffers.centre.copy_(centre_of(x))

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

    def _decode(self, buffers: KVBuffers, format: str) -> Tensor:
        last = self.last_position.clamp(min=0)
        decoded: Tensor = ops.dequantize(*buffers, last, format, self.dtype)
        return decoded * (self.last_position >= 0)

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


def centre_of(x: Tensor) -> Tensor:
    """``[kv_heads, head_dim]`` float32: the mean of the first :data:`CENTRE_TOKENS` tokens of every row of ``x``
    (``[batch, kv_heads, length, head_dim]``); 0 where that is not finite."""
    return x[:, :, :CENTRE_TOKENS].float().mean((0, 2)).nan_to_num(0.0, 0.0, 0.0)


def _outside_inference_mode() -> AbstractContextManager[object]:
    """For allocations that outlive ``torch.inference_mode``: its tensors could not be written outside it."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


class _Lengths:
    """The counters of one cache: one per device, shared by the layers there."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, Tensor] = {}

    def join(self, device: torch.device) -> tuple[Tensor, bool]:
        """The counter of ``device``, and whether the caller is the first to ask for it and so advances it."""
        leads = device not in self._by_device
        if leads:
            self._by_device[device] = torch.full((1,), -1, dtype=torch.int64, device=device)
        return self._by_device[device], leads


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of each layer of the model, after checking that all of them can be held."""
    if config.is_encoder_decoder:
        raise NotImplementedError(f"{config.model_type}: encoder-decoder models are not supported yet")
    check_attention(config)
    if getattr(config, "num_attention_heads", None) is None:
        raise NotImplementedError(f"{config.model_type} has no attention layers, so there is no KV cache to quantize")
    # What transformers itself would cache each layer in says which kind of layer it is.
    for index, layer in enumerate(layers := StaticCache(config=config, max_cache_len=1).layers):
        if type(layer) is not StaticLayer:
            raise NotImplementedError(
                f"{config.model_type}: layer {index} needs a {type(layer).__name__}; only full-attention layers "
                "(StaticLayer) are supported yet"
            )
    return (list(getattr(config, "layer_types", None) or ()) + ["full_attention"] * len(layers))[: len(layers)]


def check_attention(config: PreTrainedConfig) -> None:
    """Raise ``NotImplementedError`` for an attention implementation that would attend to empty slots."""
    implementation = config._attn_implementation
    if implementation not in (None, "sdpa", "eager", "flex_attention"):
        raise NotImplementedError(
            f"attention implementation {implementation!r} takes no mask over a static cache, so it would attend to "
            "empty slots; load the model with attn_implementation='sdpa'"
        )
