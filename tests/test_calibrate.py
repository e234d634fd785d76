"""Calibration: what it measures, that nothing is lost on the way to a cache, and that it repairs a broken model."""

import argparse
import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import smollm2
import torch

import kvpass
from kvpass import reference
from kvpass.cache import QuantizedCache
from kvpass.calibrate import add_arguments, run
from kvpass.config import KVQuantConfig
from kvpass.devices import Ranks
from kvpass.formats import get_format
from kvpass.scales import KVScales
from kvpass.windows import token_batches


def measure(model, data, format="fp8_e4m3", **settings):
    return kvpass.calibrate(model, data, format, **({"progress": False, "window": 16} | settings))


@pytest.fixture
def data():
    return [torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (16, 40, 7)]


def keys_and_values(model, data, window=16):
    """What calibration sees of each layer: ``[kv_heads, tokens, head_dim]`` of K and V, all windows in a row."""
    found = []
    for ids in token_batches(data, None, window, 1, None):
        cache = QuantizedCache(model.config, "bf16", max_cache_len=window)
        with torch.no_grad():
            model(ids, past_key_values=cache, logits_to_keep=1)
        found.append([(layer.keys[0, :, : ids.shape[1]], layer.values[0, :, : ids.shape[1]]) for layer in cache.layers])
    return [[torch.cat(side, 1) for side in zip(*layer, strict=True)] for layer in zip(*found, strict=True)]


@pytest.fixture
def model(tiny_llama):
    return tiny_llama(dtype=torch.bfloat16)  # so that the bf16 cache above holds exactly what was computed


