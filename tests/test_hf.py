"""enable, disable, report: plain `generate` on a quantized cache."""

import copy
import warnings

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    StaticCache,
)
from transformers.generation.streamers import BaseStreamer

import kvpass
from kvpass.hf import CACHE_ARGUMENT
from kvpass.used_cache import Use

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

pytestmark = pytest.mark.usefixtures("no_code_is_generated")


@pytest.fixture
def prompt():
    return torch.randint(1, 512, (2, 9), generator=torch.Generator().manual_seed(1))


def generate(model, prompt, tokens=12, **kwargs):
    return model.generate(prompt, max_new_tokens=tokens, **(GREEDY | kwargs))


def by_hand(model, prompt, name, tokens=12, max_cache_len=128):
    """Greedy tokens through the same cache, eagerly and hence unfused."""
    cache = kvpass.QuantizedCache(model.config, name, max_cache_len=max_cache_len)
    ids, step = prompt, prompt
    for _ in range(tokens):
        with torch.no_grad():
            step = model(step, past_key_values=cache).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, step], 1)
    return ids


def own_attributes(model):
    return set(vars(model))


@pytest.mark.parametrize("name", kvpass.format_names()[:5])
def test_generate_equals_the_unfused_path_token_for_token(tiny_llama, prompt, name):
    model = tiny_llama()
    expected = by_hand(model, prompt, name)
    kvpass.enable(model, name)
    for _ in range(3):
        assert torch.equal(generate(model, prompt), expected)
    assert counters["stats"]["unique_graphs"] == 1
    report = kvpass.report(model)
    assert report.fused == 2 and report.eager_reads == 0 and len(report.graphs) == 1
    fmt = kvpass.get_format(name)
    assert report.cache_bytes == 2 * 2 * 128 * 2 * fmt.bytes_per_token(2, 64)  # layers, rows, slots, K and V
    assert f"K {name}, V {name}" in str(report)


@pytest.mark.parametrize("name", ["balanced", "compact"])
def test_presets(tiny_llama, prompt, name):
    model, config = tiny_llama(), kvpass.KVQuantConfig.preset(name)
    expected = by_hand(model, prompt, name)
    kvpass.enable(model, name)
    assert torch.equal(generate(model, prompt), expected)
    report = kvpass.report(model)
    assert report.fused == 2 and report.eager_reads == 0 and report.config == config
    assert f"K {config.key_format}, V {config.value_format}" in str(report) and repr(config) in str(report)


def test_formats_apart(tiny_llama, prompt):
    model = tiny_llama()
    config = kvpass.KVQuantConfig(key_format="fp8_e4m3", value_format="nvfp4")
    expected = by_hand(model, prompt, config)
    kvpass.enable(model, config)
    assert torch.equal(generate(model, prompt), expected)
    assert "K fp8_e4m3, V nvfp4, 200 bytes per token" in str(kvpass.report(model))


def test_disable_puts_everything_back(tiny_llama, prompt, tmp_path):
    model = tiny_llama()
    generation_config = model.generation_config.to_dict()
    plain, attributes = generate(model, prompt), own_attributes(model)
    kvpass.enable(model, "nvfp4")
    kvpass.enable(model, "fp8_e4m3")  # replaces, does not stack
    generate(model, prompt)
    assert model.generation_config.to_dict() == generation_config
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config.architectures == ["LlamaForCausalLM"]
    kvpass.disable(model)
    kvpass.disable(model)
    assert own_attributes(model) == attributes
    assert torch.equal(generate(model, prompt), plain)
    assert kvpass.report(model).graphs == () and "not enabled" in str(kvpass.report(model))


def test_the_callers_generation_config_is_not_changed(tiny_llama, prompt):
    model = tiny_llama()
    kvpass.enable(model, "nvfp4")
    config = GenerationConfig(max_new_tokens=4, **GREEDY)
    before = config.to_dict()
    model.generate(prompt, generation_config=config)
    assert config.to_dict() == before and config.compile_config is None


def test_graphs_are_those_of_the_model_that_generated(tiny_llama, prompt):
    first, second = tiny_llama(), tiny_llama()
    second.model = first.model
    kvpass.enable(first, "bf16")
    kvpass.enable(second, "nvfp4")
    generate(first, prompt), generate(second, prompt)
    assert "K bf16" in str(kvpass.report(first)) and "nvfp4" not in str(kvpass.report(first))
    kvpass.disable(second)
    assert kvpass.report(first).fused == 2
    first.load_state_dict(copy.deepcopy(first.state_dict()), assign=True)
    generate(first, prompt)
    assert kvpass.report(first).fused == 2


