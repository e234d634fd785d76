"""Which graphs are fused, which are not and why. No code is generated: the rewritten graphs are interpreted."""

import operator
import re

import pytest
import torch
import transformers
from torch import nn
from transformers.cache_utils import StaticLayer

from kvpass import reference
from kvpass.config import KVQuantConfig
from kvpass.fx_passes.match import DEQUANTIZE, LATENT, STORE, Exact, Rejected, Site, find_sites
from kvpass.fx_passes.report import describe
from kvpass.fx_passes.rewrite import ATTENTION, rewrite
from kvpass.fx_passes.sdpa import SDPA
from kvpass.layers import QuantizedLayer

SLOTS, GROUP = 32, 3
FP8_NVFP4 = KVQuantConfig(key_format="fp8_e4m3", value_format="nvfp4")


def repeat_kv(x, groups=GROUP):
    batch, heads, slots, dim = x.shape
    return x[:, :, None, :, :].expand(batch, heads, groups, slots, dim).reshape(batch, heads * groups, slots, dim)


class Attend(nn.Module):
    """One layer's attention over a cache layer, as transformers writes it; `change` alters the SDPA arguments."""

    def __init__(self, change=None, gqa=False, read=lambda k, v: (k, v)):
        super().__init__()
        self.change, self.gqa, self.read = change or (lambda **kw: kw), gqa, read

    def forward(self, q, k, v, layer, mask):
        k, v = self.read(*layer.update(k, v))
        if not self.gqa:
            k, v = repeat_kv(k), repeat_kv(v)
        kwargs = {"attn_mask": mask, "dropout_p": 0.0, "scale": 0.2, "is_causal": False}
        kwargs |= {"enable_gqa": True} if self.gqa else {}
        return SDPA(q, k, v, **self.change(**kwargs)).transpose(1, 2).contiguous()


def quantized_layer(config=FP8_NVFP4, prefill=9):
    layer = QuantizedLayer(config.layer(0), SLOTS)
    if prefill:
        layer.update(*tokens(prefill, seed=5)[1:])
    return layer


def static_layer(prefill=9):
    layer = StaticLayer(max_cache_len=SLOTS)
    layer.update(*tokens(prefill, seed=5)[1:])
    return layer


def tokens(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, length, 64, generator=generator) for heads in (2 * GROUP, 2, 2)]


def visible(length=1, stored=9):
    return (torch.arange(SLOTS) < stored + length).view(1, 1, 1, SLOTS).expand(2, 1, length, SLOTS)


def capture(module, *args, config=FP8_NVFP4):
    """Compile `module(*args)`: the matches, the rewritten graph and what it returns. Static buffers are quantized
    by hand here, since that is the backend's work."""
    found = {}

    def backend(gm, inputs):
        matches = find_sites(gm.graph)
        found["matches"], found["report"] = matches, describe(matches, config)
        copy = torch.fx.GraphModule(gm, torch.fx.Graph())
        nodes = {}
        copy.graph.output(copy.graph.graph_copy(gm.graph, nodes))
        for node in gm.graph.find_nodes(op="placeholder"):
            nodes[node]._dynamo_source = node._dynamo_source
        sites = [m for m in find_sites(copy.graph) if isinstance(m, Site)]
        origin, pairs = rewrite(copy, sites, config)
        new_inputs = [origin[node] for node in copy.graph.find_nodes(op="placeholder")]
        found["targets"] = [node.target for node in copy.graph.nodes]

        def run(*args):
            stored = {}
            for pair in pairs:
                for index, fmt in ((pair.key, config.key), (pair.value, config.value)):
                    buffers = fmt.allocate_like(args[index])
                    reference.write(buffers, fmt, args[index], torch.arange(SLOTS))
                    stored[index] = buffers
            found["stored"] = stored
            return copy.forward(
                *[args[i.position] if i.field is None else getattr(stored[i.position], i.field) for i in new_inputs]
            )

        return run

    found["out"] = torch.compile(module, backend=backend, fullgraph=True)(*args)
    return found


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("gqa", [False, True], ids=["repeat_kv", "enable_gqa"])
@pytest.mark.parametrize("masked", ["bool", "additive", "none"])
def test_quantized_cache_read_is_fused(length, gqa, masked):
    q, k, v = tokens(length)
    mask = visible(length)
    mask = {"bool": mask, "additive": torch.where(mask, 0.0, -torch.inf), "none": None}[masked]
    if masked == "none":  # then the unfused read must not see empty slots either: fill the cache to its last slot
        fused_layer, plain_layer = (quantized_layer(prefill=SLOTS - length) for _ in range(2))
    else:
        fused_layer, plain_layer = quantized_layer(), quantized_layer()
    module = Attend(gqa=gqa)
    expected = module(q, k, v, plain_layer, mask)
    found = capture(module, q, k, v, fused_layer, mask)
    torch.testing.assert_close(found["out"], expected)
    assert [type(m) for m in found["matches"]] == [Site]
    assert DEQUANTIZE not in found["targets"] and SDPA not in found["targets"]
    assert not {"expand", "reshape", operator.getitem} & set(found["targets"][:-3])
    assert found["targets"].count(STORE) == 1 and found["targets"].count(ATTENTION) == 1
    (site,) = found["report"].sites
    assert (site.status, site.key_format, site.value_format) == ("fused", "fp8_e4m3", "nvfp4")
    assert site.bytes_per_token == 2 * 64 + 2 * 36


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("gqa", [False, True], ids=["repeat_kv", "enable_gqa"])
def test_static_cache_read_is_fused(length, gqa):
    q, k, v = tokens(length)
    layer, module = static_layer(), Attend(gqa=gqa)
    quantized = quantized_layer()
    expected = module(q, k, v, quantized, visible(length))
    found = capture(module, q, k, v, layer, visible(length))
    torch.testing.assert_close(found["out"], expected)
    assert [type(m) for m in found["matches"]] == [Site]
    assert SDPA not in found["targets"] and "index_copy_" not in found["targets"]
    assert found["targets"].count(STORE) == 1 and found["targets"].count(ATTENTION) == 1
    key, value = found["stored"].values()
    for buffers, fmt, decoded in ((key, FP8_NVFP4.key, quantized.keys), (value, FP8_NVFP4.value, quantized.values)):
        assert torch.equal(reference.dequantize(buffers, fmt)[:, :, : 9 + length], decoded[:, :, : 9 + length])


