"""``enable``, ``disable``, ``report``: the one line for ``generate``.

Here is what is private in transformers: the two methods of ``GenerationMixin`` and
``PreTrainedModel`` that :func:`enable` overrides on one model, a flag of ``CompileConfig``, and the question whether
``generate`` may look one step late whether to stop (:func:`_defer_stop_check`). How a model is spread over several
devices is :mod:`kvpass.devices`' part.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
import warnings
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers.generation.utils
from packaging.version import Version
from torch import nn
from transformers import CompileConfig, GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache, LinearAttentionLayer

from kvpass.architecture import check_attention, check_inputs, check_makes_a_cache
from kvpass.backend import NotFusedError, collected, forget_reports, reports_for
from kvpass.cache import QuantizedCache
from kvpass.checkpoint import declaration
from kvpass.config import ConfigLike, KVQuantConfig
from kvpass.devices import Ranks, Substitutes, modules_of, offloaded, on_this_rank, ranks_of, substitutes
from kvpass.encoder_decoder import QuantizedEncoderDecoderCache
from kvpass.fx_passes.report import GraphReport
from kvpass.fx_passes.stack import unstack
from kvpass.model_report import BYPASSED, ModelReport
from kvpass.used_cache import AnyQuantizedCache, Use, check_fitted, check_given, self_attention

_MINIMUM = {"torch": Version("2.11"), "transformers": Version("5.15")}
for _name, _least in _MINIMUM.items():
    if Version(Version(importlib.metadata.version(_name)).base_version) < _least:
        raise ImportError(f"kvpass needs {_name} {_least} or newer; {importlib.metadata.version(_name)} is installed")

# The argument that `generate` keeps the cache in was renamed.
CACHE_ARGUMENT = (
    "cache" if Version(importlib.metadata.version("transformers")) >= Version("5.24") else "past_key_values"
)
# What `enable` overrides on a model, by the functions below that do it.
_OVERRIDES = ("generate", "init_continuous_batching", "get_compiled_call", "_prepare_cache_for_generation")


def enable(model: nn.Module, format: ConfigLike | None = None) -> None:
    """Make ``model.generate`` keep its KV cache quantized and decode through one graph compiled with ``kvquant``.

    Args:
        model: A Hugging Face model with ``generate``. Enabling it again replaces the configuration.
        format: A format's name, a dictionary, or a :class:`kvpass.KVQuantConfig`. None takes the format and the scales
            that the model's checkpoint declares (:meth:`kvpass.KVQuantConfig.from_pretrained`), or else fp8_e4m3.

    A model that transformers has split among tensor-parallel ranks is enabled on each of them, with the same format;
    each rank's cache holds its own KV heads, with the scales of those (:meth:`kvpass.KVScales.shard`).

    Raises:
        TypeError: ``model`` has no ``generate``, or is the result of ``torch.compile``.
        ValueError: An unknown format, a head_dim that it cannot hold, scales of another model or for another number of
            ranks, or KV heads that the ranks cannot share.
        NotImplementedError: A kind of model that is not supported, or one split by layers among ranks.
    """
    config = None if format is None else KVQuantConfig.of(format)
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise TypeError(
            "kvpass.enable takes the model itself, not torch.compile(model): generate() of a compiled model runs "
            "eagerly. Write kvpass.enable(model, ...) and call model.generate(...); the decode step is compiled then"
        )
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"kvpass.enable takes a Hugging Face model with generate(), got {type(model).__name__}")
    check_makes_a_cache(model)
    ranks = ranks_of(model)
    config = on_this_rank(config or _declared(model), ranks)
    probe = _new_cache(model, config, max_cache_len=1)  # raises what it can now
    config = config.resolved(probe.layer_types)  # a compiled graph does not know how many layers the model has
    _forget(model)
    _defer_stop_check()
    vars(model)["_kvpass"] = _State(config, ranks=ranks)
    for name in _OVERRIDES:
        present = vars(model).get(name)
        if not _is_override(present):
            setattr(model, name, functools.partial(_call, model, name, present))


def _new_cache(model: Any, config: KVQuantConfig, max_cache_len: int) -> AnyQuantizedCache:
    kind = QuantizedEncoderDecoderCache if model.config.is_encoder_decoder else QuantizedCache
    return kind(model.config, config, max_cache_len)


def _declared(model: Any) -> KVQuantConfig:
    """What the checkpoint that ``model`` was loaded from says of its KV cache."""
    try:
        return KVQuantConfig.from_pretrained(model.config.name_or_path)
    except FileNotFoundError as error:
        quantization = getattr(model.config, "quantization_config", None) or {}
        values = quantization if isinstance(quantization, dict) else quantization.to_dict()
        if found := declaration(values, "the model's quantization_config"):
            raise ValueError(
                f"{found.where} says that the KV cache is {found.key}, but the checkpoint with its scales is not found "
                f"({error}). Name a format and scales: kvpass.enable(model, kvpass.KVQuantConfig(..., scales=...))"
            ) from error
        return KVQuantConfig()  # a model that was not loaded from a checkpoint


def disable(model: nn.Module) -> None:
    """Put ``model`` back as it was before :func:`enable`, and free the cache kept for it. Harmless when not enabled.
    What was put in the place of its overrides, or around them, since then is left."""
    _forget(model)
    for name in _OVERRIDES:
        present: Any = vars(model).get(name)
        if _is_override(present):
            delattr(model, name)
            if (before := present.args[2]) is not None:
                setattr(model, name, before)


def _forget(model: nn.Module) -> None:
    """Free what is kept for ``model``, and put its weights back."""
    if state := vars(model).pop("_kvpass", None):
        state.spare = None  # what follows needs memory
        if state.substitutes is not None:
            unstack(state.substitutes.parameters)
            state.substitutes.dissolve()
    unstack(list(model.parameters()))
    forget_reports(list(model.parameters()))


def report(model: nn.Module) -> ModelReport:
    """What was compiled for ``model`` with the ``kvquant`` backend, layer by layer; print it."""
    plain = getattr(model, "_orig_mod", model)
    state = vars(plain).get("_kvpass")
    return ModelReport(
        config=state.config if state else None,
        graphs=(*reports_for(list(plain.parameters())), *(state.graphs if state else ())),
        cache_bytes=state.cache_bytes if state else 0,
        cache_slots=state.cache_slots if state else 0,
        cross_bytes=state.cross_bytes if state else 0,
        eager_reads=state.eager_reads if state else 0,
        was_bypassed=bool(state and state.was_bypassed),
        saturation=tuple(state.spare.saturation()) if state and state.spare else (),
        tp_rank=state.ranks.rank if state else 0,
        tp_size=state.ranks.size if state else 1,
        offloaded=offloaded(plain) if state else None,
    )


@dataclass
class _State:
    """What :func:`enable` keeps on a model."""

    config: KVQuantConfig
    spare: AnyQuantizedCache | None = None
    compiled: deque[tuple[object, Any]] = field(default_factory=lambda: deque(maxlen=64))  # with what they are for
    graphs: deque[GraphReport] = field(default_factory=lambda: deque(maxlen=256))
    cache_bytes: int = 0
    cache_slots: int = 0
    cross_bytes: int = 0
    eager_reads: int = 0
    was_bypassed: bool = False
    ranks: Ranks = Ranks()
    substitutes: Substitutes | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return _State(self.config, ranks=self.ranks)  # a copied model has its own cache and its own graphs

    def __reduce__(self) -> tuple[Any, ...]:
        return _State, (self.config,)

    def take(self, model: Any, batch_size: int, slots: int) -> AnyQuantizedCache:
        """A cache for ``batch_size`` rows of at least ``slots`` tokens: the last one where it is large enough, so that
        its addresses, and what was compiled and recorded for them, are used again."""
        cache, self.spare = self.spare, None
        if cache is not None and cache.batch_size == batch_size and cache.max_cache_len >= slots:
            if cache.device == model.device or getattr(model, "hf_device_map", None):
                cache.reset()
                return cache
        del cache  # its memory is free before the new one is allocated
        # At most an eighth more than asked for, in steps that grow: a slightly longer prompt finds the last cache large
        # enough, and a conversation that grows and grows needs few sizes.
        step = max(128, 1 << max(0, slots.bit_length() - 4))
        return _new_cache(model, self.config, max_cache_len=-(-slots // step) * step)

    def finished(self, use: Use) -> None:
        """Note what a ``generate`` did, and keep its cache if nobody else does."""
        cache = use.cache
        own = self_attention(cache)
        self.cache_bytes, self.cache_slots = own.nbytes, own.max_cache_len * own.batch_size
        self.cross_bytes = cache.nbytes - own.nbytes
        self.eager_reads = use.reads - use.reads_before
        if use.is_ours:
            self.spare = cache


_used: ContextVar[list[Use]] = ContextVar("_used")
_within: ContextVar[frozenset[tuple[int, str]]] = ContextVar("_within", default=frozenset())


def _call(model: Any, name: str, before: Any, *args: Any, **kwargs: Any) -> Any:
    """The override of ``name``, in the place of ``before`` (None for the class's own). A model gets a partial of this,
    which can be copied and pickled with it.

    What was put around an override may call it when the model is not enabled any more, or is enabled anew, and so
    within an override of the same name; it then does what ``before`` does. So do calls of ``generate`` by itself.
    """
    original = functools.partial(getattr(type(model), name), model) if before is None else before
    within, key = _within.get(), (id(model), name)
    if "_kvpass" not in vars(model) or key in within:
        return original(*args, **kwargs)
    token = _within.set(within | {key})
    try:
        return globals()[f"_{name.removeprefix('_')}"](model, original, *args, **kwargs)
    finally:
        _within.reset(token)


def _is_override(attribute: Any) -> bool:
    return getattr(attribute, "func", None) is _call


def _defer_stop_check() -> None:
    """Let ``generate`` of enabled models, on CUDA, learn one step late that all sequences have ended.

    transformers (5.17 and 5.24, not 5.15) has that way of stopping, and takes it on Apple's GPUs only: on CUDA it waits
    for the GPU after every token, which then waits for the host to prepare the next step. The step computed in vain is
    undone.
    Other models are answered as before.
    """
    check = getattr(transformers.generation.utils, "DeferredStopCheck", None)
    if check is None or getattr(check.is_supported, "__module__", "") == __name__:
        return
    original = check.is_supported

    def is_supported(device: torch.device, cache: Cache | None, cache_is_returned: bool, is_assistant: bool) -> bool:
        if _used.get([]) and isinstance(cache, QuantizedCache) and device.type == "cuda":
            # The states of linear attention cannot be taken back by a step.
            goes_back = not any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
            return not is_assistant and (goes_back or not cache_is_returned)
        return bool(original(device, cache, cache_is_returned, is_assistant))

    check.is_supported = staticmethod(is_supported)


def _generate(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    state: _State = self._kvpass
    state.cache_bytes = state.cache_slots = state.cross_bytes = state.eager_reads = 0
    state.was_bypassed = False
    state.substitutes = substitutes(self, state.substitutes)
    used: list[Use] = []
    tokens = _used.set(used), collected.set(state.graphs)
    try:
        with state.substitutes.in_place():
            result = original(*args, **kwargs)
    except BaseException:
        for use in used:
            if isinstance(own := self_attention(use.cache), QuantizedCache):
                own.note_interruption()
        raise
    finally:
        _used.reset(tokens[0])
        collected.reset(tokens[1])
        for use in used:
            if isinstance(use.cache, AnyQuantizedCache) and use.cache.is_initialized:
                state.finished(use)
    state.was_bypassed = not used
    for use in used:
        check_fitted(use.cache)
    if state.config.strict and (state.was_bypassed or any(use.unfused for use in used)):
        raise NotFusedError(f"with strict=True, generate must decode through the compiled graph.\n{report(self)}")
    if state.was_bypassed:
        warnings.warn(f"kvpass is enabled, and this generate did without it: {BYPASSED}", stacklevel=3)
    return result


def _init_continuous_batching(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "continuous batching (generate_batch) keeps a paged cache of its own, which kvpass does not quantize; call "
        "generate, or kvpass.disable(model) first"
    )


def _prepare_cache_for_generation(
    self: Any,
    original: Callable[..., Any],
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Hand ``generate`` a quantized cache, and have its decode step compiled with ``kvquant``.

    ``generation_config`` is the copy that ``generate`` made for this call.
    """
    config: KVQuantConfig = self._kvpass.config
    if (used := _used.get(None)) is None:
        raise RuntimeError(
            "the generate of an enabled model was replaced; call kvpass.enable(model, ...) again after that"
        )
    check_attention(self.config.get_text_config(decoder=True))
    check_inputs(self.config, model_kwargs)
    uncompiled = {
        "beam search": generation_config.num_beams > 1,
        "disable_compile=True": generation_config.disable_compile,
        f"parts of the model on {offloaded(self)} (hf_device_map)": offloaded(self),
    }
    if config.strict and (what := next((what for what, is_so in uncompiled.items() if is_so), None)):
        raise NotFusedError(f"transformers does not compile decoding with {what}; strict=True asks for fused attention")
    if getattr(generation_config, "is_assistant", False):
        raise NotImplementedError(
            "kvpass is enabled on the assistant model, whose cache transformers keeps over calls that grow; call "
            "kvpass.disable(assistant_model). The main model can stay enabled"
        )
    encoder_outputs = model_kwargs.get("encoder_outputs")
    encoder_length = None if encoder_outputs is None else encoder_outputs[0].shape[1]
    rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
    cache = model_kwargs.get(CACHE_ARGUMENT)
    if cache is None and generation_config.use_cache is not False:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} was asked for, but kvpass is "
                "enabled on this model and provides the cache; leave it out, or call kvpass.disable(model)"
            )
        slots = max(max_cache_length, generation_config.max_cache_len or 0)
        cache = self._kvpass.take(self, rows, slots)
        used.append(Use(cache, rows, not generation_config.return_dict_in_generate, encoder_length))
        model_kwargs[CACHE_ARGUMENT] = cache
    else:
        if cache is not None:
            if generation_config.use_cache is False:
                raise ValueError(
                    "a cache was passed, and use_cache is False (which some models' configurations say): transformers "
                    "would store every token again at each step. Pass use_cache=True, or no cache"
                )
            check_given(cache, rows, max_cache_length, self.config.get_text_config(decoder=True))
            used.append(Use(cache, rows, False, encoder_length))
        original(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
    if cache is not None:
        generation_config.compile_config = _compile_config(generation_config.compile_config, config)


def _compile_config(given: CompileConfig | None, config: KVQuantConfig) -> CompileConfig:
    """``given``, or transformers' default, with ``kvquant`` as its backend."""
    given = given or CompileConfig()
    if given.backend not in ("inductor", "kvquant"):
        raise ValueError(
            f"compile_config names the backend {given.backend!r}, but kvpass is enabled on this model; leave the "
            "backend out, or call kvpass.disable(model)"
        )
    options = {**config.to_dict(), **({"mode": given.mode} if given.mode else {}), **(given.options or {})}
    changes: dict[str, Any] = {"backend": "kvquant", "mode": None, "options": options}
    result = dataclasses.replace(given, **changes)
    vars(result)["_compile_all_devices"] = True  # decode is compiled on CPU too
    return result


def _get_compiled_call(self: Any, original: Callable[..., Any], compile_config: CompileConfig | None) -> Any:
    """The compiled forward of this model for the shape of the cache in use."""
    use = used[-1] if (used := _used.get([])) else None
    shape = (type(use.cache), use.rows, use.cache.get_max_length(), use.encoder_length) if use else None
    state: _State = self._kvpass
    key = (compile_config, shape, _surroundings(self))
    compiled = next((compiled for known, compiled in tuple(state.compiled) if known == key), None)
    if compiled is None:
        compiled = torch.compile(decode_step(self), **(compile_config or _compile_config(None, state.config)).to_dict())
        state.compiled.append((key, compiled))
    return use.counting(compiled) if use and state.config.strict else compiled


def _surroundings(model: Any) -> tuple[Any, ...]:
    """What a compiled step depends on and Dynamo does not look at again, or has only few graphs for: the hooks of all
    modules, what their classes compute, dtypes, and what computing is done under. Each hook has a number of its own:
    one that is registered anew for every ``generate`` is compiled for every ``generate``."""
    modules = modules_of(model)
    hooks = [
        (index, *module._forward_pre_hooks, *module._forward_hooks)
        for index, module in enumerate(modules)
        if module._forward_pre_hooks or module._forward_hooks
    ]
    of_all = torch.nn.modules.module
    hooks.append((-1, *of_all._global_forward_pre_hooks, *of_all._global_forward_hooks))
    device = model.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    kinds: set[Any] = set(map(type, modules))
    forwards = {kind: kind.forward for kind in kinds}
    return hooks, forwards, model.dtype, autocast, torch.is_inference_mode_enabled()


_steps = itertools.count()


def decode_step(model: Any) -> Callable[..., Any]:
    """A function to compile that calls ``model``.

    Dynamo keeps what it compiles, and counts recompiles up to a limit, by code object, and remembers by its name which
    sizes have varied. So each model, configuration, shape and surroundings has its own: a new one never ends in eager
    decoding because eight others came before it, nor in a graph of symbolic shapes because one did.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        return type(model).__call__(model, *args, **kwargs)

    step.__code__ = step.__code__.replace(co_name=f"decode_step_{next(_steps)}")
    return step
