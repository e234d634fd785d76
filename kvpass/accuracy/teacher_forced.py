"""``evaluate``: a text through the quantized cache, token for token as it is written, against the model's own pass.

Every K and V that attention reads comes out of the cache's bytes, those of the prompt and of the newest token too. The
windows run in chunks, each of which is stored before it is read::

    prefill the first chunk    a format may take something from a first prefill, such as a centre; what it attends to
    crop it away               is exact K and V, so its predictions are not used
    chunk 0, 1, 2, ...         stored, then attention reads the decoded cache; the predictions that are scored
    the last tokens, singly    with ``decode``, through the step compiled with ``kvquant``: the fused kernel

The model's own pass is the same chunks through transformers' ``DynamicCache``, in the same run. All formats see a chunk
before the next one runs, so what is held is one chunk's logits and one cache per format, however long the text is.

Log-likelihood tasks of common harnesses score a prompt in one forward pass, which never reads a cache: no KV cache
quantization changes their result. :mod:`kvpass.accuracy.harness` runs their generative tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from transformers import DynamicCache

from kvpass.accuracy.layer_errors import LayerErrors
from kvpass.accuracy.results import Evaluation, FormatResult
from kvpass.accuracy.retrieval import Retrieval, model_scores
from kvpass.accuracy.statistics import BUCKETS, Tally, compare
from kvpass.accuracy.storage import PREFILL, bits_per_value
from kvpass.backend import NotFusedError
from kvpass.cache import QuantizedCache
from kvpass.config import ConfigLike, KVQuantConfig
from kvpass.hf import decode_step
from kvpass.windows import Data, cache_argument, token_batches

DEFAULT_FORMATS = ("bf16", "fp8_e4m3", "fast", "accurate", "balanced", "compact", "nvfp4")
Formats = Sequence[ConfigLike] | Mapping[str, ConfigLike]


def evaluate(
    model: nn.Module,
    data: Data,
    formats: Formats = DEFAULT_FORMATS,
    *,
    tokenizer: Any = None,
    window: int = 2048,
    max_tokens: int | None = None,
    skip_tokens: int = 0,
    skip_first: int = 0,
    batch_size: int = 1,
    chunk: int = PREFILL,
    decode: int = 0,
    buckets: Sequence[int] = BUCKETS,
    layers: bool = True,
    retrieval: Retrieval | None = None,
    resamples: int = 1000,
    seed: int = 0,
    progress: bool = True,
) -> Evaluation:
    """Measure what quantized caches cost in accuracy: perplexity, KL and agreement with the model's own pass.

    Args:
        model: A Hugging Face causal LM that :class:`kvpass.QuantizedCache` supports, on any device.
        data: A text, the path of a text file (read piece by piece), texts, or tensors of token ids
            (``[length]`` or ``[batch, length]`` int64).
        formats: What :meth:`kvpass.KVQuantConfig.parse` takes (names, ``key/value``, presets, files), dictionaries or
            configurations; as a mapping, by the names that the results shall have.
        tokenizer: The model's; needed for text and for retrieval.
        window: Tokens that attend to each other.
        max_tokens: Where to stop; None for all of ``data``.
        skip_tokens: Leave out the windows that begin in so many tokens: what scales were calibrated on, say.
        skip_first: In each window, tokens that are read but not scored.
        batch_size: Windows run at once, and passkeys asked for at once.
        chunk: Tokens run at once through a window.
        decode: So many tokens at the end of each window run singly, through the step compiled with ``kvquant``; an
            attention that could not be fused is an error then. What ``keep_last`` keeps is what was before each token
            in these only: the tokens of a chunk all see the newest of the chunk so.
        buckets: Where ranges of positions begin, ascending from 0. A token's position is the number of tokens before
            it in the window, all of which it is predicted from.
        layers: Whether to measure each layer's K, V and attention output as well.
        retrieval: A passkey task to run as well, over the same data.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.
        progress: Whether to show a bar on standard error.

    Raises:
        ValueError: A bad argument, an unknown format, data without two tokens in a row.
        NotImplementedError: A kind of model that is not supported, or with ``decode`` an attention that is not fused.
    """
    configs = named_configs(formats)
    _check_arguments(model, data, window, skip_first, chunk, decode, buckets, batch_size, resamples)
    if retrieval is not None:
        _check_retrieval(model, retrieval, data, tokenizer)
    variants = [_Variant(model, name, config, window, buckets) for name, config in configs.items()]
    errors = LayerErrors(model, [variant.config for variant in variants], variants[0].layers)
    was_training = model.training
    model.eval()
    try:
        batches = token_batches(data, tokenizer, window, batch_size, max_tokens, skip_tokens)
        with torch.no_grad():
            for ids in _shown(batches, max_tokens, progress):
                if ids.shape[1] < 2:
                    continue
                _run(model, variants, ids, skip_first, chunk, decode)
                if layers:
                    errors.add(ids.to(variants[0].device))
        if not variants[0].tally.tokens:
            raise ValueError(
                "the text is too short: nothing is left to score, with "
                f"skip_tokens={skip_tokens} and skip_first={skip_first}"
            )
        scores = {
            name: model_scores(model, config, retrieval, data, tokenizer, batch_size) if retrieval else ()
            for name, config in [(None, None), *((variant.name, variant.config) for variant in variants)]
        }
    finally:
        model.train(was_training)
    model_config = cast(Any, model).config
    settings = {
        "model": _name(model_config),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        **{"window": window, "skip_tokens": skip_tokens, "skip_first": skip_first, "chunk": chunk, "decode": decode},
        **{"batch_size": batch_size, "resamples": resamples, "seed": seed},
    }
    results = []
    for index, variant in enumerate(variants):
        overall, by_position = variant.tally.figures(resamples, seed)
        bits = bits_per_value(model_config, variant.config)
        of_layers = errors.results(index) if layers else ()
        result = (variant.name, variant.config, bits, overall, tuple(by_position), of_layers, scores[variant.name])
        results.append(FormatResult(*result))
    return Evaluation(tuple(results), len(variants[0].tally.sums), tuple(settings.items()), scores[None])


def _name(model_config: Any) -> str:
    """The model's id, or the name of its folder; without either its type."""
    name = str(model_config.name_or_path or model_config.model_type)
    return Path(name).name if Path(name).is_dir() else name