def test_two_models_in_one_process(tiny_llama, prompt):
    first, second = tiny_llama(seed=0), tiny_llama(seed=1, num_key_value_heads=1)
    expected = [by_hand(first, prompt, "nvfp4"), by_hand(second, prompt, "fp8_e4m3")]
    kvpass.enable(first, "nvfp4")
    kvpass.enable(second, "fp8_e4m3")
    for _ in range(2):
        assert torch.equal(generate(first, prompt), expected[0])
        assert torch.equal(generate(second, prompt), expected[1])
    assert "nvfp4" in str(kvpass.report(first)) and "fp8_e4m3" not in str(kvpass.report(first))
    kvpass.disable(first)
    assert torch.equal(generate(second, prompt), expected[1])


def test_a_copied_model_is_enabled_by_itself(tiny_llama, prompt):
    model = tiny_llama()
    kvpass.enable(model, "nvfp4")
    generate(model, prompt)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    kvpass.disable(model)
    expected = by_hand(twin, prompt, "nvfp4")
    assert torch.equal(generate(twin, prompt), expected)
    assert twin._kvpass is not None and kvpass.report(twin).fused == 2


def test_pickling(tiny_llama, prompt, tmp_path):
    model = tiny_llama()
    kvpass.enable(model, "nvfp4")
    expected = generate(model, prompt)
    torch.save(model, tmp_path / "model.pt")
    kvpass.disable(model)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(generate(loaded, prompt), expected) and kvpass.report(loaded).fused == 2


def test_an_instance_level_generate_is_called_and_put_back(tiny_llama, prompt):
    model, calls = tiny_llama(), []

    def own(*args, **kwargs):
        calls.append(1)
        return type(model).generate(model, *args, **kwargs)

    model.generate = own
    kvpass.enable(model, "nvfp4")
    generate(model, prompt)
    kvpass.disable(model)
    assert model.generate is own and calls == [1]


def test_what_was_put_around_generate_stays(tiny_llama, prompt):
    model, calls = tiny_llama(), []
    plain = generate(model, prompt)
    kvpass.enable(model, "nvfp4")
    inner = model.generate
    model.generate = lambda *args, **kwargs: calls.append(1) or inner(*args, **kwargs)
    kvpass.enable(model, "bf16")
    assert torch.equal(generate(model, prompt), plain) and kvpass.report(model).fused == 2
    kvpass.disable(model)
    assert torch.equal(generate(model, prompt), plain) and calls == [1, 1]
    assert "_kvpass" not in vars(model) and kvpass.report(model).graphs == ()
    kvpass.enable(model, "bf16")  # around what is around the first
    assert torch.equal(generate(model, prompt), plain) and calls == [1, 1, 1]
    assert kvpass.report(model).fused == 2

    model = tiny_llama()
    kvpass.enable(model, "bf16")
    del model.generate
    with pytest.raises(RuntimeError, match="the generate of an enabled model was replaced"):
        generate(model, prompt)
    kvpass.enable(model, "bf16")
    assert torch.equal(generate(model, prompt), plain) and kvpass.report(model).fused == 2
    del model.generate
    kvpass.disable(model)
    assert torch.equal(generate(model, prompt), plain)