def spread(model):
    """Make the heads of V differ in size."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[64:] *= 20
    return model


class TestMethods:
    @pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "nvfp4"])
    @pytest.mark.parametrize("per", ["tensor", "head"])
    def test_amax(self, model, data, format, per):
        spread(model)
        scales = measure(model, data, format, per=per, power_of_two=False)
        for layer, sides in zip(scales.layers, keys_and_values(model, data), strict=True):
            for scale, x in zip((layer.key, layer.value), sides, strict=True):
                amax = x.float().abs().amax((1, 2))
                amax = amax if per == "head" else amax.amax(0, keepdim=True)
                assert torch.equal(torch.tensor(scale.scale), amax / get_format(format).range)
        assert scales.model_type == "llama"
        notes = {"method": "amax", "per": per, "tokens": 63, "window": 16, "power_of_two": False}
        assert dict(scales.notes) == notes

    @pytest.mark.parametrize("per", ["tensor", "head"])
    @pytest.mark.parametrize("percentile", [50.0, 99.0, 100.0])
    def test_percentile(self, model, data, per, percentile):
        scales = measure(spread(model), data, method="percentile", percentile=percentile, per=per, power_of_two=False)
        for layer, sides in zip(scales.layers, keys_and_values(model, data), strict=True):
            for scale, x in zip((layer.key, layer.value), sides, strict=True):
                magnitudes = x.float().abs().flatten(1) if per == "head" else x.float().abs().flatten()[None]
                inside = (magnitudes <= torch.tensor(scale.scale)[:, None] * 448).double().mean(1) * 100
                smaller = (magnitudes <= torch.tensor(scale.scale)[:, None] * 448 * (1 - 1 / 32)).double().mean(1) * 100
                assert (inside >= percentile).all() and (smaller <= percentile).all()

    @pytest.mark.parametrize("format", ["fp8_e4m3", "nvfp4"])
    def test_least_squares_is_no_worse_than_amax_and_than_one(self, model, data, format):
        def error(scale, x):
            fmt = get_format(format)
            buffers = fmt.allocate_like(x[None], scale=scale)
            reference.write(buffers, fmt, x[None], torch.arange(x.shape[1]))
            return (reference.dequantize(buffers, fmt) - x).square().sum()

        spread(model)
        found = {method: measure(model, data, format, method=method) for method in ("amax", "least_squares")}
        for index, sides in enumerate(keys_and_values(model, data)):
            for side, x in zip(("key", "value"), sides, strict=True):
                best, amax = (
                    error(torch.tensor(getattr(found[m][index], side).scale), x.float())
                    for m in ("least_squares", "amax")
                )
                slack = 1 + 1e-5  # of adding up in another order
                assert best <= amax * slack and best <= error(torch.ones(1), x.float()) * slack

    @pytest.mark.parametrize("method", ["amax", "percentile"])
    def test_rounded_up_to_a_power_of_two(self, model, data, method):
        exact, rounded = (measure(model, data, method=method, power_of_two=p) for p in (False, True))
        for layer, other in zip(exact.layers, rounded.layers, strict=True):
            for one, up in ((layer.key, other.key), (layer.value, other.value)):
                assert math.frexp(up.scale[0])[0] == 0.5 and up.scale[0] / 2 < one.scale[0] <= up.scale[0]

    def test_no_value_is_stored_worse_than_with_one(self, model, data):
        """Whatever the value: a power of two moves no rounding point, and small values get more bits."""
        fmt = get_format("fp8_e4m3")
        for layer, sides in zip(measure(model, data).layers, keys_and_values(model, data), strict=True):
            for scale, x in zip((layer.key, layer.value), sides, strict=True):
                errors = []
                for own in (torch.tensor(scale.scale), torch.ones(1)):
                    buffers = fmt.allocate_like(x[None], scale=own)
                    reference.write(buffers, fmt, x[None], torch.arange(x.shape[1]))
                    errors.append((reference.dequantize(buffers, fmt) - x).abs())
                assert (errors[0] <= errors[1]).all() and errors[0].sum() < errors[1].sum()

    def test_formats_by_layer(self, model, data):
        config = KVQuantConfig(key_format="fp8_e5m2", value_format="nvfp4", skip_layers=[0])
        scales = measure(model, data, config)
        assert [(i.key.format, i.value.format) for i in scales.layers] == [("bf16", "bf16"), ("fp8_e5m2", "nvfp4")]
        assert scales[0].key.scale == () and len(scales[1].key.scale) == 1
        assert KVQuantConfig.from_scales(scales).resolved(["full_attention"] * 2).layer(0).key.name == "bf16"

    def test_a_side_that_is_zero(self, model, data):
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.zero_()
        with pytest.warns(UserWarning, match="layer 1: V is zero throughout the data; its scale is 1.0"):
            assert measure(model, data)[1].value.scale == (1.0,)

    def test_the_model_is_left_as_it_was(self, model, data):
        model.train()
        before = {name: p.clone() for name, p in model.state_dict().items()}
        measure(model, data)
        assert model.training and all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


class TestData:
    def test_a_text_its_pieces_and_its_file_are_the_same(self, model, tokenizer, tmp_path):
        text = "It was a truth universally acknowledged. " * 3
        (tmp_path / "text.txt").write_text(text)
        found = [
            measure(model, given, tokenizer=tokenizer)
            for given in (text, [text[:42], text[42:]], tmp_path / "text.txt", iter([text]))
        ]
        assert len(set(found)) == 1
        ids = torch.tensor(tokenizer(text)["input_ids"])
        assert measure(model, [ids]) == found[0]

    def test_batches_are_cut_and_put_together(self, data):
        shapes = [tuple(b.shape) for b in token_batches(data, None, 16, 3, None)]
        assert shapes == [(3, 16), (1, 8), (1, 7)]
        assert [b.numel() for b in token_batches(data, None, 16, 1, 37)] == [16, 16, 5]

    def test_max_tokens(self, model, data):
        first = measure(model, data, max_tokens=16, power_of_two=False)
        assert first == measure(model, data[:1], power_of_two=False) != measure(model, data, power_of_two=False)

    def test_memory_does_not_grow_with_the_text(self, model, tokenizer, tmp_path, monkeypatch):
        """The text is read piece by piece, and nothing of a window is kept."""
        from kvpass import windows

        monkeypatch.setattr(windows, "_CHUNK", 32)
        path, reads = tmp_path / "text.txt", []
        path.write_text("x" * 320)
        for ids in windows.token_batches(path, tokenizer, 16, 1, 64):
            reads.append(ids.shape[1])
        assert reads == [16] * 4
        sizes = []
        for tokens in (64, 256):
            state = tmp_path / f"state{tokens}"
            monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: None)
            settings = {"method": "percentile", "max_tokens": tokens, "resume": state, "save_every": 0}
            measure(model, path, tokenizer=tokenizer, **settings)
            sizes.append(state.stat().st_size)
            monkeypatch.undo()
        assert sizes[0] == pytest.approx(sizes[1], abs=8)

    @pytest.mark.parametrize(
        ("given", "settings", "message"),
        [
            ("text", {}, "text needs the model's tokenizer"),
            (["text"], {}, "text needs the model's tokenizer"),
            ([], {}, "text needs the model's tokenizer|holds no tokens"),
            ([torch.zeros(0, dtype=torch.long)], {}, "the data holds no tokens"),
            ([torch.ones(4, dtype=torch.long)], {"method": "amx"}, "unknown method 'amx'.*Did you mean 'amax'"),
            ([torch.ones(4, dtype=torch.long)], {"per": "heads"}, "unknown granularity 'heads'.*mean 'head'"),
            ([torch.ones(4, dtype=torch.long)], {"percentile": 0}, "percentile is 0; it must be above 0"),
            ([torch.ones(4, dtype=torch.long)], {"window": 0}, "window is 0"),
            ([torch.ones(4, dtype=torch.long)], {"window": 4096}, "window is 4096, and the model has 2048 positions"),
            (iter([torch.ones(4, dtype=torch.long)]), {"method": "least_squares"}, "an iterator can be read once"),
        ],
    )
    def test_what_is_refused(self, model, given, settings, message):
        with pytest.raises(ValueError, match=message):
            measure(model, given, **settings)

    def test_a_format_without_scales(self, model, data):
        with pytest.raises(
            ValueError, match="no format with a tensor scale or a centre, so there is nothing to calibrate"
        ):
            measure(model, data, "fp4_mx_block16")

    def test_nan(self, model, data):
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
        with pytest.raises(ValueError, match="layer 1: K holds NaN or infinity"):
            measure(model, data)


class TestResume:
    @pytest.mark.parametrize("method", ["percentile", "least_squares"])
    @pytest.mark.parametrize("stop", [1, 6])
    def test_an_interrupted_run_ends_the_same(self, model, data, tmp_path, stopped, method, stop):
        data, path = data * 2, tmp_path / "state"
        expected = measure(model, data, method=method)
        settings = {"method": method, "resume": path, "save_every": 0}
        with stopped(model, after=stop) as calls, pytest.raises(KeyboardInterrupt):
            measure(model, data, **settings)
        assert path.exists() and len(calls) == stop
        with stopped(model) as calls:
            assert measure(model, data, **settings) == expected
        assert len(calls) == 10 * (2 if method == "least_squares" else 1) - stop
        assert list(tmp_path.iterdir()) == []

    def test_what_is_refused(self, model, data, tmp_path, tiny_llama, stopped):
        path = tmp_path / "state"
        with stopped(model, after=2), pytest.raises(KeyboardInterrupt):
            measure(model, data, resume=path, save_every=0)
        other = [data[0].flip(0), *data[1:]]
        with pytest.raises(ValueError, match="was made with other data"):
            measure(model, other, resume=path)
        with pytest.raises(ValueError, match="was made with more data than this"):
            measure(model, data[:1], resume=path)
        for change in ({"per": "head"}, {"window": 8}, {"format": "nvfp4"}):
            with pytest.raises(ValueError, match="belongs to another model or other settings"):
                measure(model, data, resume=path, **change)
        with pytest.raises(ValueError, match="belongs to another model"):
            measure(tiny_llama(dtype=torch.bfloat16, seed=1), data, resume=path)
        path.write_text("something else")
        with pytest.raises(ValueError, match="is not the state of a calibration"):
            measure(model, data, resume=path)
        assert path.read_text() == "something else"


def filled(model, config, ids):
    cache = QuantizedCache(model.config, config, max_cache_len=32)
    with torch.no_grad():
        for chunk in (ids[:, :9], ids[:, 9:12], ids[:, 12:13]):
            model(chunk, past_key_values=cache)
    return cache


def same_bytes(first, second):
    pairs = zip(first.layers, second.layers, strict=True)
    return all(
        torch.equal(a, b)
        for one, other in pairs
        for a, b in zip((*one.key.tensors(), *one.value.tensors()), (*other.key.tensors(), *other.value.tensors()))  # noqa: B905
    )


@pytest.mark.parametrize("method", ["amax", "percentile", "least_squares"])
@pytest.mark.parametrize(
    ("format", "per", "layout"),
    [("fp8_e4m3", "tensor", None), ("fp8_e4m3", "head", "modelopt"), ("nvfp4", "head", None)],
)
def test_round_trips_give_bit_identical_caches(model, data, tmp_path, method, format, per, layout):
    """calibrate -> JSON -> load, and calibrate -> checkpoint -> load."""
    model.save_pretrained(tmp_path / "model")
    model = type(model).from_pretrained(tmp_path / "model")
    scales = measure(model, data, format, method=method, per=per)
    expected = filled(model, KVQuantConfig(format, scales=scales), data[0][None])
    assert not same_bytes(expected, filled(model, format, data[0][None]))

    scales.to_json(tmp_path / "kv.json")
    from_json = KVQuantConfig(format, scales=KVScales.from_json(tmp_path / "kv.json"))
    assert same_bytes(expected, filled(model, from_json, data[0][None]))
    assert same_bytes(expected, filled(model, KVQuantConfig.from_file(tmp_path / "kv.json"), data[0][None]))

    scales.to_checkpoint(tmp_path / "model", tmp_path / "copy", layout=layout)
    from_checkpoint = KVQuantConfig.from_pretrained(tmp_path / "copy")
    assert same_bytes(expected, filled(model, from_checkpoint, data[0][None]))
    if layout == "modelopt":
        loaded = type(model).from_pretrained(tmp_path / "copy")
        assert same_bytes(expected, filled(loaded, from_checkpoint, data[0][None]))


def enlarge_keys(model, layer, factor=600):
    """Make a layer's K ``factor`` times larger and its query as much smaller: the same model, with a large K."""
    attention = model.model.layers[layer].self_attn
    with torch.no_grad():
        attention.k_proj.weight *= factor
        attention.q_proj.weight /= factor
    return model


