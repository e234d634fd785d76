"""The kvquant backend through torch.compile, with Inductor."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import StaticCache

from kvpass.backend import NotFusedError, NothingToFuseWarning, kvquant, reports_for
from kvpass.cache import QuantizedCache
from kvpass.config import KVQuantConfig
from kvpass.scales import KVScales
from kvpass.static_cache import ReleasedBuffer


@pytest.fixture
def ids():
    return torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(1))


def run(step, cache, ids, prefill=None, start=9):
    """Logits of the prompt's last token and of every later token of `ids`, one by one through `step`."""
    with torch.no_grad():
        outs = [(prefill or step)(ids[:, :start], past_key_values=cache).logits[:, -1:]]
        outs += [step(ids[:, i : i + 1], past_key_values=cache).logits.clone() for i in range(start, ids.shape[1])]
    return torch.cat(outs, 1)


def graphs():
    return counters["stats"]["unique_graphs"]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class TestQuantizedCache:
    @pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
    def test_fused_equals_eager_on_the_same_bytes(self, tiny_llama, ids, name):
        model = tiny_llama()
        expected = run(model, QuantizedCache(model.config, name, max_cache_len=32), ids)
        step = torch.compile(model, backend="kvquant", mode="reduce-overhead")
        for _ in range(3):
            close(run(step, QuantizedCache(model.config, name, max_cache_len=32), ids, prefill=model), expected)
        assert graphs() == 1
        (report,) = reports_for(list(model.parameters()))
        assert (len(report.sites), report.count("fused")) == (2, 2)

    def test_first_call_compiled_allocates_in_the_graph(self, tiny_llama, ids):
        model = tiny_llama()
        expected = run(model, QuantizedCache(model.config, "nvfp4", max_cache_len=32), ids)
        step = torch.compile(model, backend="kvquant", mode="reduce-overhead", options=None)
        for _ in range(2):
            cache = QuantizedCache(model.config, "nvfp4", max_cache_len=32)
            close(run(step, cache, ids), expected)
            for buffer in (*cache.layers[1].key.tensors(), cache.layers[1].last_position):
                assert buffer._dynamo_static_input_type == "unguarded"  # what CUDA graphs ask for
        assert graphs() == 2
        prefill, decode = reports_for(list(model.parameters()))
        assert (prefill.count("exact"), decode.count("fused")) == (2, 2)

    def test_outside_no_grad(self, tiny_llama, ids):
        """As one writes it in a notebook: the graphs are for inference all the same."""
        model = tiny_llama()
        expected = run(model, QuantizedCache(model.config, "nvfp4", max_cache_len=32), ids)
        step, cache = (
            torch.compile(model, backend="kvquant"),
            QuantizedCache(model.config, "nvfp4", max_cache_len=32),
        )
        outs = [step(ids[:, :9], past_key_values=cache).logits[:, -1:]]
        outs += [step(ids[:, i : i + 1], past_key_values=cache).logits.clone() for i in range(9, 16)]
        close(torch.cat(outs, 1), expected)
        assert not outs[-1].requires_grad and graphs() == 2

    def test_model_compile_in_place(self, tiny_llama, ids):
        model = tiny_llama()
        expected = run(model, QuantizedCache(model.config, "nvfp4", max_cache_len=32), ids)
        model.compile(backend="kvquant")
        close(run(model, QuantizedCache(model.config, "nvfp4", max_cache_len=32), ids), expected)
        assert reports_for(list(model.parameters()))[-1].count("fused") == 2

    def test_unfused_under_another_backend_is_right(self, tiny_llama, ids):
        model = tiny_llama()
        expected = run(model, QuantizedCache(model.config, "nvfp4", max_cache_len=32), ids)
        step = torch.compile(model, backend="aot_eager")
        close(run(step, QuantizedCache(model.config, "nvfp4", max_cache_len=32), ids, prefill=model), expected)


