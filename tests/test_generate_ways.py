"""Every way of generating, on every kind of decoder: fused tokens are those of the unfused path on the same cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from architectures import Architecture
from packaging.version import Version
from transformers.generation.streamers import BaseStreamer

import kvpass
from kvpass import backend
from kvpass.hf import CACHE_ARGUMENT

FORMAT = "fp8_e4m3"
KINDS = {
    "full attention": Architecture("LlamaConfig"),
    "sliding and full": Architecture("Gemma3TextConfig", {"layer_types": ["sliding_attention", "full_attention"]}),
    "linear and full": Architecture("Qwen3NextConfig", {"layer_types": ["linear_attention", "full_attention"]}),
    "encoder-decoder": Architecture("T5Config", {"decoder_start_token_id": 3}),
}
FUSED = {"full attention": 2, "sliding and full": 2, "linear and full": 1, "encoder-decoder": 4}
GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
SAMPLING = {"do_sample": True, "top_k": 20}


@dataclass(frozen=True)
class Way:
    """One way of calling ``generate``.

    Attributes:
        settings: Its arguments beyond those of greedy decoding.
        rows: Of the batch; assisted decoding takes one.
        fused: Kinds of decoder on which every step after the prompt is fused.
        refused: Kinds on which it raises, and with what.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rows: int = 2
    fused: tuple[str, ...] = tuple(KINDS)
    refused: dict[str, str] = field(default_factory=dict)


def by_hand(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """A decoding loop of the user's own, as ``custom_generate`` takes it."""
    return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


# transformers 5.15 compiles no assisted decoding, and its own cache fails in an assistant with a sliding window.
IS_OLD = Version(transformers.__version__) < Version("5.17")
ASSISTED = () if IS_OLD else tuple(KINDS)
NO_ROLLBACK = {"linear and full": "assisted generation is not supported with stateful models"}
WAYS = {
    "greedy": Way(),
    "sampling": Way(SAMPLING),
    "several sequences": Way(SAMPLING | {"num_return_sequences": 2}),
    "beam search": Way({"num_beams": 3}, fused=()),
    "several beams returned": Way({"num_beams": 3, "num_return_sequences": 2}, fused=()),
    "prompt lookup": Way({"prompt_lookup_num_tokens": 3}, rows=1, fused=ASSISTED, refused=NO_ROLLBACK),
    "an assistant model": Way({"assistant_model": ...}, rows=1, fused=ASSISTED, refused=NO_ROLLBACK),
    "prompt in chunks": Way({"prefill_chunk_size": 8}),
    "early stop": Way({"eos_token_id": list(range(4, 20))}),
    "max_cache_len": Way({"max_cache_len": 100}),
    "streaming": Way({"streamer": ...}, rows=1),
    "custom_generate": Way({"custom_generate": by_hand}),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Models here are compiled once for the whole file."""
    yield


@pytest.fixture(scope="module", autouse=True)
def no_code_is_generated():
    """The rewritten graph runs as it is: what Inductor makes of it is other tests' matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_inductor", lambda gm, inputs, mode, patches: gm)
        torch._dynamo.reset()
        yield


_models: dict[str, Any] = {}


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param not in _models:
        _models[request.param] = KINDS[request.param].model()
    return request.param


class Words(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.flatten())

    def end(self):
        self.ended = True


def prompt_of(rows, length=20):
    """Padded on the left but for its first row, with a repetition for prompt lookup."""
    ids = torch.randint(4, 128, (rows, length), generator=torch.Generator().manual_seed(3))
    ids[:, 14:] = ids[:, 4:10]
    mask = torch.ones_like(ids)
    mask[1:, :5] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def arguments(model, way):
    settings = dict(way.settings)
    if "assistant_model" in settings:
        settings["assistant_model"] = assistant_of(model)
    if "streamer" in settings:
        settings["streamer"] = Words()
    return prompt_of(way.rows) | GREEDY | settings


def assistant_of(model):
    """Agrees with the model often, and not always."""
    assistant = type(model)(model.config).eval()
    generator = torch.Generator().manual_seed(5)
    noisy = {
        name: value + 0.02 * value.float().std().nan_to_num() * torch.randn(value.shape, generator=generator)
        if value.is_floating_point()
        else value
        for name, value in model.state_dict().items()
    }
    assistant.load_state_dict(noisy)
    return assistant


def unfused(model, way):
    """The same cache, its decoded K and V read by the model's own attention."""
    kind = kvpass.QuantizedEncoderDecoderCache if model.config.is_encoder_decoder else kvpass.QuantizedCache
    call = arguments(model, way)
    call.pop("max_cache_len", None)
    cache = kind(model.config, FORMAT, max_cache_len=128)
    torch.manual_seed(0)
    return model.generate(**call, **{CACHE_ARGUMENT: cache}, disable_compile=True)


@pytest.mark.parametrize("name", WAYS)
def test_way(kind, name, compatibility):
    model, way = _models[kind], WAYS[name]
    if IS_OLD and kind == "sliding and full" and "assistant_model" in way.settings:
        pytest.skip("this transformers fails in an assistant with a sliding window")
    call = arguments(model, way)
    kvpass.enable(model, FORMAT)
    torch.manual_seed(0)
    if kind in way.refused:
        with pytest.raises(ValueError, match=way.refused[kind]):
            model.generate(**call)
        kvpass.disable(model)
        compatibility("Ways of generating", name, **{kind: f"refused: {way.refused[kind]}"})
        return
    tokens = model.generate(**call)
    report = kvpass.report(model)
    kvpass.disable(model)
    assert torch.equal(tokens, unfused(model, way))
    assert (report.eager_reads == 0) == (kind in way.fused), report
    if kind in way.fused:
        assert report.fused == FUSED[kind]
    compatibility("Ways of generating", name, **{kind: "fused" if kind in way.fused else "right, not fused"})
    if "streamer" in call:
        assert torch.equal(torch.cat(call["streamer"].seen), tokens.flatten()) and call["streamer"].ended