def through_cache(model, config, ids, start=1):
    """Logits of ``ids`` through a cache in which every token is quantized."""
    cache = QuantizedCache(model.config, config, max_cache_len=ids.shape[1])
    with torch.no_grad():
        chunks = [ids[:, :start], ids[:, start:]]  # only a first chunk of several tokens would see exact K and V
        return torch.cat([model(chunk, past_key_values=cache).logits for chunk in chunks], 1).float()


def test_keys_600_times_larger_in_one_layer_are_repaired(tiny_llama, capsys):
    shape = {"num_hidden_layers": 3, "initializer_range": 0.1}
    ids = torch.randint(0, 512, (2, 65), generator=torch.Generator().manual_seed(3))
    sample = [torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(4))]
    plain, large = tiny_llama(**shape), enlarge_keys(tiny_llama(**shape), layer=1)
    scales = measure(large, sample, window=64)
    with torch.no_grad():
        exact = plain(ids).logits

    def error(model, config):
        return float((through_cache(model, config, ids) - exact).norm() / exact.norm())

    usual, broken, repaired = error(plain, "fp8_e4m3"), error(large, "fp8_e4m3"), error(large, {"scales": scales})
    with capsys.disabled():
        print(f"\nrelative logit error of fp8_e4m3: {usual:.3f}; with K x 600 in one layer {broken:.3f}, ", end="")
        print(f"and {repaired:.3f} calibrated")
    assert broken > 3 * repaired and repaired < 1.2 * usual


