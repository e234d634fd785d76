"""KVScales: JSON in both schemas, ranks, conversion between formats, and what is refused."""

import copy
import json

import jsonschema
import pytest
import torch

from kvpass.formats import get_format
from kvpass.scales import KVScales, LayerScales, Scale


def own(**changes):
    """Data of our schema: two layers, two KV heads, formats and granularities mixed."""
    values = {
        "kvpass_scales": 1,
        "model_type": "llama",
        "layers": {
            "0": {
                "key": {"format": "fp8_e4m3", "scale": 0.1},
                "value": {"format": "nvfp4", "scale": [0.001, 0.0003], "centre": [[0.5, -1.0], [0.25, 0.0]]},
            },
            "1": {"key": {"format": "fp8_e5m2", "scale": 3e-05}, "value": {"format": "fp4_mx_block16"}},
        },
    }
    return values | changes


def sglang(factors, dtype="float8_e4m3fn", **changes):
    by_rank = {str(rank): {str(i): f for i, f in enumerate(layers)} for rank, layers in enumerate(factors)}
    return {"model_type": "llama", "kv_cache": {"dtype": dtype, "scaling_factor": by_rank}} | changes


def write(path, values):
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


class TestOwnSchema:
    def test_round_trip_bit_for_bit(self, tmp_path):
        torch.manual_seed(0)
        found = {i: (torch.rand(()) * 1e-3, torch.rand(3) * 10) for i in range(4)}
        scales = KVScales.of(found)
        scales.to_json(tmp_path / "kv.json")
        again = KVScales.from_json(tmp_path / "kv.json")
        assert again == scales and hash(again) == hash(scales)
        for index, (key, value) in found.items():
            assert torch.equal(again[index].key.tensor(get_format("fp8_e4m3")), key.reshape(1))
            assert torch.equal(again[index].value.tensor(get_format("fp8_e4m3")), value)

    def test_everything_it_can_hold(self, tmp_path):
        scales = KVScales.from_json(write(tmp_path / "kv.json", own(calibration={"method": "amax", "tokens": 4})))
        assert scales.model_type == "llama" and dict(scales.notes) == {"method": "amax", "tokens": 4}
        assert scales[0].key == Scale((0.1,), "fp8_e4m3")
        assert scales[0].value == Scale((0.001, 0.0003), "nvfp4", ((0.5, -1.0), (0.25, 0.0)))
        assert scales[1].value == Scale((), "fp4_mx_block16")
        assert KVScales.from_dict(scales.to_dict()) == scales

    def test_the_published_schema_describes_it(self):
        schema = KVScales.json_schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(own(), schema)
        jsonschema.validate(KVScales.from_dict(own()).to_dict(), schema)
        jsonschema.validate(KVScales.of({0: (1.0, [0.1, 0.2])}).shard(1, 2).to_dict(), schema)
        for wrong in ({"kvpass_scales": 2}, {"layers": {}}, {"layers": {"0": {"key": {"format": "nvfp4"}}}}):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(own(**wrong), schema)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda v: v.update(kvpass_scales=2), "version 2 of the schema; this kvpass reads 1"),
            (lambda v: v.update(layer=v.pop("layers")), "unknown key 'layer'.* Did you mean 'layers'"),
            (lambda v: v["layers"].update({"-1": v["layers"]["0"]}), "layer -1: '-1' is no index"),
            (lambda v: v["layers"].update({"00": v["layers"]["0"]}), "layer 00: '00' is no index"),
            (lambda v: v["layers"]["1"].pop("value"), "layer 1, value: expected a mapping, got None"),
            (lambda v: v["layers"]["1"]["key"].update(sclae=1.0), "layer 1, key: unknown key 'sclae'.*mean 'scale'"),
            (lambda v: v["layers"]["0"]["key"].update(scale=0.0), "layer 0, key: scale is 0.0; it must be positive"),
            (lambda v: v["layers"]["0"]["key"].update(scale=-1.0), "layer 0, key: scale is -1.0"),
            (lambda v: v["layers"]["0"]["key"].update(scale=1e-31), "layer 0, key: scale is 1e-31"),
            (lambda v: v["layers"]["0"]["key"].update(scale=1e31), "scale is 1e.31; it must be positive, from 2"),
            (lambda v: v["layers"]["0"]["key"].update(scale=float("nan")), "layer 0, key: scale is nan"),
            (lambda v: v["layers"]["0"]["key"].update(scale=float("inf")), "layer 0, key: scale is inf"),
            (lambda v: v["layers"]["0"]["key"].update(scale="1.0"), "layer 0, key: scale is '1.0'; .* must be numbers"),
            (lambda v: v["layers"]["0"]["key"].update(scale=True), "layer 0, key: scale is True; .* must be numbers"),
            (lambda v: v["layers"]["0"]["key"].pop("scale"), "layer 0, key: format 'fp8_e4m3' needs a scale"),
            (lambda v: v["layers"]["1"]["value"].update(scale=1.0), "layer 1, value: .* has no tensor scale"),
            (lambda v: v["layers"]["0"]["key"].update(format="fp8"), "layer 0, key: unknown KV format 'fp8'"),
            (lambda v: v["layers"]["0"]["key"].update(centre=[[1.0], [1.0, 2.0]]), "layer 0, key: centre must be"),
            (lambda v: v["layers"]["0"]["key"].update(centre=0.5), "layer 0, key: centre must be a list"),
        ],
    )
    def test_what_is_refused_names_file_and_layer(self, tmp_path, change, message):
        values = copy.deepcopy(own())
        change(values)
        path = write(tmp_path / "kv.json", values)
        with pytest.raises(ValueError, match=message) as caught:
            KVScales.from_json(path)
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "is not valid JSON"),
            ("[]", "holds no KV scales: expected a mapping with 'kvpass_scales'"),
            ('{"scales": {}}', "holds no KV scales"),
            ('{"kvpass_scales": 1, "layers": {"0": {}, "0": {}}}', "key '0' occurs twice"),
            ('{"kvpass_scales": 1, "layers": {}}', "no layer has scales"),
        ],
    )
    def test_files_that_are_something_else(self, tmp_path, text, message):
        with pytest.raises(ValueError, match=message):
            KVScales.from_json(write(tmp_path / "kv.json", text))

    def test_a_file_appears_whole_or_not_at_all(self, tmp_path):
        path = tmp_path / "kv.json"
        KVScales.of({0: (1.0, 1.0)}).to_json(path)
        before = path.read_text()
        with pytest.raises(ValueError, match="holds one scale per layer"):
            KVScales.of({0: (1.0, 2.0)}).to_json(path, schema="sglang")
        assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


