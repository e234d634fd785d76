"""enable and generate on models that are not all full attention, and calls that are refused."""

import copy

import pytest
import torch
from architectures import Architecture
from transformers import CompileConfig, StaticCache
from transformers.cache_utils import EncoderDecoderCache

import kvpass
from kvpass.hf import CACHE_ARGUMENT

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 24}
SLIDING = Architecture("MistralConfig")
T5 = Architecture("T5Config", {"decoder_start_token_id": 3})


pytestmark = pytest.mark.usefixtures("no_code_is_generated")


@pytest.fixture
def prompt():
    return torch.randint(4, 128, (2, 20), generator=torch.Generator().manual_seed(1))


class TestConversation:
    @pytest.mark.parametrize("architecture", [SLIDING, Architecture("Gemma3TextConfig")], ids=lambda a: a.name)
    def test_it_goes_on_past_the_window_in_the_callers_cache(self, architecture, prompt):
        """Two turns, each longer than the window and its spare slots together; unfused, token for token."""
        model, texts = architecture.model(), []
        settings = GREEDY | {"max_new_tokens": 40}
        for fused in (False, True):
            cache = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=200)
            if fused:
                kvpass.enable(model, "nvfp4")
            more = {CACHE_ARGUMENT: cache, "disable_compile": not fused}
            first = model.generate(prompt, **settings, **more)
            texts.append(model.generate(torch.cat([first, prompt, prompt, prompt], 1), **settings, **more))
        assert torch.equal(*texts) and int(cache.get_seq_length()) == 60 + 60 + 40 - 1

    def test_of_an_encoder_decoder(self, prompt):
        """The cache of one call serves the next prompt after `reset`, of another length."""
        model = T5.model()
        cache = kvpass.QuantizedEncoderDecoderCache(model.config, "nvfp4", max_cache_len=64)
        kvpass.enable(model, "nvfp4")
        for ids in (prompt, prompt[:, :13]):
            expected = model.generate(ids, **GREEDY)
            cache.reset()
            assert torch.equal(model.generate(ids, **GREEDY, **{CACHE_ARGUMENT: cache}), expected)
            assert cache.cross_attention_cache.layers[0].slots == ids.shape[1]

    def test_cross_attention_is_written_once(self, prompt):
        cache = kvpass.QuantizedEncoderDecoderCache(T5.configuration(), "nvfp4", max_cache_len=64)
        states = torch.randn(2, 4, 9, 16)
        cache.cross_attention_cache.update(states, states, 0)
        with pytest.raises(ValueError, match=r"cross attention is written once; call reset\(\)"):
            cache.cross_attention_cache.update(states, states, 0)


def test_both_caches_of_an_encoder_decoder_are_cropped_and_selected(prompt):
    model = T5.model()
    cache = kvpass.QuantizedEncoderDecoderCache(model.config, "bf16", max_cache_len=64)
    assert cache.nbytes == 0 and cache.device is None and cache.batch_size == -1
    with torch.no_grad():
        model(prompt, decoder_input_ids=prompt, **{CACHE_ARGUMENT: cache})
    per_token = 2 * 4 * 16 * 2  # K and V of 4 heads of 16 in bf16
    assert cache.nbytes == 2 * 2 * (64 + 20) * per_token  # layers, rows
    keys = [part.layers[0].keys for part in (cache.self_attention_cache, cache.cross_attention_cache)]
    cache.crop(-5)
    assert int(cache.get_seq_length()) == 15
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.self_attention_cache.layers[0].keys[:, :, :15], keys[0][[1, 1], :, :15])
    assert torch.equal(cache.cross_attention_cache.layers[0].keys, keys[1][[1, 1]])
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.reset()
    assert int(cache.get_seq_length()) == 0 and not any(cache.is_updated.values())


def test_each_encoder_length_has_code_of_its_own():
    """Dynamo compiles one code object anew eight times at most, and then runs it eagerly."""
    model = T5.model()
    kvpass.enable(model, kvpass.KVQuantConfig("bf16", strict=True))
    for length in (4, 6, 4):
        model.generate(torch.full((1, length), 7), **GREEDY | {"max_new_tokens": 3})
    assert len(model._kvpass.compiled) == 2 and kvpass.report(model).eager_reads == 0


@pytest.mark.parametrize("architecture", [T5, Architecture("LlamaConfig")], ids=lambda a: a.name)
def test_the_model_changes_its_dtype_between_calls(architecture, prompt):
    """The cache of the last call, that is used again, is read in the dtype of this one."""
    model = architecture.model()
    kvpass.enable(model, "nvfp4")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        ours = model.to(dtype).generate(prompt, **GREEDY)
        assert torch.equal(ours, copy.deepcopy(model).generate(prompt, **GREEDY))  # a copy has a cache of its own
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(prompt, **GREEDY)
    assert torch.equal(model.generate(prompt, **GREEDY), ours)


