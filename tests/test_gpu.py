"""CUDA graphs around the whole decode step: recorded once, never skipped, equal to what they replace."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import cudagraph_trees

import kvpass

pytestmark = pytest.mark.gpu

FORMATS = (*kvpass.format_names()[:5], "balanced", "compact")
SHAPES = {
    "head_dim 128, group 4": {"head_dim": 128, "num_attention_heads": 8},
    "head_dim 64, group 3": {"hidden_size": 384, "num_attention_heads": 6},
}
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture
def recordings(monkeypatch):
    """CUDA graphs recorded so far; any skip is an error."""
    monkeypatch.setattr(inductor_config.triton, "cudagraph_or_error", True)
    made, original = [], cudagraph_trees.CUDAGraphNode.__init__

    def counted(self, *args, **kwargs):
        made.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphNode, "__init__", counted)
    yield made
    assert counters["inductor"]["cudagraph_skips"] == 0


def make_model(tiny_llama, shape="head_dim 128, group 4", **overrides):
    return tiny_llama("cuda", torch.bfloat16, **SHAPES[shape], **overrides)


def make_mistral(**changes):
    """A window of 64 tokens, hence a ring of 96 slots."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=512, sliding_window=64, **changes,
    )  # fmt: skip
    return MistralForCausalLM(config).to("cuda", torch.bfloat16).eval()


def prompt_of(rows=2, length=9):
    return torch.randint(1, 512, (rows, length), generator=torch.Generator().manual_seed(1)).cuda()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_one_graph_for_a_thousand_steps_and_three_generates(tiny_llama, recordings, name, shape):
    model, prompt = make_model(tiny_llama, shape), prompt_of()
    kvpass.enable(model, name)
    first = model.generate(prompt, max_new_tokens=1010, **GREEDY)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(recordings) == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert torch.equal(model.generate(prompt, max_new_tokens=1010, **GREEDY), first)
    assert len(recordings) == 1 and kvpass.report(model).fused == 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_replay_is_bit_for_bit_what_runs_without_cuda_graphs(tiny_llama, recordings, name, shape):
    model, prompt, outs = make_model(tiny_llama, shape), prompt_of(), {}
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        cache = kvpass.QuantizedCache(model.config, name, max_cache_len=128)
        step = torch.compile(model, backend="kvquant", options={"mode": mode, "strict": True})
        with torch.no_grad():
            logits = [model(prompt, past_key_values=cache).logits[:, -1:]]
            for i in range(40):
                logits.append(step(prompt[:, i % 9 : i % 9 + 1], past_key_values=cache).logits.clone())
        outs[mode] = torch.cat(logits, 1)
    assert torch.equal(outs["default"], outs["reduce-overhead"])
    assert len(recordings) == 1


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FORMATS)
def test_fused_tokens_are_the_unfused_ones(tiny_llama, name, implementation):
    model, prompt = make_model(tiny_llama, initializer_range=0.05, attn_implementation=implementation), prompt_of()
    cache = kvpass.QuantizedCache(model.config, name, max_cache_len=128)
    plain = model.generate(prompt, max_new_tokens=40, past_key_values=cache, disable_compile=True, **GREEDY)
    kvpass.enable(model, name)
    fused = model.generate(prompt, max_new_tokens=40, **GREEDY)
    assert kvpass.report(model).fused == 2
    # bf16 arithmetic in another order: the tokens of a random model may part at a near-tie, not at once.
    same = (plain == fused).long().cumprod(1).sum(1)
    assert (same >= 9 + 8).all(), same


def test_a_first_call_that_is_compiled(tiny_llama, recordings):
    """The graph that allocates the cache is not recorded; the decode graph after it is, with no skip."""
    model, prompt = make_model(tiny_llama), prompt_of()
    step = torch.compile(model, backend="kvquant", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(2):
            cache = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=64)
            step(prompt, past_key_values=cache)
            for _ in range(4):
                out = step(prompt[:, :1], past_key_values=cache).logits.clone()
    assert out.isfinite().all() and counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_sliding_window_fills_in_one_recording(recordings, name):
    """Mistral with a window of 64 in a cache of 512: the ring of 96 slots wraps four times."""
    model, prompt = make_mistral(initializer_range=0.05), prompt_of()
    kvpass.enable(model, name)
    first = model.generate(prompt, max_new_tokens=400, **GREEDY)
    assert counters["stats"]["unique_graphs"] == 1 and len(recordings) == 1 and kvpass.report(model).fused == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(model.generate(prompt, max_new_tokens=400, **GREEDY), first)
    assert len(recordings) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_fused_is_as_right_as_unfused_past_the_window(name):
    """Logits, token by token, where the ring has wrapped, against the model in fp32 on the same bytes."""
    model = make_mistral(initializer_range=0.2)
    ids = torch.randint(1, 512, (2, 220), generator=torch.Generator().manual_seed(1)).cuda()
    step = torch.compile(model, backend="kvquant", options={"strict": True})
    exactly = copy.deepcopy(model).float()
    cache = kvpass.QuantizedCache(model.config, name, max_cache_len=256)
    fused, unfused, exact = [], [], []
    with torch.no_grad():
        model(ids[:, :130], past_key_values=cache)
        for i in range(130, 220):
            token = ids[:, i : i + 1]
            exact.append(exactly(token, past_key_values=copy.deepcopy(cache)).logits)
            unfused.append(model(token, past_key_values=copy.deepcopy(cache)).logits.float())
            fused.append(step(token, past_key_values=cache).logits.float())
    errors = [(torch.cat(x) - torch.cat(exact)).square().mean().sqrt() for x in (fused, unfused)]
    assert errors[0] <= 1.5 * errors[1] < 0.1 * torch.cat(exact).std(), errors