def test_a_generate_that_calls_itself(tiny_llama, prompt):
    model = tiny_llama()
    expected = by_hand(model, prompt, "nvfp4")

    class Outer(type(model)):
        def generate(self, *args, **kwargs):
            return (
                super().generate(*args, **kwargs)
                if kwargs.pop("inner", False)
                else self.generate(*args, inner=True, **kwargs)
            )

    model.__class__ = Outer
    kvpass.enable(model, {"format": "nvfp4", "strict": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(generate(model, prompt), expected)
    assert "nothing was quantized" not in str(kvpass.report(model))


class TestHooks:
    """Dynamo does not look at them again once a step is compiled, nor at classes."""

    @pytest.mark.parametrize("where", ["model.layers.0", "model.layers.1.self_attn.v_proj"])
    def test_one_that_comes_goes_or_changes(self, tiny_llama, prompt, where):
        def steer(model, by):
            module = model.get_submodule(where)
            return module.register_forward_hook(lambda module, args, out: out + by)

        model, plain = tiny_llama(), tiny_llama()
        kvpass.enable(model, "bf16")
        texts = [generate(model, prompt)]
        for by in (0.5, -2.0, None):
            handles = [steer(m, by) for m in (model, plain)] if by else []
            texts.append(generate(model, prompt))
            assert torch.equal(texts[-1], by_hand(plain, prompt, "bf16"))
            assert kvpass.report(model).eager_reads == 0
            for handle in handles:
                handle.remove()
        assert torch.equal(texts[0], texts[3]) and not torch.equal(texts[0], texts[2])

    def test_the_forward_of_a_class(self, tiny_llama, prompt, monkeypatch):
        model = tiny_llama()
        kvpass.enable(model, "bf16")
        first, mlp = generate(model, prompt), type(model.model.layers[0].mlp)
        plain = mlp.forward
        with monkeypatch.context() as patch:
            patch.setattr(mlp, "forward", lambda self, x: 3 * plain(self, x))
            changed = generate(model, prompt)
            assert torch.equal(changed, by_hand(tiny_llama(), prompt, "bf16"))
        assert torch.equal(generate(model, prompt), first) and not torch.equal(changed, first)

    def test_of_all_modules(self, tiny_llama, prompt):
        model = tiny_llama()
        kvpass.enable(model, "bf16")
        first, seen = generate(model, prompt), []
        with torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: seen.append(1) if module is model.lm_head else None
        ):
            assert torch.equal(generate(model, prompt), first)
        assert len(seen) == 12


@pytest.mark.filterwarnings("ignore:kvquant left attention unfused")  # under autocast
def test_what_computing_is_done_under_has_steps_of_its_own(tiny_llama, prompt):
    model = tiny_llama(num_hidden_layers=1)
    kvpass.enable(model, "bf16")
    with torch._dynamo.config.patch(recompile_limit=1):
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype)
            for under in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
                with under:
                    generate(model, prompt)
                assert kvpass.report(model).eager_reads == 0
    assert counters["stats"]["unique_graphs"] == 6


def test_inference_mode_and_plain_calls_alternate(tiny_llama, prompt):
    model = tiny_llama()
    kvpass.enable(model, "nvfp4")
    with torch.inference_mode():
        first = generate(model, prompt)
    assert torch.equal(generate(model, prompt), first)
    with torch.inference_mode():
        assert torch.equal(generate(model, prompt), first)


def test_many_shapes_stay_compiled(tiny_llama):
    """More shapes than Dynamo's recompile limit for one function."""
    model = tiny_llama(num_hidden_layers=1)
    kvpass.enable(model, {"format": "nvfp4", "strict": True})
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in range(1, 5):
            generate(model, torch.ones(rows, 3, dtype=torch.long), tokens=4)
            assert kvpass.report(model).eager_reads == 0
    assert counters["stats"]["unique_graphs"] == 4


def test_left_padded_rows_get_what_they_get_alone(tiny_llama):
    model = tiny_llama()
    kvpass.enable(model, "nvfp4")
    rows = [torch.randint(1, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 11, 16)]
    batch = torch.stack([torch.cat([torch.zeros(16 - len(r), dtype=torch.long), r]) for r in rows])
    mask = torch.stack([torch.arange(16) >= 16 - len(r) for r in rows]).long()
    together = generate(model, batch, attention_mask=mask)[:, 16:]
    for row, out in zip(rows, together, strict=True):
        assert torch.equal(generate(model, row[None])[0, len(row) :], out)


def test_the_cache_is_used_again_only_when_nobody_else_has_it(tiny_llama, prompt):
    model = tiny_llama()
    kvpass.enable(model, "nvfp4")
    generate(model, prompt)
    spare = model._kvpass.spare
    kept = generate(model, prompt, return_dict_in_generate=True)
    assert kept[CACHE_ARGUMENT] is spare and model._kvpass.spare is None
    stored = kept[CACHE_ARGUMENT].layers[0].keys
    generate(model, prompt.flip(0))
    assert torch.equal(kept[CACHE_ARGUMENT].layers[0].keys, stored)
    assert model._kvpass.spare is not spare