class TestStaticCache:
    def step(self, model, **options):
        return torch.compile(model, backend="kvquant", options={"format": "nvfp4", **options})

    def test_becomes_quantized_at_the_first_compiled_call(self, tiny_llama, ids):
        model = tiny_llama()
        expected = run(model, QuantizedCache(model.config, "nvfp4", max_cache_len=32), ids)
        step = self.step(model)
        for _ in range(3):
            cache = StaticCache(config=model.config, max_cache_len=32)
            close(run(step, cache, ids, prefill=model), expected)
            for layer in cache.layers:
                assert layer.keys.untyped_storage().nbytes() == layer.values.untyped_storage().nbytes() == 0
                assert layer.keys.buffers.nbytes + layer.values.buffers.nbytes == 2 * 32 * 144
        assert graphs() == 2  # one sees bf16 buffers, one sees released ones; a new cache compiles nothing
        for report in reports_for(list(model.parameters())):
            assert report.count("fused") == 2

    @pytest.mark.usefixtures("no_code_is_generated")
    def test_default_format(self, tiny_llama, ids):
        model = tiny_llama()
        cache = StaticCache(config=model.config, max_cache_len=32)
        run(torch.compile(model, backend="kvquant"), cache, ids, prefill=model)
        assert cache.layers[0].keys.format == "fp8_e4m3"

    def test_eager_use_afterwards(self, tiny_llama, ids):
        """Reset, another prefill, decode and reads work; they see the quantized storage."""
        model = tiny_llama()
        step, cache = self.step(model), StaticCache(config=model.config, max_cache_len=32)
        first = run(step, cache, ids, prefill=model)
        decoded = cache.layers[0].keys.clone()
        assert type(decoded) is torch.Tensor and (decoded[:, :, :16] != 0).any(-1).all()
        bare = QuantizedCache(model.config, "nvfp4", max_cache_len=32)
        run(model, bare, ids)
        close(decoded[:, :, :16], bare.layers[0].keys[:, :, :16])

        cache.reset()
        assert (cache.layers[0].keys == 0).all() and isinstance(cache.layers[0].keys, ReleasedBuffer)
        eager = run(model, cache, ids)
        cache.reset()
        close(run(step, cache, ids, prefill=model), eager)
        assert not torch.equal(eager, first)  # this prefill attended to quantized K and V
        assert graphs() == 2

    @pytest.mark.usefixtures("no_code_is_generated")
    def test_what_is_refused_afterwards(self, tiny_llama, ids):
        model = tiny_llama()
        cache = StaticCache(config=model.config, max_cache_len=32)
        run(self.step(model), cache, ids, prefill=model)
        keys = cache.layers[0].keys
        for write in (lambda: keys.mul_(2), lambda: keys.__setitem__(0, 1.0), lambda: torch.add(keys, 1, out=keys)):
            with pytest.raises(RuntimeError, match="quantized to nvfp4: its bf16 storage is released"):
                write()
        with pytest.raises(RuntimeError, match="data_ptr on a StaticCache buffer"):
            keys.data_ptr()
        for write in (lambda: keys[:, :, :5].zero_(), lambda: keys[0][1].copy_(keys[0][0]), lambda: keys.data.zero_()):
            with pytest.raises(RuntimeError, match="the write would be lost"):
                write()
        copy = torch.zeros(keys.shape)
        assert torch.equal(copy.copy_(keys), keys[:])  # reads into something else are reads
        with pytest.raises(ValueError, match="stored as nvfp4, and fp8_e4m3 is asked for"):
            run(torch.compile(model, backend="kvquant"), cache, ids[:, :3], start=1)

    @pytest.mark.usefixtures("no_code_is_generated")
    @pytest.mark.parametrize("keep", [(2, 4), (4, 2), (0, 0)])
    def test_kept_otherwise_than_before(self, tiny_llama, ids, keep):
        model = tiny_llama()
        cache = StaticCache(config=model.config, max_cache_len=32)
        first, then = ({"format": "nvfp4", "keep_first": a, "keep_last": b} for a, b in ((1, 5), keep))
        run(torch.compile(model, backend="kvquant", options=first), cache, ids, prefill=model)
        match = r"stored as nvfp4 with 1 \+ 5 tokens kept in bf16, and nvfp4.* is asked for; make a new one"
        with pytest.raises(ValueError, match=match):
            run(torch.compile(model, backend="kvquant", options=then), cache, ids[:, :3], start=1)

    @pytest.mark.usefixtures("no_code_is_generated")
    def test_views_taken_before_the_release_stay_valid(self, tiny_llama, ids):
        model = tiny_llama()
        cache = StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            model(ids[:, :9], past_key_values=cache)
        views = [cache.layers[0].keys[:, :, :9], cache.layers[0].keys.detach()]
        before = [view.clone() for view in views]
        run(self.step(model), cache, ids[:, 8:12], start=1)
        assert isinstance(cache.layers[0].keys, ReleasedBuffer)
        assert all(map(torch.equal, views, before))

    @pytest.mark.usefixtures("no_code_is_generated")
    def test_prefill_compiled_in_an_uninitialized_cache_under_strict(self, tiny_llama, ids):
        model = tiny_llama()
        run(self.step(model, strict=True), StaticCache(config=model.config, max_cache_len=32), ids)
        assert [report.count("not fused") for report in reports_for(list(model.parameters()))] == [0, 0, 0]

    def test_another_backend_never_reads_released_memory(self, tiny_llama, ids):
        model = tiny_llama()
        cache = StaticCache(config=model.config, max_cache_len=32)
        run(self.step(model), cache, ids[:, :11], prefill=model)
        with pytest.raises(Exception, match="released|quantized by the kvquant backend|FakeTensors"):
            run(torch.compile(model, backend="inductor"), cache, ids[:, :3], start=1)

    def test_prefill_compiled(self, tiny_llama, ids):
        """A compiled prefill of an empty cache is exact, on the bf16 buffers; the first decode step quantizes them."""
        model = tiny_llama()
        expected = run(model, QuantizedCache(model.config, "nvfp4", max_cache_len=32), ids)
        close(run(self.step(model), StaticCache(config=model.config, max_cache_len=32), ids), expected)


