"""Layers of a :class:`kvpass.QuantizedCache`: the buffers of K and V, and the counter they share.

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
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvpass import ops, reference
from kvpass.config import LayerConfig
from kvpass.first_tokens import learn
from kvpass.formats import KVBuffers, KVFormat, check_centre
from kvpass.scales import ScaleTensors

# Slots of a ring beyond its window. So many tokens can be cropped from a full ring (a rejected draft of assisted
# decoding), and one more added at once, without losing what the window still needs.
SPARE_SLOTS = 32


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
            forward, between the update of the layer that leads and this one's (or after one that Dynamo compiled in
            pieces).
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
        slots = self.window + SPARE_SLOTS
        if config.keep_last and {config.key.codec, config.value.codec} != {"bf16"}:
            # What is kept of the newest tokens is a ring too, that must go round with this one.
            slots = config.keep_first + -(-(slots - config.keep_first) // config.keep_last) * config.keep_last
        self.slots = min(slots, max_cache_len)
        self.is_initialized = False
        self.is_empty = True
        self.eager_reads = 0
        self._lengths = lengths or Lengths()
        self.behind = 0
        # Positions of the tokens that it is behind, which the layer that leads has worked out; not in a compiled graph.
        self._given: Tensor | None = None

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
            newest = None if torch.compiler.is_compiling() else self._newest(length)
            for layer in self._sharing:
                layer.behind, layer._given = length, newest
        given = None if torch.compiler.is_compiling() or self.behind != length else self._given
        positions = self._newest(length) if given is None else given
        self.behind, self._given = 0, None
        is_first_prefill = self.is_empty and length > 1
        if self.is_empty:
            self.dtype = key_states.dtype  # the model's may have changed since the buffers were allocated
            learn(self.config, self.key, self.value, key_states, value_states, self.max_cache_len)
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
        given = {name: getattr(config, name) for name in ScaleTensors._fields}
        self.config = self.config._replace(**given)
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
        self.is_empty, self.eager_reads, self.behind, self._given = True, 0, 0, None
        if self.is_initialized and self.leads:
            self.last_position.fill_(-1)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens; :meth:`QuantizedCache.crop` checks that it can be done."""
        self.behind = 0
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

    def _newest(self, length: int) -> Tensor:
        """Positions of so many tokens, the last of which is the newest."""
        if length == 1:
            return self.last_position
        return self.last_position - (length - 1) + torch.arange(length, device=self.device)

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
        keep_first = self.config.keep_first
        ops.store(key_states, value_states, positions, *self.key, *self.value, *formats, keep_first)

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