def test_first_prefill_is_counted_as_exact():
    q, k, v = tokens(9)
    found = capture(Attend(), q, k, v, quantized_layer(prefill=0), None)
    assert [type(m) for m in found["matches"]] == [Exact]
    assert SDPA in found["targets"] and STORE in found["targets"]


REJECTED = {
    "dropout": ({"change": lambda **kw: kw | {"dropout_p": 0.5}}, r"dropout_p is 0.5; only 0.0 .*model.eval"),
    "is_causal": (
        {"change": lambda **kw: kw | {"is_causal": True, "attn_mask": None}},
        "is_causal=True counts from the cache's first slot",
    ),
    "mask of one slot": (
        {"change": lambda **kw: kw | {"attn_mask": torch.zeros(2, 1, 1, 1)}},
        "its mask covers 1 slots, and the cache has 32",
    ),
    "slice of the cache": (
        {
            "read": lambda k, v: (k[:, :, :16, :], v[:, :, :16, :]),
            "change": lambda **kw: kw | {"attn_mask": None},
            "gqa": True,
        },
        "it reads a slice of the cache",
    ),
    "K changed after the read": ({"read": lambda k, v: (k * 2, v)}, "K comes from mul, not from a cache"),
    "V changed after the read": ({"read": lambda k, v: (k, torch.relu(v))}, "V comes from relu, not from a cache"),
    "groups tiled instead of repeated": (
        {"read": lambda k, v: (k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)), "gqa": True},
        "K comes from repeat, not from a cache",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
@pytest.mark.parametrize("make", [quantized_layer, static_layer])
def test_what_is_not_fused_and_why(case, make):
    (settings, reason), (q, k, v) = REJECTED[case], tokens(1)
    module = Attend(**settings)
    torch.manual_seed(0)
    expected = module(q, k, v, make(), visible())
    torch.manual_seed(0)
    found = capture(module, q, k, v, make(), visible())
    rejected = [m for m in found["matches"] if isinstance(m, Rejected)]
    assert rejected and len(rejected) == len(found["matches"])
    assert re.search(reason, str([m.reason for m in rejected]))
    assert ATTENTION not in found["targets"]
    torch.testing.assert_close(found["out"], expected)


def test_a_static_buffer_that_something_else_reads_stays_as_it_is():
    class Reads(Attend):
        def forward(self, q, k, v, layer, mask):
            return super().forward(q, k, v, layer, mask), layer.keys.sum()

    q, k, v = tokens(1)
    found = capture(Reads(), q, k, v, static_layer(), visible())
    (match,) = found["matches"]
    assert isinstance(match, Rejected) and "the K buffer is also used by sum" in match.reason


def test_a_decoded_cache_that_something_else_reads_too_is_reported():
    class Reads(Attend):
        def forward(self, q, k, v, layer, mask):
            k, v = layer.update(k, v)
            return SDPA(q, repeat_kv(k), repeat_kv(v), attn_mask=mask), k.sum()

    q, k, v = tokens(1)
    found = capture(Reads(), q, k, v, quantized_layer(), visible())
    assert sorted(type(m).__name__ for m in found["matches"]) == ["Rejected", "Site"]
    (rejected,) = [m for m in found["matches"] if isinstance(m, Rejected)]
    assert rejected.reason == "the decoded cache is read by sum, not by an attention"


def test_a_repeated_cache_that_something_else_reads_too_is_reported():
    class Reads(Attend):
        def forward(self, q, k, v, layer, mask):
            k, v = layer.update(k, v)
            k, v = repeat_kv(k), repeat_kv(v)
            return SDPA(q, k, v, attn_mask=mask), k.sum()

    q, k, v = tokens(1)
    found = capture(Reads(), q, k, v, quantized_layer(), visible())
    (rejected,) = [m for m in found["matches"] if isinstance(m, Rejected)]
    assert rejected.reason == "the decoded cache is read by sum, not by an attention"


def test_why_a_graph_has_nothing_to_fuse():
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x)).graph
    assert "holds no attention" in str(describe(find_sites(graph), FP8_NVFP4))


