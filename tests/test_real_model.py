"""SmolLM2-135M-Instruct, 30 layers, through the whole library."""

import copy

import pytest
import smollm2
import torch
from torch._dynamo.utils import counters

import kvpass
from kvpass.formats import KVBuffers
from kvpass.hf import CACHE_ARGUMENT

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

FORMATS = kvpass.format_names()[:5]
BYTES_PER_TOKEN = {"bf16": 23_040, "fp8_e4m3": 11_520, "fp8_e5m2": 11_520, "nvfp4": 6_480, "fp4_mx_block16": 6_480}
CHAT = [{"role": "user", "content": "Explain in three sentences why the sky is blue."}]


@pytest.fixture(scope="module")
def loaded():
    return smollm2.load(None)


@pytest.fixture
def model_and_prompt(loaded, device):
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    yield model.to(device), prompt["input_ids"].to(device)
    kvpass.disable(model)


@pytest.fixture(params=FORMATS)
def name(request):
    """A format, on a CPU with Inductor if its buffers are the first of their kind: the others' graph is the same."""
    if request.param not in ("fp8_e4m3", "nvfp4"):
        request.getfixturevalue("no_code_is_generated")
    return request.param


def test_generate(model_and_prompt, name):
    model, prompt = model_and_prompt
    kvpass.enable(model, name)
    calls, get_compiled_call = [], model.get_compiled_call

    def recorded(compile_config):
        compiled = get_compiled_call(compile_config)
        return lambda **arguments: calls.append((compiled, arguments)) or compiled(**arguments)

    model.get_compiled_call = recorded
    new_tokens = 64 if prompt.is_cuda else 32  # past a tile of scales, and on a CPU no further
    settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, prompt.shape[1] :].tolist()

    report = kvpass.report(model)
    assert (report.fused, len(report.graphs[-1].sites), report.eager_reads) == (30, 30, 0)
    assert counters["stats"]["unique_graphs"] == 1
    cache = model._kvpass.spare
    assert cache.nbytes == BYTES_PER_TOKEN[name] * cache.max_cache_len

    error = check_logits(model, prompt, name, *calls[0])

    check_tokens(model, prompt, name, calls, out, error)


def check_tokens(model, prompt, name, calls, tokens, error):
    """`generate`'s tokens are those of the unfused path on the same quantized bytes, but for near-ties, shown.

    Every decode step of `generate` runs again over a new cache: unfused, then, after taking that token back, fused,
    which leaves its own bytes there for the next step.
    """
    cache = kvpass.QuantizedCache(model.config, name, max_cache_len=128)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    for index, (compiled, arguments) in enumerate(calls, start=1):
        arguments = arguments | {CACHE_ARGUMENT: cache}
        with torch.no_grad():
            unfused = model(**arguments).logits[0, -1].float()
            cache.crop(-1)
            fused = compiled(**arguments).logits[0, -1].float()
        for logits in (unfused, fused):
            logits[model.generation_config.eos_token_id] = -torch.inf  # as `min_new_tokens` has it
        assert int(fused.argmax()) == tokens[index], f"the fused step {index} does not repeat what generate did"
        best = int(unfused.argmax())
        if best != tokens[index]:
            gap = (unfused[best] - unfused[tokens[index]]).item()
            tie = f"{name}, token {index}: unfused {best}, fused {tokens[index]}, {gap:.4f} apart"
            print(tie)
            # Each path errs by `error`, so two logits of two paths differ by twice that; twice more for the tail.
            assert gap <= 4 * error, f"{tie}; a logit errs by {error:.4f}"


def check_logits(model, prompt, name, compiled, arguments):
    """Fused logits err by no more than unfused ones, against fp64 on the same bytes.

    Returns the typical error of an unfused logit.

    `arguments` are those with which `generate` called `compiled` for the first token after the prompt.
    """
    cache = kvpass.QuantizedCache(model.config, name, max_cache_len=128)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    forced = torch.randint(0, model.config.vocab_size, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    exact = on_cpu(cache)
    exact.batch_repeat_interleave(len(forced))
    with torch.no_grad():
        ids = torch.tensor(forced)[:, None]
        oracle = copy.deepcopy(model).to("cpu", torch.float64)(ids, past_key_values=exact).logits[:, -1]
    unfused = logits_of(model, cache, forced, arguments)
    with torch._dynamo.config.patch(error_on_recompile=True):
        fused = logits_of(compiled, cache, forced, arguments)
    err, fused_err = typical_difference(unfused, oracle), typical_difference(fused, oracle)
    print(f"{name} on {prompt.device.type}: unfused logits err by {err:.4f}, fused ones by {fused_err:.4f}")
    assert fused_err <= 1.5 * err  # of 48 tokens, whose errors spread by a factor of two, medians spread by a seventh
    return err


def logits_of(step, cache, forced, arguments):
    """Logits of every token of `forced`, each as the first after what `cache` holds: ``[tokens, vocabulary]``."""
    outs = []
    for token in forced:
        ids = torch.tensor([[token]], device=cache.layers[0].device)
        with torch.no_grad():
            out = step(**arguments | {"input_ids": ids, CACHE_ARGUMENT: cache})
        outs.append(out.logits[0, -1].double().cpu())
        cache.crop(-1)
    return torch.stack(outs)


def typical_difference(a, b):
    """Median over tokens of the rms difference: a token whose own K falls into another code is an outlier."""
    return (a - b).square().mean(-1).sqrt().median().item()


def on_cpu(cache):
    """A copy of an initialized cache whose buffers are on the CPU."""
    twin = copy.deepcopy(cache)
    for layer in twin.layers:
        layer.key, layer.value = (
            KVBuffers(*(None if t is None else t.cpu() for t in buffers)) for buffers in (layer.key, layer.value)
        )
        layer.device = torch.device("cpu")
        layer.last_position = twin.layers[0].last_position.cpu()
    for layer in twin.layers:
        layer.last_position = twin.layers[0].last_position
    return twin