def test_a_longer_call_gets_a_larger_cache(tiny_llama, prompt):
    model = tiny_llama()
    kvpass.enable(model, "nvfp4")
    generate(model, prompt)
    assert model._kvpass.spare.max_cache_len == 128
    assert torch.equal(generate(model, prompt, tokens=121), by_hand(model, prompt, "nvfp4", 121, 256))
    assert model._kvpass.spare.max_cache_len == 256


@pytest.mark.parametrize(("slots", "allocated"), [(1, 128), (129, 256), (1100, 1152), (8193, 9216), (131072, 131072)])
def test_how_much_is_allocated(tiny_llama, slots, allocated):
    model = tiny_llama()
    kvpass.enable(model, "nvfp4")
    assert model._kvpass.take(model, 1, slots).max_cache_len == allocated


def test_a_conversation_goes_on_in_the_callers_cache(tiny_llama, prompt):
    model = tiny_llama()
    kvpass.enable(model, "nvfp4")
    cache = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=64)
    first = generate(model, prompt, tokens=6, past_key_values=cache)
    longer = torch.cat([first, prompt[:, :5]], 1)
    second = generate(model, longer, tokens=6, past_key_values=cache)

    kvpass.disable(model)
    plain = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=64)
    assert torch.equal(generate(model, prompt, tokens=6, past_key_values=plain, disable_compile=True), first)
    assert torch.equal(generate(model, longer, tokens=6, past_key_values=plain, disable_compile=True), second)


def test_reads_are_those_of_the_last_generate_and_a_prompt_that_goes_on_may_be_strict(tiny_llama, prompt):
    model = tiny_llama()
    kvpass.enable(model, {"format": "nvfp4", "strict": True})
    cache, text = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=64), prompt
    for reads in (0, 2, 2):  # by each layer, once
        text = torch.cat([generate(model, text, tokens=6, past_key_values=cache), prompt[:, :5]], 1)
        assert kvpass.report(model).eager_reads == reads


def test_chunked_prefill(tiny_llama, prompt):
    """Chunks after the first attend to quantized K and V, so the tokens are those of the same chunks by hand."""
    model = tiny_llama()
    cache = kvpass.QuantizedCache(model.config, "fp8_e4m3", max_cache_len=128)
    with torch.no_grad():
        outs = [model(chunk, past_key_values=cache).logits[:, -1:] for chunk in prompt.split(4, 1)]
    expected = outs[-1].argmax(-1)
    kvpass.enable(model, "fp8_e4m3")
    out = generate(model, prompt, tokens=3, prefill_chunk_size=4)
    assert torch.equal(out[:, 9:10], expected)
    assert all(graph.count("not fused") == 0 for graph in kvpass.report(model).graphs)


def test_beam_search_is_right_and_said_to_be_unfused(tiny_llama, prompt):
    model = tiny_llama(num_hidden_layers=1)
    plain = generate(model, prompt, num_beams=3)
    kvpass.enable(model, "bf16")
    assert torch.equal(generate(model, prompt, num_beams=3), plain)
    report = kvpass.report(model)
    assert report.eager_reads == 11 and "outside a compiled graph" in str(report)


def test_sampling_and_several_sequences(tiny_llama, prompt):
    model = tiny_llama()
    kvpass.enable(model, "nvfp4")
    torch.manual_seed(0)
    first = generate(model, prompt, do_sample=True, num_return_sequences=2)
    torch.manual_seed(0)
    assert torch.equal(generate(model, prompt, do_sample=True, num_return_sequences=2), first)
    assert first.shape == (4, 21) and counters["stats"]["unique_graphs"] == 1


def test_streaming(tiny_llama, prompt):
    class Collect(BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            pass

    model, streamer = tiny_llama(), Collect()
    kvpass.enable(model, "nvfp4")
    out = generate(model, prompt[:1], streamer=streamer)
    assert streamer.tokens == out.flatten().tolist()


def test_prompt_lookup_decoding_gives_the_tokens_of_greedy(tiny_llama, prompt):
    model = tiny_llama()
    kvpass.enable(model, "bf16")
    prompt = prompt[:1].repeat(1, 3)
    assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=3), generate(model, prompt))


def test_static_cache_by_compile_config(tiny_llama, prompt):
    """The third way in: nothing enabled, `generate` told to use a static cache and this backend."""
    model = tiny_llama()
    expected = by_hand(model, prompt, "nvfp4")
    config = CompileConfig(backend="kvquant", mode=None, options={"format": "nvfp4"})
    config._compile_all_devices = True
    for _ in range(2):
        out = generate(model, prompt, cache_implementation="static", compile_config=config)
        assert torch.equal(out, expected)
    report = kvpass.report(model)
    assert report.fused == 2 and "not enabled" in str(report)
    assert counters["stats"]["unique_graphs"] == 2


