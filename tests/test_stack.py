"""Linear layers of one input computed as one: same numbers, no second copy of the weights, no stale weights."""

import gc
import operator

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import kvpass
from kvpass.fx_passes.stack import LINEAR, Stacked, find_stacks, stack, unstack

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PROMPT = torch.arange(10, 28).view(2, 9)

pytestmark = pytest.mark.usefixtures("no_code_is_generated")


def is_view_of_larger(parameter):
    return parameter.untyped_storage().nbytes() > parameter.nbytes


def projections(model):
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    return [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, mlp.gate_proj.weight]


def generated(model, **options):
    kvpass.enable(model, "bf16")
    return model.generate(PROMPT, **(GREEDY | options))


def is_stacked(model):
    return all(map(is_view_of_larger, projections(model)))


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


def test_a_hook_that_changes_the_input_of_a_layer(tiny_llama):
    def hook(module, inputs):
        inputs[0].select(-1, 0).add_(5.0)

    model = tiny_llama()
    model.model.layers[0].self_attn.v_proj.register_forward_pre_hook(hook)
    expected = model.generate(PROMPT, **GREEDY)
    assert torch.equal(generated(model), expected)


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


def replace(model, dtype=None):
    state = {name: tensor.to(dtype or tensor.dtype, copy=True) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize(
    "leave",
    [kvpass.disable, lambda m: m.to("meta"), lambda m: m.bfloat16(), replace, None],
    ids=["disable", "to meta", "bfloat16", "load_state_dict", "del"],
)
def test_no_memory_is_held_but_by_the_parameters(tiny_llama, leave):
    """Compiled graphs stay, with whatever they hold."""
    model = tiny_llama()
    generated(model)
    storages = [StorageWeakRef(weight.untyped_storage()) for weight in projections(model)]
    assert is_stacked(model) and not any(storage.expired() for storage in storages)
    if leave is not None:
        leave(model)
    else:
        del model
    gc.collect()
    assert all(storage.expired() for storage in storages)


def test_weights_that_were_moved_are_stacked_again(tiny_llama):
    model = tiny_llama()
    first = generated(model)
    for change in (lambda: kvpass.disable(model), lambda: replace(model), lambda: model.double(), model.float):
        change()
        assert not any(map(is_view_of_larger, projections(model)))
        assert torch.equal(generated(model), first) and is_stacked(model)


def test_weights_of_a_checkpoint_are_stacked(tiny_llama, tmp_path):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        generated(model)
        assert is_stacked(model)


def test_what_shares_the_weights_goes_on_sharing_them(tiny_llama):
    model, other = tiny_llama(seed=1), tiny_llama()
    plain = other.generate(PROMPT, **GREEDY)
    model.load_state_dict(other.state_dict(), assign=True)
    for one in (model, other):
        assert torch.equal(generated(one), plain) and not any(map(is_view_of_larger, projections(one)))
        assert kvpass.report(one).graphs[-1].linears == (0, 0)
    for weight, same in zip(projections(model), projections(other), strict=True):
        assert weight.data_ptr() == same.data_ptr()


def test_a_state_dict_goes_on_sharing_the_weights(tiny_llama):
    model, name = tiny_llama(), "model.layers.0.self_attn.k_proj.weight"
    weight = model.get_parameter(name)
    state = model.state_dict()
    generated(model)
    assert state[name].data_ptr() == weight.data_ptr() and not is_view_of_larger(weight)
    del state
    torch._dynamo.reset()
    generated(model)
    assert is_stacked(model)
    state = model.state_dict()
    torch._dynamo.reset()
    generated(model)  # what is stacked already need not be moved
    assert kvpass.report(model).graphs[-1].linears == (10, 4)
    kvpass.disable(model)
    assert state[name].data_ptr() == weight.data_ptr()
    del state
    kvpass.disable(model)
    assert not is_view_of_larger(weight)


def test_shared_memory_stays_shared(tiny_llama):
    model = tiny_llama()
    model.share_memory()
    generated(model)
    assert all(parameter.is_shared() for parameter in model.parameters())


def test_parameters_in_the_memory_of_something_else_stay_there(tiny_llama):
    module = Two(lambda m, x: (m.a(x), m.b(x)))
    whole = torch.randn(10, 8)
    module.a.weight.data, module.b.weight.data = whole[6:], whole[:6]
    assert groups_of(module, X) == []

    module = Two(module.use)
    stack([module.a.weight, module.b.weight])
    module.a.weight.data = whole = torch.randn(4, 8)  # it was moved, and is there no more
    torch._dynamo.reset()
    assert groups_of(module, X) == []

    model = tiny_llama()
    first = generated(model)
    q, k, *_ = projections(model)
    whole = torch.cat([k, q]).detach()
    k.data, q.data = whole.split([len(k), len(q)])  # since the graph was compiled
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(generated(model), first)
        whole.mul_(-3)
        assert not torch.equal(generated(model), first)
    kvpass.disable(model)
    assert k.data_ptr() == whole.data_ptr()


def test_a_torch_that_does_not_count_the_users_of_a_storage(monkeypatch):
    monkeypatch.delattr("torch._C._storage_Use_Count")
    monkeypatch.setattr("kvpass.fx_passes.stack._ONE", 0)
    module = Two(lambda m, x: (m.a(x), m.b(x)))
    assert len(groups_of(module, X)) == 1
    module.a.weight.data = torch.randn(6, 8)[:4]
    torch._dynamo.reset()
    assert groups_of(module, X) == []


def test_stack_and_unstack():
    parameters = [nn.Parameter(torch.randn(rows, 4)) for rows in (3, 1, 2)]
    whole = torch.cat(list(parameters)).detach()
    stacked = stack(parameters)
    assert torch.equal(stacked, whole) and torch.equal(torch.cat(list(parameters)), whole)
    assert stack(parameters).data_ptr() == stacked.data_ptr()
    assert stack(parameters[1:]).data_ptr() == parameters[1].data_ptr()
    assert Stacked((1, 2), (3, 4)).of(parameters).data_ptr() == parameters[1].data_ptr()
    del stacked
    unstack(parameters)
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 3
    assert torch.equal(torch.cat(list(parameters)), whole)


def test_other_groups_of_stacked_parameters():
    parameters = [nn.Parameter(torch.randn(rows, 4)) for rows in (3, 1, 2)]
    stack(parameters[:2])
    stack(parameters)  # what is stacked can be moved
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
    seen = parameters[1].detach()
    for group in (parameters[::-1], parameters[::2]):
        assert torch.equal(stack(group), torch.cat(group))
    assert parameters[1].data_ptr() == seen.data_ptr()


def test_neighbours_in_storages_of_their_own_are_moved():
    memory = bytearray(6 * 4 * 4)
    parts = [torch.frombuffer(memory, dtype=torch.float32, count=12, offset=offset) for offset in (0, 48)]
    parameters = [nn.Parameter(part.view(3, 4)) for part in parts]
    assert parameters[1].data_ptr() == parameters[0].data_ptr() + parameters[0].nbytes
    del parts
    assert stack(parameters).shape == (6, 4)
    assert is_view_of_larger(parameters[0])


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
    ],
    ids=[
        "other inputs",
        "one bias",
        "a view that needs one piece",
        "a weight used twice",
        "no parameter",
        "result in place",
    ],  # fmt: skip
)
def test_what_is_no_group(use, bias):
    assert groups_of(Two(use, bias), X.clone()) == []