class TestOptions:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"options": {"format": "nvfp5"}}, "unknown KV format 'nvfp5'; known: bf16"),
            ({"options": {"fromat": "nvfp4"}}, r"unknown option 'fromat'; known: .*Did you mean 'format'\?"),
            ({"options": {"mode": "fast"}}, "unknown mode 'fast'; known: default, .*reduce-overhead"),
            ({"mode": "fast"}, "unknown mode 'fast'"),
        ],
    )
    def test_bad_options(self, arguments, message):
        gm = torch.fx.symbolic_trace(lambda x: x + 1)
        with pytest.raises(ValueError, match=message):
            kvquant(gm, [torch.ones(1)], **arguments)

    def test_inductor_options_are_passed_on(self, tiny_llama, ids):
        model = tiny_llama()
        step = torch.compile(model, backend="kvquant", options={"max_autotune": False, "mode": "default"})
        run(step, QuantizedCache(model.config, max_cache_len=32), ids[:, :10], prefill=model)

    def test_strict_raises_on_an_unfused_site(self, tiny_llama, ids):
        model = tiny_llama(attn_implementation="eager", output_attentions=True)
        step = torch.compile(model, backend="kvquant", options={"strict": True})
        with pytest.raises(Exception, match="left attention unfused") as caught:
            run(step, QuantizedCache(model.config, max_cache_len=32), ids[:, :10], prefill=model)
        assert "NotFusedError" in repr(caught.value) or isinstance(caught.value, NotFusedError)

    def test_not_strict_warns_and_is_right(self, tiny_llama, ids):
        model = tiny_llama(attn_implementation="eager", output_attentions=True)
        expected = run(model, QuantizedCache(model.config, max_cache_len=32), ids[:, :11])
        step = torch.compile(model, backend="kvquant")
        with pytest.warns(UserWarning, match="left attention unfused"):
            ours = run(step, QuantizedCache(model.config, max_cache_len=32), ids[:, :11], prefill=model)
        close(ours, expected)
        assert reports_for(list(model.parameters()))[-1].count("not fused") == 2

    @pytest.mark.parametrize("mode", [None, "reduce-overhead"])
    def test_eager_attention_is_fused(self, tiny_llama, ids, mode):
        model = tiny_llama(attn_implementation="eager")
        expected = run(model, QuantizedCache(model.config, max_cache_len=32), ids[:, :11])
        step = torch.compile(model, backend="kvquant", options={"strict": True, "mode": mode})
        close(run(step, QuantizedCache(model.config, max_cache_len=32), ids[:, :11], prefill=model), expected)
        assert reports_for(list(model.parameters()))[-1].count("fused") == 2

    def test_a_graph_without_attention_warns(self):
        with pytest.warns(NothingToFuseWarning, match="holds no attention"):
            torch.compile(torch.relu, backend="kvquant")(torch.ones(3))

    @pytest.mark.usefixtures("no_code_is_generated")
    def test_a_fused_graph_warns_of_nothing(self, tiny_llama, ids):
        model = tiny_llama()
        cache = QuantizedCache(model.config, max_cache_len=32)
        step = torch.compile(model, backend="kvquant", options={"strict": True})
        with warnings.catch_warnings():
            warnings.simplefilter("error", NothingToFuseWarning)
            warnings.filterwarnings("error", message="kvquant")
            run(step, cache, ids[:, :11])