class TestSGLangSchema:
    def test_each_rank_gets_its_own(self, tmp_path):
        path = write(tmp_path / "kv.json", sglang([[0.1, 0.2, 0.3], [1.1, 1.2, 1.3]]))
        for rank, expected in enumerate(([0.1, 0.2, 0.3], [1.1, 1.2, 1.3])):
            scales = KVScales.from_json(path, tp_rank=rank, tp_size=2)
            assert [layer.key.scale[0] for layer in scales.layers] == expected
            assert all(layer.key == layer.value for layer in scales.layers) and scales.tp_size == 2

    def test_dtypes(self):
        e5m2 = KVScales.from_dict(sglang([[0.5]], dtype="float8_e5m2"))
        assert e5m2[0].key == Scale((0.5,), "fp8_e5m2")
        fnuz = KVScales.from_dict(sglang([[0.5]], dtype="float8_e4m3fnuz"))
        assert fnuz[0].value == Scale((1.0,), "fp8_e4m3")

    def test_written_and_read_again(self, tmp_path):
        scales = KVScales.of({0: (0.1, [0.3, 0.2]), 1: (0.5, 0.25)})
        scales.shared().to_json(tmp_path / "kv.json", schema="sglang", tp_size=2)
        values = json.loads((tmp_path / "kv.json").read_text())
        assert values["kv_cache"] == {
            "dtype": "float8_e4m3fn",
            "scaling_factor": {"0": {"0": 0.3, "1": 0.5}, "1": {"0": 0.3, "1": 0.5}},
        }
        assert KVScales.from_json(tmp_path / "kv.json", tp_size=2).layers == scales.shared().layers

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (sglang([[1.0]], dtype="int8"), "unknown dtype 'int8'; known: float8_e4m3fn"),
            (sglang([[1.0, float("nan")]]), "layer 1 of rank 0: scale is nan"),
            (sglang([[1.0, 0.0]]), "layer 1 of rank 0: scale is 0.0"),
            (sglang([[1.0, None]]), "layer 1 of rank 0: scale is None; it must be a number"),
            (sglang([[1.0]], kvcache={}), "unknown key 'kvcache'.*Did you mean 'kv_cache'"),
            ({"kv_cache": {"dtype": "float8_e4m3fn"}}, "'scaling_factor': expected a mapping, got None"),
            ({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"1": {"0": 1.0}}}}, r"for ranks \[1\]"),
        ],
    )
    def test_what_is_refused(self, tmp_path, values, message):
        path = write(tmp_path / "kv.json", values)
        with pytest.raises(ValueError, match=message) as caught:
            KVScales.from_json(path)
        assert str(path) in str(caught.value)

    def test_of_all_ranks_until_one_is_taken(self):
        values = sglang([[0.1, 0.2], [1.1, 1.2]])
        every = KVScales.from_dict(values, "kv.json")
        assert [every.shard(rank, 2) for rank in range(2)] == [
            KVScales.from_dict(values, tp_rank=rank, tp_size=2) for rank in range(2)
        ]
        assert KVScales.from_dict(every.to_dict()) == every
        with pytest.raises(ValueError, match="scales for 2 tensor-parallel ranks, and the model runs on 1; .*shard"):
            every.check([0, 1])
        with pytest.raises(ValueError, match="scales for 2 tensor-parallel ranks, and the model runs on 4"):
            KVScales.from_dict(values, tp_size=4)

    def test_all_ranks_are_not_taken_for_the_first(self, tmp_path):
        values = {"0": {"0": 1.0, "1": 1.0}, "1": {"0": 2.0, "1": 2.0}}
        scales = KVScales.from_dict({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": values}}, "kv.json")
        with pytest.raises(ValueError, match="kv.json has scales for 2 ranks"):
            scales.shared()
        for options in ({}, {"schema": "sglang", "tp_size": 4}):
            with pytest.raises(ValueError, match="for 2 ranks: write them with schema='sglang', tp_size=2"):
                scales.to_json(tmp_path / "out.json", **options)
        scales.to_json(tmp_path / "out.json", schema="sglang", tp_size=2)
        assert KVScales.from_json(tmp_path / "out.json") == scales
        assert "of the first of 2 ranks" in str(scales)

    def test_ranks_with_different_layers(self):
        values = sglang([[1.0, 1.0], [1.0]])
        with pytest.raises(ValueError, match="the ranks do not have scales for the same layers"):
            KVScales.from_dict(values, tp_size=2)


class TestFitsTheModel:
    @pytest.mark.parametrize(
        ("layers", "heads", "types", "message"),
        [
            (range(3), 2, {"llama"}, "kv.json has scales for layers 0-1, none for 2 of the model"),
            (range(1), 2, {"llama"}, "kv.json has scales for layers 1, and the model's layers are 0"),
            (range(2), 3, {"llama"}, "layer 0 has 2 scales for its value, and the model has 3 KV heads"),
            (range(2), 2, {"qwen3"}, "scales for a llama model; this is a qwen3"),
        ],
    )
    def test_what_is_refused(self, layers, heads, types, message):
        scales = KVScales.from_dict(own(), "kv.json")
        scales.check(range(2), 2, {"llama", "llava"})
        with pytest.raises(ValueError, match=message):
            scales.check(layers, heads, types)

    def test_a_layer_without_scales(self):
        with pytest.raises(ValueError, match="has no scales for layer 7; it has 0-1"):
            KVScales.from_dict(own())[7]


class TestShard:
    def test_heads_are_dealt_out(self):
        scales = KVScales.of({0: (0.5, [1.0, 2.0, 3.0, 4.0])})
        parts = [scales.shard(rank, 2) for rank in range(2)]
        assert [p[0].value.scale for p in parts] == [(1.0, 2.0), (3.0, 4.0)]
        assert all(p[0].key.scale == (0.5,) for p in parts)
        parts[1].check([0], kv_heads=4)
        assert KVScales.from_dict(parts[1].to_dict()) == parts[1]

    def test_more_ranks_than_heads(self):
        scales = KVScales.of({0: ([1.0, 2.0], 1.0)})
        assert [scales.shard(rank, 4)[0].key.scale for rank in range(4)] == [(1.0,), (1.0,), (2.0,), (2.0,)]

    def test_own_file_by_rank(self, tmp_path):
        scales = KVScales.of({0: ([1.0, 2.0], 1.0)})
        scales.to_json(tmp_path / "kv.json")
        assert KVScales.from_json(tmp_path / "kv.json", tp_rank=1, tp_size=2) == scales.shard(1, 2)

    @pytest.mark.parametrize(
        ("rank", "size", "message"), [(2, 2, "ranks count from 0"), (0, 2, "3 heads, which 2 ranks cannot share")]
    )
    def test_what_is_refused(self, rank, size, message):
        with pytest.raises(ValueError, match=message):
            KVScales.of({0: ([1.0, 2.0, 3.0], 1.0)}).shard(rank, size)


class TestFormats:
    @pytest.mark.parametrize(
        ("made_for", "used_in", "factor"),
        [
            ("fp8_e4m3", "fp8_e4m3", 1.0),
            ("fp8_e4m3", "nvfp4", 448 / 2688),
            ("nvfp4", "fp8_e4m3", 6.0),
            ("fp8_e5m2", "fp8_e4m3", 128.0),
        ],
    )
    def test_another_format_gets_the_scale_by_the_ratio_of_ranges(self, made_for, used_in, factor):
        scale = Scale((0.75,), made_for).tensor(get_format(used_in))
        torch.testing.assert_close(scale, torch.tensor([0.75 * factor]))

    @pytest.mark.parametrize("name", ["bf16", "fp4_mx_block16"])
    def test_formats_without_a_tensor_scale(self, name):
        assert Scale((0.75,), "fp8_e4m3").tensor(get_format(name)) is None
        with pytest.raises(ValueError, match=f"scales made for {name!r} hold none for 'nvfp4'"):
            Scale((), name).tensor(get_format("nvfp4"))

    def test_a_scale_around_a_centre_is_widened_so_that_nothing_saturates(self):
        scale = Scale((1.0, 2.0), "fp8_e4m3", ((448.0, -896.0), (0.0, 1.0)))
        widened = scale.tensor(get_format("fp8_e4m3"))
        torch.testing.assert_close(widened, torch.tensor([1.0 + 2.0, 2.0 + 1 / 448]))


def test_printed():
    text = str(KVScales(tuple(LayerScales(i, Scale((0.1 + i,)), Scale((2.0,))) for i in range(3)), source="kv.json"))
    assert text == "3 layers, per tensor, from kv.json: K 0.1 (layer 0) to 2.1 (layer 2), V 2 (layer 0) to 2 (layer 2)"