def test_static_cache_of_the_callers(tiny_llama, prompt):
    model = tiny_llama()
    expected = by_hand(model, prompt, "nvfp4")
    kvpass.enable(model, "nvfp4")
    cache = StaticCache(config=model.config, max_cache_len=32)
    assert torch.equal(generate(model, prompt, past_key_values=cache), expected)
    assert cache.layers[0].keys.untyped_storage().nbytes() == 0


def test_a_compiled_model_says_what_to_write(tiny_llama, prompt):
    compiled = torch.compile(tiny_llama(), backend="kvquant")
    with pytest.raises(TypeError, match=r"Write kvpass.enable\(model, ...\) and call model.generate"):
        kvpass.enable(compiled, "nvfp4")
    generate(compiled, prompt)
    assert "does not compile: write kvpass.enable(model, format)" in str(kvpass.report(compiled))


class TestBadInput:
    @pytest.mark.parametrize(
        ("make", "arguments", "error", "message"),
        [
            (torch.nn.Linear, {"in_features": 1, "out_features": 1}, TypeError, "with generate.., got Linear"),
            (lambda: MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64)), {},
             NotImplementedError, "mamba has no attention layers"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_enabled(self, make, arguments, error, message):
        with pytest.raises(error, match=message):
            kvpass.enable(make(**arguments), "nvfp4")

    def test_a_bad_format_leaves_the_model_as_it_is(self, tiny_llama, prompt):
        model = tiny_llama()
        kvpass.enable(model, "nvfp4")
        with pytest.raises(ValueError, match="unknown KV format 'nvfp5'"):
            kvpass.enable(model, "nvfp5")
        assert "format='nvfp4'" in str(kvpass.report(model))

    def test_head_dim(self, tiny_llama):
        with pytest.raises(ValueError, match="cannot hold head_dim 24"):
            kvpass.enable(tiny_llama(head_dim=24), "nvfp4")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"cache_implementation": "static"}, "cache_implementation='static' was asked for, but kvpass is enabled"),
            ({"past_key_values": DynamicCache()}, "a DynamicCache was passed, which would not be quantized"),
            ({"compile_config": CompileConfig(backend="aot_eager")}, "compile_config names the backend 'aot_eager'"),
        ],
    )
    def test_what_generate_refuses(self, tiny_llama, prompt, arguments, message):
        model = tiny_llama()
        kvpass.enable(model, "nvfp4")
        with pytest.raises(ValueError, match=message):
            generate(model, prompt, **arguments)

    def test_a_cache_that_is_not_to_be_used(self, tiny_llama, prompt):
        model = tiny_llama()
        kvpass.enable(model, "nvfp4")
        cache = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=32)
        with pytest.raises(ValueError, match="a cache was passed, and use_cache is False"):
            generate(model, prompt, past_key_values=cache, use_cache=False)
        assert not cache.is_initialized

    def test_a_cache_that_is_too_small_or_of_another_batch(self, tiny_llama, prompt):
        model = tiny_llama()
        kvpass.enable(model, "nvfp4")
        cache = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=19)
        with pytest.raises(ValueError, match="need 20 slots, but the cache that was passed has 19"):
            generate(model, prompt, past_key_values=cache)
        assert not cache.is_initialized
        cache = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=32)
        generate(model, prompt[:1], past_key_values=cache)
        with pytest.raises(ValueError, match="the batch has 2 rows, but the cache that was passed was allocated for 1"):
            generate(model, prompt, past_key_values=cache)

    def test_new_tokens_alone_that_run_over_the_callers_cache(self, tiny_llama, prompt):
        model = tiny_llama()
        kvpass.enable(model, "nvfp4")
        cache = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=24)
        generate(model, prompt, past_key_values=cache)
        with pytest.raises((RuntimeError, ValueError), match="does not fit|do not fit|are meaningless"):
            generate(model, prompt[:, :3], tokens=6, past_key_values=cache, attention_mask=torch.ones(2, 23))

    @pytest.mark.parametrize("arguments", [{"num_beams": 2}, {"disable_compile": True}])
    def test_strict_refuses_what_transformers_does_not_compile(self, tiny_llama, prompt, arguments):
        model = tiny_llama()
        kvpass.enable(model, {"format": "nvfp4", "strict": True})
        with pytest.raises(kvpass.NotFusedError, match="does not compile decoding with"):
            generate(model, prompt, **arguments)

    def test_an_enabled_assistant(self, tiny_llama, prompt):
        model, assistant = tiny_llama(seed=0), tiny_llama(seed=1)
        kvpass.enable(model, "bf16")
        assert generate(model, prompt[:1], assistant_model=assistant).shape == (1, 21)
        kvpass.enable(assistant, "bf16")
        with pytest.raises(NotImplementedError, match="disable.assistant_model"):
            generate(model, prompt[:1], assistant_model=assistant)

    def test_a_cache_of_another_model(self, tiny_llama, prompt):
        model, other = tiny_llama(), tiny_llama(num_hidden_layers=1)
        kvpass.enable(model, "nvfp4")
        cache = kvpass.QuantizedCache(other.config, "nvfp4", max_cache_len=64)
        with pytest.raises(ValueError, match="has 1 layers, the model 2"):
            generate(model, prompt, past_key_values=cache)

    def test_a_cache_for_other_windows(self, tiny_llama, prompt):
        model = tiny_llama()
        window = MistralConfig(**model.config.to_diff_dict() | {"sliding_window": 8, "model_type": "mistral"})
        kvpass.enable(model, "bf16")
        with pytest.raises(
            ValueError, match="layer 0 of the cache is for a window of 8, the model's has full attention"
        ):
            generate(model, prompt, past_key_values=kvpass.QuantizedCache(window, "bf16", max_cache_len=64))

    @pytest.mark.parametrize("at", [1, 4])
    def test_a_cache_that_an_interrupted_forward_left(self, tiny_llama, prompt, at):
        """Within the prompt, or within a step that is not compiled; between steps nothing is lost."""
        model, calls = tiny_llama(), []
        kvpass.enable(model, "bf16")
        cache = kvpass.QuantizedCache(model.config, "bf16", max_cache_len=64)

        def interrupt(*args):
            calls.append(1)
            if len(calls) == at:
                raise KeyboardInterrupt

        def pass_on(ids, scores):
            interrupt()
            return scores

        inputs = {"past_key_values": cache, "disable_compile": True}
        with model.model.layers[1].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            generate(model, prompt, **inputs)
        with pytest.raises(ValueError, match="since the last generate was interrupted; call its reset"):
            generate(model, prompt, **inputs)
        cache.reset()
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            generate(model, prompt, logits_processor=[pass_on], **inputs)
        stored = int(cache.get_seq_length())
        text = generate(model, generate(model, prompt, tokens=at), tokens=4, past_key_values=cache)
        assert stored == 8 + at and text.shape == (2, 9 + at + 4)

    def test_a_generate_without_a_cache(self, tiny_llama, prompt):
        model = tiny_llama()
        plain = generate(model, prompt)
        kvpass.enable(model, "nvfp4")
        with pytest.warns(UserWarning, match="this generate did without it: it kept no cache"):
            assert torch.equal(generate(model, prompt, use_cache=False), plain)
        assert "nothing was quantized in the last generate" in str(kvpass.report(model))
        generate(model, prompt)
        assert "nothing was quantized" not in str(kvpass.report(model))
        kvpass.enable(model, {"format": "nvfp4", "strict": True})
        with pytest.raises(kvpass.NotFusedError, match="nothing was quantized in the last generate"):
            generate(model, prompt, use_cache=False)

    def test_strict_stops_an_unfused_decode(self, tiny_llama, prompt):
        model = tiny_llama(attn_implementation="eager", output_attentions=True)
        kvpass.enable(model, {"format": "nvfp4", "strict": True})
        with pytest.raises(Exception, match="left attention unfused"):
            generate(model, prompt)

    def test_unfused_decode_is_right_and_reported(self, tiny_llama, prompt):
        model = tiny_llama(attn_implementation="eager", output_attentions=True)
        expected = by_hand(model, prompt, "nvfp4", tokens=4)
        kvpass.enable(model, "nvfp4")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = generate(model, prompt, tokens=4)
        assert torch.equal(getattr(out, "sequences", out), expected)  # attentions in the config: older ones return more
        assert any("left attention unfused" in str(w.message) for w in caught)
        report = kvpass.report(model)
        assert report.fused == 0 and "do not ask for output_attentions" in str(report)

    def test_layers_have_their_names(self, tiny_llama, prompt):
        model = tiny_llama()
        kvpass.enable(model, "nvfp4")
        generate(model, prompt, tokens=3)
        names = [site.layer for site in kvpass.report(model).graphs[-1].sites]
        assert names == ["model.layers.0.self_attn", "model.layers.1.self_attn"]

    def test_another_batch_after_enabling_again_is_no_graph_of_symbolic_shapes(self, tiny_llama, prompt):
        model = tiny_llama()
        for rows in (1, 2):
            kvpass.enable(model, "nvfp4")
            generate(model, prompt[:1].expand(rows, -1), tokens=3)
            assert kvpass.report(model).graphs[-1].linears == (10, 4)
            kvpass.disable(model)

    def test_eager_attention_is_fused(self, tiny_llama, prompt):
        model = tiny_llama(attn_implementation="eager")
        expected = by_hand(model, prompt, "nvfp4", tokens=4)
        kvpass.enable(model, {"format": "nvfp4", "strict": True})
        assert torch.equal(generate(model, prompt, tokens=4), expected)
        assert kvpass.report(model).fused == 2