def test_the_string_resolves_with_no_import_of_kvpass():
    code = (
        "import sys, torch\n"
        "assert 'kvquant' in torch._dynamo.list_backends(exclude_tags=())\n"
        "assert not any(name.startswith('kvpass') for name in sys.modules)\n"
        "f = torch.compile(lambda x: x.relu(), backend='kvquant')\n"
        "assert f(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


SCALES = KVScales.of({0: (0.05, [0.02, 0.03]), 1: ([0.04, 0.07], 0.5)})


class TestScales:
    def test_changed_after_compilation_they_take_effect(self, tiny_llama, ids, device):
        """Without another graph; on a GPU the graph that was recorded is replayed."""
        model, ids = tiny_llama(device), ids.to(device)
        step = torch.compile(model, backend="kvquant", mode="reduce-overhead")
        cache = QuantizedCache(model.config, KVQuantConfig(scales=SCALES), max_cache_len=32)
        first = run(step, cache, ids, prefill=model).clone()
        close(first, run(model, QuantizedCache(model.config, KVQuantConfig(scales=SCALES), max_cache_len=32), ids))
        other = KVScales.of({0: (0.05, [0.02, 0.03]), 1: ([4.0, 7.0], 0.5)})  # so coarse that it shows
        cache.reset()
        cache.set_scales(other)
        second = run(step, cache, ids, prefill=model)
        close(second, run(model, QuantizedCache(model.config, KVQuantConfig(scales=other), max_cache_len=32), ids))
        assert not torch.equal(first[:, 1:], second[:, 1:]) and graphs() == 1

    def test_first_call_compiled_allocates_in_the_graph(self, tiny_llama, ids):
        model = tiny_llama()
        step = torch.compile(model, backend="kvquant", mode="reduce-overhead")
        for scales in (SCALES, KVScales.of({0: (0.06, [0.01, 0.03]), 1: ([0.03, 0.08], 0.6)})):
            cache = QuantizedCache(model.config, KVQuantConfig(scales=scales), max_cache_len=32)
            ours = run(step, cache, ids)
            eager = QuantizedCache(model.config, KVQuantConfig(scales=scales), max_cache_len=32)
            close(ours, run(model, eager, ids))
            assert cache.layers[1].key.scale.tolist() == torch.tensor(scales[1].key.scale).tolist()
        assert graphs() == 2  # other scales compile nothing

    def test_formats_by_layer(self, tiny_llama, ids):
        model = tiny_llama(num_hidden_layers=3)
        config = KVQuantConfig(layers={1: "nvfp4"}, skip_layers=[2])
        expected = run(model, QuantizedCache(model.config, config, max_cache_len=32), ids)
        step = torch.compile(model, backend="kvquant")
        ours = run(step, QuantizedCache(model.config, config, max_cache_len=32), ids, prefill=model)
        # Where compiled code rounds K otherwise (a fused multiply-add), a value moves to the neighbouring code, which
        # changes logits of about 0.5 by 3e-4; another format moves them by 1e-2.
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-3)
        (report,) = reports_for(list(model.parameters()))
        assert [site.key_format for site in report.sites] == ["fp8_e4m3", "nvfp4", "bf16"]

    @pytest.mark.parametrize("as_path", [False, True])
    def test_static_cache(self, tiny_llama, ids, tmp_path, as_path):
        """Options are plain data; each layer of the cache gets its own format and scales."""
        model = tiny_llama(num_hidden_layers=3)
        scales = KVScales.of({0: (0.05, [0.02, 0.03]), 1: ([0.04, 0.07], 0.5), 2: (0.01, 0.02)})
        config = KVQuantConfig(layers={2: "nvfp4"}, scales=scales)
        expected = run(model, QuantizedCache(model.config, config, max_cache_len=32), ids)
        options = config.to_dict()
        if as_path:
            scales.to_json(tmp_path / "kv.json")
            options["scales"] = str(tmp_path / "kv.json")
        step = torch.compile(model, backend="kvquant", options=options)
        for _ in range(2):
            cache = StaticCache(config=model.config, max_cache_len=32)
            close(run(step, cache, ids, prefill=model), expected)
        assert [layer.keys.format for layer in cache.layers] == ["fp8_e4m3", "fp8_e4m3", "nvfp4"]
        assert cache.layers[0].values.buffers.scale.tolist() == torch.tensor([0.02, 0.03]).tolist()
        assert cache.layers[1].keys.buffers.scale.tolist() == torch.tensor([0.04, 0.07]).tolist()
        assert graphs() == 2
        for report in reports_for(list(model.parameters())):
            assert [site.key_format for site in report.sites] == ["fp8_e4m3", "fp8_e4m3", "nvfp4"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"scales": KVScales.of({0: (1.0, 1.0)}).to_dict()}, "has no scales for layer 1; it has 0"),
            (
                {"scales": KVScales.of({i: ([1.0] * 3, 1.0) for i in range(2)}).to_dict()},
                "3 scales for a layer of 2 KV",
            ),
            ({"skip_layers": [-1]}, "layer '-1' can only be found where the model is known"),
        ],
    )
    def test_what_is_refused_before_the_cache_is_touched(self, tiny_llama, ids, options, message):
        model = tiny_llama()
        cache = StaticCache(config=model.config, max_cache_len=32)
        with pytest.raises(Exception, match=message):
            run(torch.compile(model, backend="kvquant", options=options), cache, ids, prefill=model)
        assert not any(isinstance(layer.keys, ReleasedBuffer) for layer in cache.layers)
        assert all(layer.keys.untyped_storage().nbytes() for layer in cache.layers)

    def test_buffers_of_an_unknown_layer_are_not_fused(self):
        """Which layer's scales are meant cannot be told: the attention stays right, and the report says why."""

        def attend(query, new_key, new_value, keys, values, slots, mask):
            keys.index_copy_(2, slots, new_key)
            values.index_copy_(2, slots, new_value)
            return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

        torch.manual_seed(0)
        query, key, value = torch.randn(3, 1, 2, 1, 64)
        keys, values, slots = torch.randn(1, 2, 8, 64), torch.randn(1, 2, 8, 64), torch.tensor([3])
        mask = torch.ones(1, 1, 1, 8, dtype=torch.bool)
        expected = attend(query, key, value, keys.clone(), values.clone(), slots, mask)
        step = torch.compile(attend, backend="kvquant", options={"scales": SCALES.to_dict()})
        with pytest.warns(UserWarning, match="which layer of a cache the buffers of K and V belong to cannot be told"):
            close(step(query, key, value, keys, values, slots, mask), expected)


