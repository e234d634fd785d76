"""Attention written as matmul, softmax, matmul: which forms are fused, and why others are not."""

import operator
import re

import pytest
import torch
import transformers
from test_fx_passes import GROUP, SLOTS, capture, quantized_layer, repeat_kv, static_layer, tokens, visible
from torch import nn
from torch.nn import functional as F

from kvpass.cache import QuantizedCache
from kvpass.config import KVQuantConfig
from kvpass.fx_passes.match import DEQUANTIZE, STORE, Exact, Rejected, Site, find_sites
from kvpass.fx_passes.rewrite import ATTENTION, rewrite
from kvpass.layers import QuantizedLayer

HEADS = 2 * GROUP
LEFT_OF_NOTHING = {torch.matmul, operator.matmul, F.softmax, torch.softmax, F.dropout, DEQUANTIZE, "expand", "max"}


class Eager(nn.Module):
    """One layer's attention as transformers writes it; a subclass changes a step."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-3, 4, HEADS))

    def scores(self, q, k):
        return torch.matmul(q, k.transpose(2, 3)) * 0.2

    def masked(self, scores, mask):
        return scores if mask is None else scores + mask

    def probabilities(self, scores, dtype):
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)

    def forward(self, q, k, v, layer, mask):
        k, v = layer.update(k, v)
        k, v = repeat_kv(k), repeat_kv(v)
        weights = self.probabilities(self.masked(self.scores(q, k), mask), q.dtype)
        weights = F.dropout(weights, p=0.0, training=self.training)
        return torch.matmul(weights, v).transpose(1, 2).contiguous()


class WithoutGroups(Eager):  # MQA as Falcon has it: one KV head, broadcast by matmul
    def forward(self, q, k, v, layer, mask):
        k, v = layer.update(k[:, :1], v[:, :1])
        return self.probabilities(self.masked(self.scores(q, k), mask), q.dtype) @ v


class Divided(Eager):  # GPT-2 and others
    def scores(self, q, k):
        return (q @ k.mT) / 5.0

    def probabilities(self, scores, dtype):
        return torch.softmax(scores, -1)


class InPlace(Eager):  # Falcon
    def scores(self, q, k):
        scores = q @ k.transpose(-1, -2)
        scores /= 5.0
        return scores


class ScaledQuery(Eager):
    def scores(self, q, k):
        return torch.matmul(q * 0.2, k.permute(0, 1, 3, 2))


class ScoresInFloat(Eager):  # GPT-J, CodeGen
    def scores(self, q, k):
        return torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(2, 3)) * 0.2


class Softcap(Eager):  # Gemma 2
    def scores(self, q, k):
        return torch.tanh(super().scores(q, k) / 3.0) * 3.0


class Sinks(Eager):  # GPT-OSS
    def probabilities(self, scores, dtype):
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)
        combined = torch.cat([scores, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        return F.dropout(F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1], 0.1, False).to(dtype)


class SinksAfterMaximum(Eager):  # the maximum of the scores alone; softmax in one expression
    def probabilities(self, scores, dtype):
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return F.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1].to(dtype)


class TwoBiases(Eager):  # Falcon with ALiBi: a bias that is scaled with the scores, and a mask
    def scores(self, q, k):
        bias = torch.linspace(-2, 2, HEADS)[:, None, None] * torch.arange(SLOTS) / SLOTS
        return (torch.matmul(q, k.transpose(2, 3)) + bias) * 0.2


FORMS = [
    Eager, WithoutGroups, Divided, InPlace, ScaledQuery, ScoresInFloat, Softcap, Sinks, SinksAfterMaximum, TwoBiases
]  # fmt: skip


def additive(mask):
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_forms_over_a_quantized_cache(form, length):
    q, k, v = tokens(length)
    one_head = form is WithoutGroups
    layers = [quantized_layer(prefill=0) for _ in range(2)]
    for layer in layers:
        prompt = tokens(9, seed=5)[1:]
        layer.update(*(x[:, :1] for x in prompt) if one_head else prompt)
    module, mask = form().eval(), additive(visible(length))
    expected = module(q, k, v, layers[0], mask)
    found = capture(module, q, k, v, layers[1], mask)
    torch.testing.assert_close(found["out"], expected)
    assert [type(m) for m in found["matches"]] == [Site]
    assert not LEFT_OF_NOTHING & set(found["targets"])
    assert found["targets"].count(STORE) == 1 and found["targets"].count(ATTENTION) == 1


@pytest.mark.parametrize("form", [Eager, Softcap, Sinks])
def test_forms_over_a_static_cache(form):
    q, k, v = tokens(1)
    module, mask = form().eval(), additive(visible())
    expected = module(q, k, v, quantized_layer(), mask)
    found = capture(module, q, k, v, static_layer(), mask)
    torch.testing.assert_close(found["out"], expected)
    assert not (LEFT_OF_NOTHING | {"index_copy_"}) & set(found["targets"])
    assert found["targets"].count(ATTENTION) == 1


def test_without_a_mask():
    q, k, v = tokens(1)
    layers = [quantized_layer(prefill=SLOTS - 1) for _ in range(2)]
    module = Eager().eval()
    expected = module(q, k, v, layers[0], None)
    found = capture(module, q, k, v, layers[1], None)
    torch.testing.assert_close(found["out"], expected)
    assert [type(m) for m in found["matches"]] == [Site]


def test_k_and_v_of_different_widths():
    class Narrow(Eager):
        def forward(self, q, k, v, layer, mask):
            return super().forward(q, k, v[..., :32], layer, mask)

    q, k, v = tokens(1)
    layers = [QuantizedLayer(KVQuantConfig("fp8_e4m3").layer(0), SLOTS) for _ in range(2)]
    for layer in layers:
        prompt = tokens(9, seed=5)[1:]
        layer.update(prompt[0], prompt[1][..., :32])
    mask = additive(visible())
    expected = Narrow().eval()(q, k, v, layers[0], mask)
    found = capture(Narrow().eval(), q, k, v, layers[1], mask)
    torch.testing.assert_close(found["out"], expected)
    assert expected.shape[-1] == 32
    (site,) = found["report"].sites
    assert (site.status, site.bytes_per_token) == ("fused", 2 * 64 + 2 * 32)


def test_a_first_prefill_is_exact():
    q, k, v = tokens(9)
    found = capture(Eager().eval(), q, k, v, quantized_layer(prefill=0), None)
    assert [type(m) for m in found["matches"]] == [Exact]
    assert ATTENTION not in found["targets"]


class Weights(Eager):
    def probabilities(self, scores, dtype):
        self.weights = super().probabilities(scores, dtype)
        return self.weights

    def forward(self, *args):
        return super().forward(*args), self.weights


class Dropout(Eager):
    def probabilities(self, scores, dtype):
        return F.dropout(super().probabilities(scores, dtype), p=0.5, training=True)


class OtherAxis(Eager):
    def probabilities(self, scores, dtype):
        return torch.softmax(scores, dim=1)


class ScoresUsed(Eager):
    def probabilities(self, scores, dtype):
        return super().probabilities(scores, dtype) * torch.ones(()) + 0 * scores.logsumexp(-1, keepdim=True)


class LogSumExp(Eager):
    def masked(self, scores, mask):
        self.lse = scores.logsumexp(-1)
        return super().masked(scores, mask)

    def forward(self, *args):
        return super().forward(*args) * self.lse.mean()


class CastUsed(Eager):
    def scores(self, q, k):
        scores = super().scores(q, k).to(torch.float64)
        self.total = scores.sum()
        return scores

    def forward(self, *args):
        return super().forward(*args) * self.total.sign().float()


class MaskedFill(Eager):
    def masked(self, scores, mask):
        return scores.masked_fill(mask < 0, -1e30)


class CapAfterMask(Eager):
    def masked(self, scores, mask):
        return torch.tanh(super().masked(scores, mask.clamp(min=-100)) / 3.0) * 3.0


class Temperature(Eager):
    def scores(self, q, k):
        return super().scores(q, k) * self.sinks.exp()[:, None, None]


class NotTransposed(Eager):
    def scores(self, q, k):
        return torch.matmul(q, k.reshape(2, HEADS, 64, SLOTS)) * 0.2


class SinksKept(Eager):
    def probabilities(self, scores, dtype):
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores[..., :-1], sinks], -1), -1)


class TwoColumns(Eager):
    def probabilities(self, scores, dtype):
        column = scores.mean(-1, keepdim=True)
        return F.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


class MeanSubtracted(Eager):
    def probabilities(self, scores, dtype):
        return torch.softmax(scores - scores.mean(-1, keepdim=True), -1)


class BooleanAdded(Eager):
    def masked(self, scores, mask):
        return scores + (mask == 0)


REJECTED = {
    Weights: r"probabilities are used by \w+, \w+, not by one product with V alone; .* output_attentions",
    Dropout: r"dropout with p=0.5 is active; call model.eval\(\)",
    OtherAxis: "the softmax is taken over dimension 1, not over the slots",
    ScoresUsed: "its probabilities go through mul, which the fused attention has not",
    LogSumExp: "the result of its mul is also used by logsumexp",
    CastUsed: "the result of its to is also used by sum",
    MaskedFill: "between its scores and its softmax is masked_fill, which the fused attention has not",
    CapAfterMask: "a mask or bias is added before the softcap",
    Temperature: "its scores are multiplied by something other than a number",
    NotTransposed: "its scores are no product of queries with transposed keys",
    SinksKept: "between its scores and its softmax is getitem",
    TwoColumns: "concatenated with something other than one number of each head",
    MeanSubtracted: "mean is subtracted, which is not the maximum of each row",
    BooleanAdded: "torch.bool is added to its scores; a mask must be floating there",
}


@pytest.mark.parametrize("form", REJECTED)
@pytest.mark.parametrize("make", [quantized_layer, static_layer])
def test_what_is_not_fused_and_why(form, make):
    q, k, v = tokens(1)
    module, mask = form().eval(), additive(visible())
    torch.manual_seed(0)
    expected = module(q, k, v, make(), mask)
    torch.manual_seed(0)
    found = capture(module, q, k, v, make(), mask)
    assert len(found["matches"]) == (2 if form is NotTransposed and make is quantized_layer else 1)
    assert all(isinstance(match, Rejected) for match in found["matches"])
    reason = found["matches"][-1].reason
    assert reason.startswith("it is written as matmul and softmax, and ") and re.search(REJECTED[form], reason), reason
    assert ATTENTION not in found["targets"]
    torch.testing.assert_close(found["out"], expected, equal_nan=True)


def test_a_softmax_that_is_no_attention_is_nobodys_business():
    class Router(Eager):
        def forward(self, q, k, v, layer, mask):
            experts = torch.softmax(q @ torch.ones(64, 4), -1) @ torch.ones(4, 64)
            return super().forward(q + experts, k, v, layer, mask)

    q, k, v = tokens(1)
    found = capture(Router().eval(), q, k, v, quantized_layer(), additive(visible()))
    assert [type(m) for m in found["matches"]] == [Site]


COMMON = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
COMMON |= {"initializer_range": 0.3}  # large enough for attention to matter
HEADS_4 = COMMON | {"num_attention_heads": 4}
GROUPS = HEADS_4 | {"num_key_value_heads": 2}
FULL = {"layer_types": ["full_attention"], "head_dim": 32}
LIKE_GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 64, "initializer_range": 0.3}
MODELS = {
    "Llama": GROUPS,
    "Gemma2": GROUPS | FULL | {"attn_logit_softcapping": 2.0},
    "GptOss": GROUPS | FULL | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Granite": GROUPS | {"attention_multiplier": 0.5},
    "Phi": GROUPS,
    "GPTNeoX": HEADS_4,
    "GPTJ": LIKE_GPT2 | {"rotary_dim": 8},
    "GPT2": LIKE_GPT2,
    "GPTBigCode": LIKE_GPT2,
    "Falcon": HEADS_4 | {"alibi": False},
    "FalconAlibi": HEADS_4 | {"alibi": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name):
    """Every layer is fused, and the logits of each decode step are those of the unfused graph on the same bytes."""
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    family = name.removesuffix("Alibi")
    config = getattr(transformers, f"{family}Config")(**MODELS[name], **special)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    head = f"{family}LMHeadModel" if name == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, head)(config).eval()
    prompt = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    padding = torch.ones(2, 16, dtype=torch.long)
    padding[0, :3] = 0
    found = []

    def fused(gm, inputs):
        found.extend(matches := find_sites(gm.graph))
        rewrite(gm, [match for match in matches if isinstance(match, Site)], KVQuantConfig())
        assert DEQUANTIZE not in {node.target for node in gm.graph.nodes}
        return gm.forward

    outs = []
    for step in (model, torch.compile(model, backend=fused)):
        cache = QuantizedCache(config, "fp8_e4m3", max_cache_len=16)
        with torch.no_grad():
            outs.append([model(prompt, attention_mask=padding[:, :7], past_key_values=cache).logits[:, -1:]])
            for i in range(3):
                outs[-1].append(step(prompt[:, i : i + 1], attention_mask=padding, past_key_values=cache).logits)
    assert [type(match) for match in found] == [Site]
    torch.testing.assert_close(torch.cat(outs[1], 1), torch.cat(outs[0], 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [quantized_layer, static_layer])
def test_a_query_that_is_cast_for_more_than_one_use(make):
    class Shared(ScoresInFloat):
        def forward(self, q, k, v, layer, mask):
            wide = q.to(torch.float64)
            k, v = layer.update(k, v)
            scores = (wide @ repeat_kv(k).to(torch.float64).mT) * 0.2
            weights = torch.softmax(self.masked(scores, mask), -1).to(q.dtype)
            return weights @ repeat_kv(v), wide.sum()

    q, k, v = tokens(1)
    mask = additive(visible())
    expected = Shared()(q, k, v, quantized_layer(), mask)
    found = capture(Shared(), q, k, v, make(), mask)
    assert [type(m) for m in found["matches"]] == [Site]
    torch.testing.assert_close(found["out"], expected)


@pytest.mark.parametrize("make", [quantized_layer, static_layer])
def test_transposed_keys_that_something_else_reads_too(make):
    class Reads(Eager):
        def scores(self, q, k):
            self.total = (transposed := k.transpose(2, 3)).sum()
            return q @ transposed

        def forward(self, *args):
            return super().forward(*args), self.total

    q, k, v = tokens(1)
    found = capture(Reads().eval(), q, k, v, make(), additive(visible()))
    reasons = " ".join(m.reason for m in found["matches"] if isinstance(m, Rejected))
    assert "the decoded cache is read by" in reasons or "the K buffer is also used by transpose" in reasons