@pytest.fixture(scope="module")
def smollm2_model():
    return smollm2.load(dtype=torch.float32)


def english(words):
    """Text that comes with Python, without its markup."""
    text = " ".join(topics[name] for name in sorted(topics) if len(topics[name]) > 1500)
    return " ".join(text.translate(str.maketrans("", "", "*`|_=+")).split()[words])


def held_out(tokenizer, length):
    return tokenizer(english(slice(20000, 20000 + length)), return_tensors="pt")["input_ids"][:, :length]


def perplexity(logits, ids):
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).exp())


@pytest.mark.model
def test_smollm2_is_no_worse_with_calibrated_scales(smollm2_model, capsys):
    """Perplexity, and the steadier divergence from what a bf16 cache gives."""
    model, tokenizer = smollm2_model
    settings = {"tokenizer": tokenizer, "window": 512, "max_tokens": 2048}
    scales = measure(model, english(slice(0, 4000)), **settings)
    ids, found = held_out(tokenizer, 1024), {}
    exact = through_cache(model, "bf16", ids).log_softmax(-1)
    for name, config in (("1.0", "fp8_e4m3"), ("calibrated", {"scales": scales})):
        logits = through_cache(model, config, ids)
        divergence = (exact.exp() * (exact - logits.log_softmax(-1))).sum(-1).mean()
        found[name] = perplexity(logits, ids), float(divergence)
    with capsys.disabled():
        print(f"\nSmolLM2, fp8_e4m3, perplexity and KL: {found}; perplexity in bf16 {perplexity(exact, ids):.4f}")
    assert found["calibrated"][0] <= found["1.0"][0] and found["calibrated"][1] <= found["1.0"][1]