def nearly(ours, theirs):
    """A compiled model rounds its K and V otherwise, and then a value here and there gets another code."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3 * theirs.abs().max().item())


TRANSFORMED = [
    "balanced",
    "compact",
    {"format": "fp8_e4m3+centred+rotated"},
    {"format": "int8+rotated", "value_format": "int8+centred"},
    {"format": "nvfp4", "key_format": "fp8_e4m3+rotated", "keep_last": 5},
    {"format": "nvfp4+centred", "keep_first": 3, "layers": {1: "fp8_e4m3+rotated"}},
]


@pytest.fixture
def code_for_one_config(request, config):
    """Inductor sees operators only, the same ones for every transform: on a CPU it compiles one configuration."""
    if config != TRANSFORMED[-1]:
        request.getfixturevalue("no_code_is_generated")


@pytest.mark.usefixtures("code_for_one_config")
class TestEveryTransform:
    @pytest.mark.parametrize("config", TRANSFORMED)
    def test_fused_equals_eager_with_either_kind_of_prefill(self, tiny_llama, ids, config, device):
        model, ids = tiny_llama(device), ids.to(device)
        eager = QuantizedCache(model.config, config, max_cache_len=32)
        expected = run(model, eager, ids)
        step = torch.compile(model, backend="kvquant", mode="reduce-overhead")
        for prefill in (model, None):
            cache = QuantizedCache(model.config, config, max_cache_len=32)
            ours = run(step, cache, ids, prefill=prefill)
            nearly(ours, expected)
            for ours, theirs in zip(cache.layers, eager.layers, strict=True):
                if ours.key.centre is not None:
                    close(ours.key.centre, theirs.key.centre)
                assert torch.equal(ours.value.scale, theirs.value.scale)
                assert (ours.value.scale.max() < 1) == ours.value_format.learns_scale
        for report in reports_for(list(model.parameters())):
            assert not report.count("not fused")

    @pytest.mark.parametrize("config", TRANSFORMED)
    def test_static_cache(self, tiny_llama, ids, config, device):
        """Centres and tensor scales are those of what it holds when it is converted, unwritten slots not counted; of
        the model's rotary embedding nothing is known there."""
        model, ids = tiny_llama(device), ids.to(device)
        expected = QuantizedCache(model.config, config, max_cache_len=32)
        for layer in expected.layers:
            layer.config = layer.config._replace(frequencies=())
        wanted = run(model, expected, ids)
        options = KVQuantConfig.of(config).to_dict()
        step = torch.compile(model, backend="kvquant", options=options)
        for _ in range(2):
            cache = StaticCache(config=model.config, max_cache_len=32)
            ours = run(step, cache, ids, prefill=model)
            nearly(ours, wanted)
            for ours, theirs in zip(cache.layers, expected.layers, strict=True):
                for released, buffers in ((ours.keys, theirs.key), (ours.values, theirs.value)):
                    if buffers.centre is not None:
                        close(released.buffers.centre, buffers.centre)
                    assert torch.equal(released.buffers.scale, buffers.scale)
                    assert (released.buffers.kept is None) == (buffers.kept is None)
                    if buffers.kept is not None:
                        assert torch.equal(released.buffers.kept_slots, buffers.kept_slots)
        cache.reset()
        assert (cache.layers[0].keys.buffers.codes == 0).all()
        run(model, cache, ids)  # eager use of the quantized storage


@pytest.mark.usefixtures("no_code_is_generated")
class TestTransforms:
    def test_a_compiled_prefill_after_a_reset_takes_new_centres(self, tiny_llama, ids):
        model = tiny_llama()
        step = torch.compile(model, backend="kvquant")
        cache = QuantizedCache(model.config, "balanced", max_cache_len=32)
        for start in (0, 3):  # 9 tokens each time
            cache.reset()
            expected = QuantizedCache(model.config, "balanced", max_cache_len=32)
            nearly(run(step, cache, ids[:, start:]), run(model, expected, ids[:, start:]))
            close(cache.layers[1].key.centre, expected.layers[1].key.centre)
            assert torch.equal(cache.layers[1].value.scale, expected.layers[1].value.scale)

    def test_a_preset_as_an_option(self, tiny_llama, ids):
        model = tiny_llama()
        cache = StaticCache(config=model.config, max_cache_len=32)
        run(torch.compile(model, backend="kvquant", options={"format": "compact"}), cache, ids, prefill=model)
        assert cache.layers[0].keys.format == "nvfp4+centred+rotated+4over6"