def test_layers_are_named(tiny_llama):
    from kvpass.cache import QuantizedCache

    model, names = tiny_llama(), []
    cache = QuantizedCache(model.config, "nvfp4", max_cache_len=32)

    def backend(gm, inputs):
        names.extend(match.layer for match in find_sites(gm.graph))
        return gm.forward

    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long), past_key_values=cache)
        torch.compile(model, backend=backend)(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    assert names == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_report_merges_equal_layers():
    q, k, v = tokens(1)
    text = str(capture(Attend(), q, k, v, quantized_layer(), visible())["report"])
    assert text.splitlines()[0] == "graph with 1 attentions: 1 fused"
    assert "K fp8_e4m3, V nvfp4, 200 bytes per token" in text


def test_queries_packed_by_group_all_read_up_to_the_newest_token():
    class Packed(nn.Module):
        def forward(self, q, k, v, layer, mask):
            k, v = layer.update(k, v)
            return SDPA(q.reshape(2, 2, GROUP, 64), k, v, attn_mask=mask, scale=0.2)

    q, k, v = tokens(1)
    expected = Packed()(q, k, v, quantized_layer(), visible())
    found = capture(Packed(), q, k, v, quantized_layer(), visible())
    assert [type(match) for match in found["matches"]] == [Site]
    torch.testing.assert_close(found["out"], expected)


def test_rows_that_are_not_those_of_the_tokens_are_refused():
    class Packed(nn.Module):
        def forward(self, q, k, v, layer, mask):
            k, v = layer.update(k, v)
            return SDPA(q.reshape(2, 2, 2 * GROUP, 64), k, v, attn_mask=mask, scale=0.2)

    q, k, v = tokens(2)
    (match,) = capture(Packed(), q, k, v, quantized_layer(), visible())["matches"]
    assert match.reason == "its query has 6 rows for 2 tokens; one for each is needed"


@pytest.mark.parametrize("shape", [(6, 1, SLOTS), (1, SLOTS), (2, 6, 1, SLOTS), (1, 6, 1, SLOTS)])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_given_by_the_user(shape, kind):
    """Of fewer dimensions, or with a row for every head."""
    q, k, v = tokens(1)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.5
    mask = (mask | (torch.arange(SLOTS) == 9)) & (torch.arange(SLOTS) < 10)
    mask = mask if kind == "bool" else torch.where(mask, torch.linspace(-3, 3, SLOTS), -torch.inf)
    expected = Attend()(q, k, v, quantized_layer(), mask)
    found = capture(Attend(), q, k, v, quantized_layer(), mask)
    assert [type(m) for m in found["matches"]] == [Site]
    torch.testing.assert_close(found["out"], expected)


def reasons_in_decode(model, format="fp8_e4m3"):
    """Why the attentions of one decode step over a `QuantizedCache` are not fused, by graph."""
    from kvpass.cache import QuantizedCache

    cache, graphs = QuantizedCache(model.config, format, max_cache_len=32), []

    def backend(gm, inputs):
        graphs.append([match.reason for match in find_sites(gm.graph) if isinstance(match, Rejected)])
        return gm.forward

    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long), past_key_values=cache)
        torch.compile(model, backend=backend)(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    return graphs


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3"])
def test_latent_attention_is_named(family, implementation):
    widths = {"kv_lora_rank": 512, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = getattr(transformers, f"{family}Config")(
        **widths, **sizes, num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=2, head_dim=16
    )
    config._attn_implementation = implementation
    (reasons,) = reasons_in_decode(getattr(transformers, f"{family}ForCausalLM")(config).eval())
    assert reasons == [f"K {LATENT}"] * 2


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        (
            "XGLM",
            {"num_layers": 1, "attention_heads": 4, "d_model": 64, "ffn_dim": 64},
            "its product has batch and heads in one dimension",
        ),
        ("Mpt", {"n_layers": 1, "n_heads": 4, "d_model": 64}, "a graph break cut it apart"),
    ],
)
def test_attention_of_older_models_is_named(name, sizes, reason):
    config = getattr(transformers, f"{name}Config")(vocab_size=64, **sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    reasons = sum(reasons_in_decode(model), [])
    assert reasons and any(reason in r for r in reasons), reasons