class TestScales:
    SCALES = kvpass.KVScales.of({0: (0.05, [0.02, 0.03]), 1: ([0.04, 0.07], 0.5)})

    def test_formats_and_scales_by_layer(self, tiny_llama, prompt):
        model = tiny_llama()
        config = kvpass.KVQuantConfig(layers={-1: "nvfp4"}, scales=self.SCALES)
        expected = by_hand(model, prompt, config)
        kvpass.enable(model, config)
        assert torch.equal(generate(model, prompt), expected)
        report = kvpass.report(model)
        assert report.fused == 2 and report.config.scales == self.SCALES
        assert "scales: 2 layers, per head, from scales: K 0.05 (layer 0) to 0.07 (layer 1)" in str(report)
        assert "K fp8_e4m3, V fp8_e4m3, 256 bytes" in str(report) and "K nvfp4, V nvfp4, 144 bytes" in str(report)
        assert "scale too small" not in str(report)
        kvpass.enable(model, "fp8_e4m3")  # the scales are gone
        assert "scales:" not in str(kvpass.report(model))
        assert torch.equal(generate(model, prompt), by_hand(model, prompt, "fp8_e4m3"))

    @pytest.mark.parametrize("config", ["nvfp4", "compact"])
    def test_what_the_first_tokens_of_a_prompt_give(self, tiny_llama, prompt, config):
        """Taken anew by each call, into the buffers that the recorded graph reads."""
        model = tiny_llama()
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.mul_(2.0**-11)
        kvpass.enable(model, config)
        for ids in (prompt, prompt[:, 1:].flip(1), prompt[:, :1]):
            assert torch.equal(generate(model, ids), by_hand(model, ids, config))
            scales = [layer.value.scale.max().item() for layer in model._kvpass.spare.layers]
            assert scales[1] <= scales[0] / 512
        assert counters["stats"]["unique_graphs"] == 1
        given = (
            "tensor scale of K, tensor scale of V"
            if config == "nvfp4"
            else ("tensor scale of K, centre of K, tensor scale of V")
        )
        assert f"from the first tokens of each prompt: {given}\n" in str(kvpass.report(model))
        scales = kvpass.KVScales.of({0: (1.0, 1.0), 1: (1.0, 1.0)}, "nvfp4")
        kvpass.enable(model, kvpass.KVQuantConfig("nvfp4", scales=scales))
        assert "first tokens" not in str(kvpass.report(model))

    def test_static_cache_of_the_callers(self, tiny_llama, prompt):
        """The compiled graph does not know the model, so that -1 reaches it as an index."""
        model = tiny_llama()
        config = kvpass.KVQuantConfig(skip_layers=[-1], scales=self.SCALES)
        expected = by_hand(model, prompt, config)
        kvpass.enable(model, config)
        cache = StaticCache(config=model.config, max_cache_len=32)
        assert torch.equal(generate(model, prompt, past_key_values=cache), expected)
        assert [layer.keys.format for layer in cache.layers] == ["fp8_e4m3", "bf16"]

    def test_by_compile_config(self, tiny_llama, prompt, tmp_path):
        model = tiny_llama()
        expected = by_hand(model, prompt, kvpass.KVQuantConfig(scales=self.SCALES))
        self.SCALES.to_json(tmp_path / "kv.json")
        for scales in (str(tmp_path / "kv.json"), self.SCALES.to_dict()):
            config = CompileConfig(backend="kvquant", mode=None, options={"scales": scales})
            config._compile_all_devices = True
            assert torch.equal(generate(model, prompt, cache_implementation="static", compile_config=config), expected)

    def test_a_scale_that_is_too_small_is_reported(self, tiny_llama, prompt):
        model = tiny_llama()
        kvpass.enable(
            model, kvpass.KVQuantConfig("nvfp4", scales=kvpass.KVScales.of({0: (1, 1), 1: (1, 1e-7)}, "nvfp4"))
        )
        generate(model, prompt, tokens=3)
        report = str(kvpass.report(model))
        assert report.count("scale too small") == 1 and "of layer 1's V is at the end of its range" in report

    def test_scales_of_another_model_leave_it_as_it_is(self, tiny_llama, prompt):
        model = tiny_llama()
        kvpass.enable(model, "nvfp4")
        with pytest.raises(ValueError, match="has scales for layers 0, none for 1 of the model"):
            kvpass.enable(model, kvpass.KVQuantConfig(scales=kvpass.KVScales.of({0: (1.0, 1.0)})))
        assert "format='nvfp4'" in str(kvpass.report(model))