@pytest.mark.model
def test_smollm2_with_keys_600_times_larger_is_repaired(smollm2_model, capsys):
    model, tokenizer = copy.deepcopy(smollm2_model[0]), smollm2_model[1]
    ids = held_out(tokenizer, 256)
    usual = perplexity(through_cache(model, "fp8_e4m3", ids), ids)
    enlarge_keys(model, layer=12)
    scales = measure(model, english(slice(0, 1000)), tokenizer=tokenizer, window=512, max_tokens=512)
    broken = perplexity(through_cache(model, "fp8_e4m3", ids), ids)
    repaired = perplexity(through_cache(model, {"scales": scales}, ids), ids)
    with capsys.disabled():
        print(f"\nSmolLM2, perplexity: {usual:.2f}; K x 600 in layer 12: {broken:.2f}, calibrated {repaired:.2f}")
    assert broken > 1.1 * usual and abs(repaired / usual - 1) < 0.02


class TestCommand:
    def call(self, *arguments):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return run(parser.parse_args([str(a) for a in arguments]))

    @pytest.fixture
    def saved(self, tiny_llama, tokenizer, tmp_path):
        tiny_llama().save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
        return [tmp_path / "model", "--data", tmp_path / "text.txt", "--window", 32, "--dtype", "float32"]

    def test_json(self, saved, tmp_path, capsys):
        assert self.call(*saved, "--out", tmp_path / "kv.json") == 0
        scales = KVScales.from_json(tmp_path / "kv.json")
        assert scales.indexes == [0, 1] and f"{tmp_path / 'kv.json'}: 2 layers" in capsys.readouterr().out
        assert not list(tmp_path.glob("*.partial"))

    def test_sglang(self, saved, tmp_path):
        self.call(*saved, "--out", tmp_path / "kv.json", "--schema", "sglang", "--quiet")
        values = json.loads((tmp_path / "kv.json").read_text())
        assert set(values["kv_cache"]["scaling_factor"]["0"]) == {"0", "1"}

    def test_checkpoint(self, saved, tmp_path):
        self.call(*saved, "--out", tmp_path / "copy", "--format", "nvfp4", "--per", "head", "--quiet")
        assert KVQuantConfig.from_pretrained(tmp_path / "copy").format == "nvfp4"
        with pytest.raises(ValueError, match="name a new folder"):
            self.call(*saved, "--out", tmp_path / "copy")

    def test_a_configuration_for_a_format(self, saved, tmp_path):
        (tmp_path / "config.yaml").write_text("value_format: nvfp4\nskip_layers: [1]\n")
        self.call(*saved, "--out", tmp_path / "kv.json", "--format", tmp_path / "config.yaml", "--quiet")
        scales = KVScales.from_json(tmp_path / "kv.json")
        assert (scales[0].value.format, scales[1].value.format) == ("nvfp4", "bf16")

    def test_no_such_text(self, saved, tmp_path):
        saved[2] = tmp_path / "no.txt"
        with pytest.raises(ValueError, match="no.txt is not a file"):
            self.call(*saved, "--out", tmp_path / "kv.json")