WRITES = {
    "add_": lambda x: x.add_(1),
    "+=": lambda x: operator.iadd(x, 1),
    "x[0] =": lambda x: x.__setitem__(0, 1.0),
    "relu_": torch.relu_,
    "inplace": lambda x: F.relu(x, inplace=True),
    "clamp_": lambda x: torch.clamp_(x, 0.1, 0.2),
    "out": lambda x: torch.add(x, 1, out=x),
    "linear's out": lambda x: F.linear(x, torch.ones(8, 8), out=x),
    "narrow": lambda x: x.narrow(-1, 0, 3).zero_(),
    "chunk": lambda x: x.chunk(2, -1)[0].mul_(3),
    "flatten": lambda x: x.flatten(0, 1).mul_(2),
    "select": lambda x: x.select(-1, 0).add_(5.0),
    "split": lambda x: x.split(4, -1)[1].add_(5.0),
    "unbind": lambda x: x.unbind(0)[1].add_(5.0),
    "two views": lambda x: x.view(6, 8).transpose(0, 1)[1:].sub_(1),
    "detach": lambda x: x.detach().add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_an_input_that_is_changed_between(write):
    def use(m, x):
        return m.a(x), write(x), m.b(x)

    assert groups_of(Two(use), X.clone()) == []


def test_a_view_as_input_and_a_change_of_what_it_is_a_view_of():
    def use(m, x):
        x = x * 2
        y = x.view(6, 8)
        return m.a(y), x.mul_(2), m.b(y)

    assert groups_of(Two(use), X) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: (x.add_(1), m.a(x), m.b(x)),
        lambda m, x: (m.a(x), m.b(x), x.add_(1)),
        lambda m, x: (m.a(x), x.view(6, 8)[1:], x.reshape(-1), m.b(x).view(*x.shape[:-1], 2, 3)),
        lambda m, x: (y := x * 2, m.a(x), y.add_(1), m.b(x)),
    ],
    ids=["changed before", "changed after", "read", "another is changed"],
)
def test_an_input_that_stays_as_it_is_between(use):
    assert len(groups_of(Two(use), X.clone())) == 1


def test_every_linear_is_found():
    counter = CompileCounterWithBackend("eager")
    torch.compile(Two(lambda m, x: (m.a(x), m.b(x))), backend=counter)(X)
    assert len(counter.graphs[0].graph.find_nodes(op="call_function", target=LINEAR)) == 2