class TestFormatOfTheCheckpoint:
    @pytest.mark.parametrize("format", ["fp8_e4m3", "nvfp4"])
    def test_it_is_taken_where_none_is_named(self, tiny_llama, prompt, tmp_path, format):
        tiny_llama().save_pretrained(tmp_path / "model")
        scales = kvpass.KVScales.of({0: (0.005, [0.002, 0.003]), 1: ([0.004, 0.007], 0.05)}, format)
        scales.to_checkpoint(tmp_path / "model", tmp_path / "copy", layout="modelopt")
        model = tiny_llama().from_pretrained(tmp_path / "copy")
        kvpass.enable(model)
        report = kvpass.report(model)
        assert report.config.format == format and str(tmp_path / "copy") in str(report)
        expected = by_hand(model, prompt, kvpass.KVQuantConfig(format, scales=scales))
        assert torch.equal(generate(model, prompt), expected)
        kvpass.enable(model, "fp8_e5m2")
        assert kvpass.report(model).config == kvpass.KVQuantConfig("fp8_e5m2")

    def test_a_checkpoint_that_says_nothing(self, tiny_llama, tmp_path):
        model = tiny_llama()
        kvpass.enable(model)
        assert kvpass.report(model).config == kvpass.KVQuantConfig()
        model.save_pretrained(tmp_path)
        model = tiny_llama().from_pretrained(tmp_path)
        kvpass.enable(model)
        assert kvpass.report(model).config == kvpass.KVQuantConfig()

    def test_scales_that_are_not_to_be_found(self, tiny_llama):
        model = tiny_llama()
        model.config.quantization_config = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
        with pytest.raises(ValueError, match="says that the KV cache is fp8_e4m3, but the checkpoint .* is not found"):
            kvpass.enable(model)
        kvpass.enable(model, "fp8_e4m3")


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("kind", ["attention", "linear attention"])
def test_who_may_learn_late_that_it_is_over(tiny_llama, monkeypatch, kind, returned):
    """On CUDA, in a generate of an enabled model, whose cache can be taken back by a step where that shows."""
    from transformers.generation import utils

    from kvpass import hf

    if not hasattr(utils, "DeferredStopCheck"):
        pytest.skip("this transformers always waits")
    kvpass.enable(tiny_llama(), "nvfp4")
    cache = kvpass.QuantizedCache(tiny_llama().config, "nvfp4", max_cache_len=32)
    if kind == "linear attention":
        cache.layers.append(hf.LinearAttentionLayer())
    ask = utils.DeferredStopCheck.is_supported
    assert not ask(torch.device("cuda"), cache, returned, is_assistant=False)  # no generate of ours
    token = hf._used.set([Use(cache, 1, not returned, None)])
    try:
        assert ask(torch.device("cuda"), cache, returned, is_assistant=False) == (kind == "attention" or not returned)
        assert not ask(torch.device("cuda"), cache, returned, is_assistant=True)
        assert not ask(torch.device("cpu"), cache, returned, is_assistant=False)
    finally:
        hf._used.reset(token)