def test_what_is_stored_is_read_in_the_dtype_of_the_new_tokens():
    layer = kvpass.QuantizedCache(Architecture("LlamaConfig").configuration(), "nvfp4", max_cache_len=32).layers[0]
    for dtype in (torch.float32, torch.bfloat16):
        states = torch.randn(2, 2, 9, 16, dtype=dtype)
        layer.reset()
        layer.update(states, states)
        assert layer.keys.dtype == layer.values.dtype == dtype


class TestRefused:
    def test_continuous_batching(self, prompt):
        model = SLIDING.model()
        kvpass.enable(model, "nvfp4")
        with pytest.raises(NotImplementedError, match="generate_batch.* paged cache of its own"):
            model.generate_batch([prompt[0].tolist()], max_new_tokens=2)

    @pytest.mark.parametrize("offloading", [False, True])
    def test_a_static_cache_of_a_sliding_model_or_offloaded(self, prompt, offloading, monkeypatch):
        monkeypatch.setattr(torch, "Stream", lambda *args, **kwargs: None)  # a CPU has none
        model = (Architecture("LlamaConfig") if offloading else SLIDING).model()
        cache = StaticCache(config=model.config, max_cache_len=64, offloading=offloading)
        kvpass.enable(model, "nvfp4")
        with pytest.raises(ValueError, match="where all its layers are of full attention and none is offloaded"):
            model.generate(prompt, **GREEDY, **{CACHE_ARGUMENT: cache})

    def test_the_states_of_linear_attention_cannot_be_cropped(self, prompt):
        model = Architecture("FalconH1Config", {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32}).model()
        cache = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=64)
        with torch.no_grad():
            model(prompt, **{CACHE_ARGUMENT: cache})
        with pytest.raises(ValueError, match="cannot remove 1 tokens: states of linear attention do not go back"):
            cache.crop(-1)
        assert int(cache.get_seq_length()) == 20
        with pytest.raises(NotImplementedError, match="cannot be selected or repeated"):
            cache.batch_repeat_interleave(2)


def test_a_static_cache_of_a_sliding_model_stays_as_it_is(prompt):
    """Without `enable`: its layers move their whole buffers, which no quantized storage can do."""
    model = SLIDING.model()
    expected = model.generate(prompt[:, :9], **GREEDY)
    config = CompileConfig(backend="kvquant", mode=None, options={"format": "nvfp4"})
    config._compile_all_devices = True
    settings = {"cache_implementation": "static", "compile_config": config}
    with pytest.warns(UserWarning, match="a StaticCache moves all of a sliding window at every token"):
        assert torch.equal(model.generate(prompt[:, :9], **GREEDY, **settings), expected)


def test_attention_weights_are_given_and_nothing_is_fused(prompt):
    model = Architecture("LlamaConfig", attention="eager").model()
    expected = model.generate(prompt, **GREEDY, output_attentions=True, return_dict_in_generate=True)
    kvpass.enable(model, "bf16")
    ours = model.generate(prompt, **GREEDY, output_attentions=True, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, expected.sequences) and len(ours.attentions) == 24
    width = expected.attentions[-1][0].shape[-1]
    torch.testing.assert_close(ours.attentions[-1][0][..., :width], expected.attentions[-1][0], rtol=0, atol=2e-2)


def test_training_an_enabled_model_is_not_touched(prompt):
    model, gradients = SLIDING.model().train(), []
    for enabled in (False, True):
        if enabled:
            kvpass.enable(model, "nvfp4")
        model.zero_grad()
        model(prompt, labels=prompt).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_model_wrapped_by_peft(prompt):
    peft = pytest.importorskip("peft")
    model = Architecture("LlamaConfig").model()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    wrapped.eval()
    cache = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=128)
    expected = wrapped.generate(input_ids=prompt, **GREEDY, **{CACHE_ARGUMENT: cache}, disable_compile=True)
    kvpass.enable(model, "nvfp4")  # the model itself: PEFT's wrapper calls its generate
    assert torch.equal(wrapped.generate(input_ids=prompt, **GREEDY), expected)
    assert kvpass.report(model).fused == 2


def test_a_users_own_static_encoder_decoder_cache(prompt):
    model = T5.model()
    expected = model.generate(prompt, **GREEDY)
    caches = (StaticCache(config=model.config, max_cache_len=size) for size in (64, 20))
    kvpass.enable(model, "bf16")
    with pytest.warns(UserWarning, match="left attention unfused"):
        ours = model.generate(prompt, **GREEDY, **{CACHE_ARGUMENT: EncoderDecoderCache(*caches)})
    assert torch.equal(ours, expected)