def test_an_encoder_decoder_in_one_recording(recordings):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        d_model=128, d_kv=64, d_ff=256, num_layers=2, num_heads=4, vocab_size=512, decoder_start_token_id=3
    )
    model, prompt = T5ForConditionalGeneration(config).to("cuda", torch.bfloat16).eval(), prompt_of()
    kvpass.enable(model, "fp8_e4m3")
    settings = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    first = model.generate(prompt, **settings)
    assert counters["stats"]["unique_graphs"] == 1 and len(recordings) == 1 and kvpass.report(model).fused == 4
    assert torch.equal(model.generate(prompt, **settings), first)


def test_static_cache_releases_its_memory(tiny_llama):
    from transformers import StaticCache

    model, prompt = make_model(tiny_llama), prompt_of()
    cache = StaticCache(config=model.config, max_cache_len=65536)
    step = torch.compile(model, backend="kvquant", options={"format": "nvfp4", "mode": "reduce-overhead"})
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            step(prompt[:, :1], past_key_values=cache)
    bf16 = 2 * 2 * 2 * 2 * 65536 * 128 * 2  # layers, K and V, rows, heads, slots, head_dim, bytes
    assert before - torch.cuda.memory_allocated() > 0.6 * bf16


def test_learning_late_that_it_is_over_changes_nothing(tiny_llama, monkeypatch):
    """Tokens, streamed tokens and the cache that is returned are those of a loop that waits for the GPU every step."""
    from transformers import TextStreamer
    from transformers.generation import utils

    deferred, original = [], utils.DeferredStopCheck.__init__

    def noted(self, *args, **kwargs):
        deferred.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(utils.DeferredStopCheck, "__init__", noted)

    class Streamed(TextStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.reshape(-1).tolist()

        def end(self):
            pass

    model, prompt = make_model(tiny_llama, initializer_range=0.05), prompt_of(1)
    kvpass.enable(model, "fp8_e4m3")
    whole = model.generate(prompt, max_new_tokens=24, **GREEDY)
    end = int(whole[0, 9 + 6])
    length = whole[0, 9:].tolist().index(end) + 1
    ending, streamer = GREEDY | {"eos_token_id": end}, Streamed()
    out = model.generate(prompt, max_new_tokens=24, return_dict_in_generate=True, output_logits=True, **ending)
    assert torch.equal(out.sequences, whole[:, : 9 + length]) and len(out.logits) == length
    assert int(out.past_key_values.get_seq_length()) == 9 + length - 1
    model.generate(prompt, max_new_tokens=24, streamer=streamer, **ending)
    assert streamer.tokens == whole[0, : 9 + length].tolist()
    assert len(deferred) == 3
    kvpass.disable(model)
    model.generate(prompt, max_new_tokens=4, **GREEDY)
    assert len(deferred) == 3  # other models are not concerned


def test_left_padding(tiny_llama):
    model = make_model(tiny_llama, initializer_range=0.05)
    kvpass.enable(model, "fp8_e4m3")
    short = prompt_of(1, 5)
    batch = torch.cat([torch.nn.functional.pad(short, (4, 0)), prompt_of(1, 9)])
    mask = torch.ones_like(batch)
    mask[0, :4] = 0
    together = model.generate(batch, attention_mask=mask, max_new_tokens=12, **GREEDY)[0, 9:]
    alone = model.generate(short, max_new_tokens=12, **GREEDY)[0, 5:]
    assert torch.equal(together, alone)


def test_running_over_the_end_is_nan_not_a_plausible_number(tiny_llama):
    model, prompt = make_model(tiny_llama), prompt_of()
    cache = kvpass.QuantizedCache(model.config, "nvfp4", max_cache_len=12)
    step = torch.compile(model, backend="kvquant", mode="reduce-overhead")
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        outs = [step(prompt[:, :1], past_key_values=cache).logits.clone() for _ in range(5)]
    assert all(out.isfinite().all() for out in outs[:3]) and all(out.isnan().all() for out in outs[3:])