@pytest.mark.parametrize("first", ["import kvpass.calibrate", "from kvpass.calibrate import run", "import kvpass"])
def test_the_public_name_can_be_called_whatever_is_imported_first(first):
    code = f"{first}\nimport kvpass\nprint(callable(kvpass.calibrate))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "True"


class TestTransforms:
    def test_scales_are_those_of_centred_and_rotated_values(self, model, data):
        scales = measure(model, data, "fp8_e4m3+centred+rotated", power_of_two=False)
        for layer, sides in zip(scales.layers, keys_and_values(model, data), strict=True):
            for scale, x in zip((layer.key, layer.value), sides, strict=True):
                centre = torch.tensor(scale.centre)
                torch.testing.assert_close(centre, x[:, :16].float().mean(1))  # of the first window
                stored = reference.rotate(x.float() - centre[:, None])
                torch.testing.assert_close(torch.tensor(scale.scale), stored.abs().max().view(1) / 448)

    @pytest.mark.parametrize("method", ["percentile", "least_squares"])
    def test_a_constant_in_all_tokens_does_not_show(self, model, data, method):
        biased = copy.deepcopy(model)
        biased.model.layers[1].self_attn.v_proj.bias = torch.nn.Parameter(torch.full((128,), 50.0).bfloat16())

        def scale(model, format):
            return measure(model, data, format, method=method, power_of_two=False)[1].value.scale[0]

        assert scale(biased, "fp8_e4m3+centred") == pytest.approx(scale(model, "fp8_e4m3+centred"), rel=0.3)
        assert scale(biased, "fp8_e4m3") > 3 * scale(model, "fp8_e4m3")

    def test_centres_alone(self, model, data, tmp_path):
        scales = measure(model, data, "fp4_mx_block16+centred")
        assert scales[0].key.scale == () and len(scales[0].key.centre[1]) == 64
        scales.to_json(tmp_path / "kv.json")
        assert KVScales.from_json(tmp_path / "kv.json") == scales
        cache = filled(model, KVQuantConfig.from_file(tmp_path / "kv.json"), data[0][None])
        assert torch.equal(cache.layers[1].value.centre, torch.tensor(scales[1].value.centre))


def test_a_model_that_is_split_among_ranks_is_refused(tiny_llama, monkeypatch):
    monkeypatch.setattr("kvpass.calibrate.ranks_of", lambda model: Ranks(0, 2, 2))
    with pytest.raises(NotImplementedError, match="split among 2 tensor-parallel ranks"):
        kvpass.calibrate(tiny_llama(), [torch.arange(8)])
