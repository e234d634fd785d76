"""Linear layers of one input computed as one: same numbers, no second copy of the weights, no stale weights."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Qwen2Config, Qwen2ForCausalLM

import kvpass
from kvpass.fx_passes.stack import LINEAR, _known, find_stacks, stack, unstack

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PROMPT = torch.arange(10, 28).view(2, 9)

pytestmark = pytest.mark.usefixtures("no_code_is_generated")


def is_view_of_larger(parameter):
    return parameter.untyped_storage().nbytes() > parameter.nbytes


def projections(model):
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    return [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, mlp.gate_proj.weight]


def groups_of(module, *inputs):
    """Names of the weights of each group in the graph that Dynamo makes of `module`."""
    found = []

    def backend(gm, examples):
        found.extend([[linear.args[1].name for linear in group] for group in find_stacks(gm.graph, examples)])
        return gm.forward

    torch.compile(module, backend=backend)(*inputs)
    return found


@pytest.fixture(params=["no bias", "bias"])
def model(request, tiny_llama):
    if request.param == "no bias":
        return tiny_llama()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    qwen = Qwen2ForCausalLM(config).eval()
    for layer in qwen.model.layers:
        nn.init.normal_(layer.self_attn.k_proj.bias)
    return qwen


def logits(model, stack_linears):
    cache = kvpass.QuantizedCache(model.config, "bf16", max_cache_len=32)
    torch._dynamo.reset()
    step = torch.compile(model, backend="kvquant", options={"stack_linears": stack_linears, "strict": True})
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        return step(PROMPT[:, :1], past_key_values=cache).logits


def test_same_numbers_from_fewer_products(model):
    apart = logits(model, False)
    assert not any(map(is_view_of_larger, projections(model)))
    together = logits(model, True)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)
    assert all(map(is_view_of_larger, projections(model)))
    assert kvpass.report(model).graphs[-1].linears == (10, 4)
    assert kvpass.report(model).graphs[-2].linears == (0, 0)
    assert "10 linear layers that share an input computed as 4" in str(kvpass.report(model))


def test_weights_are_moved_and_not_copied(tiny_llama):
    model = tiny_llama()
    kvpass.enable(model, "bf16")
    model.generate(PROMPT, **GREEDY)
    q, k, v, _ = projections(model)
    assert k.data_ptr() == q.data_ptr() + q.nbytes and v.data_ptr() == k.data_ptr() + k.nbytes
    assert q.untyped_storage().nbytes() == q.nbytes + k.nbytes + v.nbytes
    before = q.data_ptr()
    model.generate(PROMPT[:1], **GREEDY)  # another graph finds them as they should be
    assert q.data_ptr() == before


def test_what_is_written_into_a_parameter_is_seen(tiny_llama):
    model = tiny_llama()
    kvpass.enable(model, "bf16")
    first = model.generate(PROMPT, **GREEDY)
    weights = projections(model)
    original = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(-3)
    changed = model.generate(PROMPT, **GREEDY)
    kvpass.disable(model)
    assert torch.equal(changed, model.generate(PROMPT, **GREEDY)) and not torch.equal(changed, first)
    kvpass.enable(model, "bf16")
    model.generate(PROMPT, **GREEDY)
    for weight, data in zip(weights, original, strict=True):
        weight.data = data  # another storage
    assert torch.equal(model.generate(PROMPT, **GREEDY), first)


def test_disable_puts_the_weights_back(tiny_llama, tmp_path):
    model = tiny_llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kvpass.enable(model, "bf16")
    model.generate(PROMPT, **GREEDY)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], before[name]) for name in saved) and len(saved) >= 20
    kvpass.disable(model)
    assert not any(map(is_view_of_larger, projections(model)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_nothing_is_kept_after_disable(tiny_llama):
    model, others = tiny_llama(), set(_known)
    for name in ("bf16", "fp8_e4m3"):
        kvpass.enable(model, name)
        model.generate(PROMPT, **GREEDY)
        assert any(stacked._tensor is not None for stacked in set(_known) - others)
        kvpass.disable(model)
        assert all(stacked._tensor is None for stacked in set(_known) - others)


def test_parameters_in_the_memory_of_something_else_stay_there():
    module = Two(lambda m, x: (m.a(x), m.b(x)))
    whole = torch.randn(10, 8)
    module.a.weight.data, module.b.weight.data = whole[:4], whole[4:]
    assert groups_of(module, X) == []


def test_stack_and_unstack():
    parameters = [nn.Parameter(torch.randn(rows, 4)) for rows in (3, 1, 2)]
    whole = torch.cat(list(parameters)).detach()
    stacked = stack(parameters)
    assert torch.equal(stacked, whole) and torch.equal(torch.cat(list(parameters)), whole)
    assert stack(parameters).data_ptr() == stacked.data_ptr()
    assert stack(parameters[1:]).data_ptr() == parameters[1].data_ptr()
    unstack(parameters)
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 3
    assert torch.equal(torch.cat(list(parameters)), whole)


class Two(nn.Module):
    """Two linear layers; `use` says what is done with them."""

    def __init__(self, use, bias=(False, False)):
        super().__init__()
        self.a, self.b, self.use = nn.Linear(8, 4, bias=bias[0]), nn.Linear(8, 6, bias=bias[1]), use

    def forward(self, x):
        return self.use(self, x)


X = torch.randn(2, 3, 8)


def test_two_linears_of_one_input_are_a_group():
    module = Two(lambda m, x: (m.a(x).view(2, 3, 2, 2), m.b(x)))
    assert len(groups_of(module, X)) == 1
    assert len(groups_of(Two(module.use, (True, True)), X)) == 1


@pytest.mark.parametrize(
    ("use", "bias"),
    [
        (lambda m, x: (m.a(x), m.b(x + 1)), (False, False)),
        (lambda m, x: (m.a(x), m.b(x)), (True, False)),
        (lambda m, x: (m.a(x).view(-1), m.b(x)), (False, False)),
        (lambda m, x: (m.a(x), m.b(x), m.a.weight.sum()), (False, False)),
        (lambda m, x: (m.a(x), F.linear(x, m.b.weight * 2)), (False, False)),
        (lambda m, x: (m.a(x).add_(1), m.b(x)), (False, False)),
        (lambda m, x: (m.a(x), x.view(6, 8).add_(1), m.b(x)), (False, False)),
    ],
    ids=[
        "other inputs",
        "one bias",
        "a view that needs one piece",
        "a weight used twice",
        "no parameter",
        "result in place",
        "input in place",
    ],  # fmt: skip
)
def test_what_is_no_group(use, bias):
    assert groups_of(Two(use, bias), X.clone()) == []


def test_every_linear_is_found():
    counter = CompileCounterWithBackend("eager")
    torch.compile(Two(lambda m, x: (m.a(x), m.b(x))), backend=counter)(X)
    assert len(counter.graphs[0].graph.find_nodes(op="call_function", target=LINEAR)) == 2