def named_configs(formats: Formats) -> dict[str, KVQuantConfig]:
    """Configurations by name."""
    if isinstance(formats, (str, KVQuantConfig)):
        formats = [formats]
    if not isinstance(formats, Mapping):
        formats = {each if isinstance(each, str) else repr(each): each for each in formats}
    if not formats:
        raise ValueError("no formats to evaluate")
    parsed = {name: KVQuantConfig.parse(each) if isinstance(each, str) else each for name, each in formats.items()}
    return {name: KVQuantConfig.of(each) for name, each in parsed.items()}


def check_window(model: nn.Module, window: int) -> None:
    """Raise ``ValueError`` for a window that has nothing to predict, or more tokens than ``model`` has positions."""
    longest = _positions(model)
    if window < 2 or window > longest:
        raise ValueError(f"window is {window}; it must be at least 2, and the model has {longest} positions")


def _positions(model: nn.Module) -> float:
    text_config = cast(Any, model).config.get_text_config(decoder=True)
    return getattr(text_config, "max_position_embeddings", None) or math.inf


class _Variant:
    """One configuration under evaluation: its cache, and what was counted."""

    def __init__(self, model: nn.Module, name: str, config: KVQuantConfig, window: int, buckets: Sequence[int]) -> None:
        self.model, self.name, self.window = model, name, window
        self.model_config: Any = cast(Any, model).config
        self.device = next(model.parameters()).device
        cache = QuantizedCache(self.model_config, config, max_cache_len=window)
        self.config, self.layers = config.resolved(cache.layer_types), len(cache.layers)
        self.cache, self.rows = cache, 0
        self.argument = cache_argument(model)
        self.tally = Tally([edge for edge in buckets if edge < window])

    def start(self, ids: Tensor) -> None:
        """Go on to other windows, of which ``ids`` is the first chunk."""
        if ids.shape[0] != self.rows:
            self.cache = QuantizedCache(self.model_config, self.config, max_cache_len=self.window)
            self.rows = ids.shape[0]
            mode = "reduce-overhead" if self.device.type == "cuda" else "default"
            step = decode_step(self.model)
            self.step = torch.compile(step, backend="kvquant", options={"mode": mode, "strict": True})
        self.cache.reset()
        self.tally.start(self.rows)
        if ids.shape[1] > 1:  # a single token is read from the cache at once
            self.read(ids)
            self.cache.crop(-ids.shape[1])

    def read(self, ids: Tensor) -> Tensor:
        """Logits of a chunk, ``[batch, length, vocabulary]``."""
        logits: Tensor = self.model(input_ids=ids, use_cache=True, **{self.argument: self.cache}).logits
        return logits

    def decode(self, ids: Tensor) -> Tensor:
        """The same, a token at a time through the compiled step."""
        arguments = {"use_cache": True, self.argument: self.cache}
        # A recorded CUDA graph returns the same memory each time.
        try:
            logits = [self.step(input_ids=token, **arguments).logits.clone() for token in ids.split(1, dim=1)]
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, NotFusedError):
                raise NotImplementedError(
                    f"decode measures the fused kernel, but {self.name}: {error.inner_exception}"
                ) from error
            raise
        return torch.cat(logits, 1)


def _run(model: nn.Module, variants: list[_Variant], ids: Tensor, skip_first: int, chunk: int, decode: int) -> None:
    """Count a batch of windows, ``[batch, length]`` int64, for every variant."""
    ids = ids.to(variants[0].device)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    length = inputs.shape[1]
    decoded_from = max(length - decode, 0)
    own_cache, argument = DynamicCache(config=cast(Any, model).config), cache_argument(model)
    for variant in variants:
        variant.start(inputs[:, :chunk])
    edges = sorted({*range(0, decoded_from, chunk), *range(decoded_from, length, chunk), length})
    for start, end in zip(edges, edges[1:], strict=False):
        piece = inputs[:, start:end]
        full = model(input_ids=piece, use_cache=True, **{argument: own_cache}).logits
        unscored = min(max(skip_first - (start + 1), 0), end - start)
        for variant in variants:
            logits = variant.decode(piece) if start >= decoded_from else variant.read(piece)
            figures = compare(full, logits, targets[:, start:end])[:, unscored:]
            variant.tally.add(figures, start + 1 + unscored)


def _shown(batches: Iterator[Tensor], total: int | None, progress: bool) -> Iterator[Tensor]:
    """``batches``, with a bar that counts their tokens."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(total=total, unit=" tokens", desc="evaluating", disable=not progress) as bar:
        for ids in batches:
            yield ids
            bar.update(ids.numel())


def _check_retrieval(model: nn.Module, task: Retrieval, data: Data, tokenizer: Any) -> None:
    """Raise ``ValueError`` for prompts that cannot be made, or are too long for ``model``."""
    if tokenizer is None:
        raise ValueError("retrieval needs the model's tokenizer: tokenizer=...")
    longest = max(task.lengths)
    if longest + task.digits > _positions(model):
        raise ValueError(f"prompts of {longest} tokens and their answers do not fit the model's {_positions(model)}")
    for _ in task.prompts(data, tokenizer):
        pass


def _check_arguments(
    model: nn.Module,
    data: Data,
    window: int,
    skip_first: int,
    chunk: int,
    decode: int,
    buckets: Sequence[int],
    batch_size: int,
    resamples: int,
) -> None:
    """Raise ``ValueError`` for arguments that cannot be."""
    check_window(model, window)
    for name, value, least in (("chunk", chunk, 1), ("batch_size", batch_size, 1), ("resamples", resamples, 1)):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    for name, value in (("skip_first", skip_first), ("decode", decode)):
        if not 0 <= value < window:
            raise ValueError(f"{name} is {value}; it must be at least 0, and less than the window of {window}")
    if not buckets or buckets[0] != 0 or list(buckets) != sorted(set(buckets)):
        raise ValueError(f"buckets are {list(buckets)}; they must ascend, from 0")
    if isinstance(data, Iterator):
        raise ValueError("the data may be read more than once, and an iterator can be read once; give a list or a path")
