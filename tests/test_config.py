"""Configuration from names, dictionaries and files."""

import copy
import json

import pytest

from kvpass.config import PRESETS, KVQuantConfig
from kvpass.scale_files import Scale
from kvpass.scales import KVScales, LayerScales


def test_a_name_a_dictionary_and_a_config_are_the_same():
    config = KVQuantConfig(format="nvfp4")
    assert KVQuantConfig.of("nvfp4") == KVQuantConfig.of({"format": "nvfp4"}) == KVQuantConfig.of(config) == config
    assert (config.key.name, config.value.name) == ("nvfp4", "nvfp4")


def test_formats_apart():
    config = KVQuantConfig(key_format="fp8_e4m3", value_format="nvfp4")
    assert (config.key.name, config.value.name) == ("fp8_e4m3", "nvfp4")


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_file_round_trip(tmp_path, suffix):
    config = KVQuantConfig(format="nvfp4", key_format="fp8_e5m2", strict=True)
    path = tmp_path / f"kv.{suffix}"
    path.write_text(json.dumps(config.to_dict()))  # JSON is YAML
    assert KVQuantConfig.from_file(path) == config
    assert set(config.to_dict()) == {"format", "key_format", "strict"}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("nvfp5", ValueError, "unknown KV format 'nvfp5'; known: bf16"),
        ("Compact", ValueError, r"known: bf16, .* balanced, compact. Did you mean 'compact'\?"),
        ({"format": "nvfp4", "key_fromat": "bf16"}, ValueError, r"'key_fromat'; known: .*Did you mean 'key_format'\?"),
        ({"value_format": "fp3"}, ValueError, "unknown KV format 'fp3'"),
        ({"format": None}, ValueError, "unknown KV format None"),
        ("kv.json", ValueError, r"'kv.json' is a file; read it with kvpass.KVQuantConfig.from_file"),
        ({"strict": "yes"}, ValueError, "strict is 'yes'; allowed: True, False"),
        (7, TypeError, "expected a format's name, a dictionary or a KVQuantConfig, got int"),
    ],
)
def test_bad_input(given, error, message):
    with pytest.raises(error, match=message):
        KVQuantConfig.of(given)


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON"), ("[1]", "holds a list; expected a mapping")])
def test_bad_file(tmp_path, text, message):
    path = tmp_path / "kv.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        KVQuantConfig.from_file(path)


FULL = ["full_attention"] * 6
MIXED = ["sliding_attention", "full_attention"] * 3


def formats(config, types=FULL):
    """Names of the formats of K, or of K and V where they differ, layer by layer."""
    layers = [config.layer(index, types) for index in range(len(types))]
    return [x.key.name if x.key == x.value else (x.key.name, x.value.name) for x in layers]


class TestLayers:
    @pytest.mark.parametrize(
        ("selector", "types", "selected"),
        [
            (0, FULL, [0]),
            (-1, FULL, [5]),
            ("2", FULL, [2]),
            ("1:3", FULL, [1, 2]),
            ("-2:", FULL, [4, 5]),
            (":-4", FULL, [0, 1]),
            ("::2", FULL, [0, 2, 4]),
            ("*.layers.3.*", FULL, [3]),
            ("model.layers.[45].self_attn", FULL, [4, 5]),
            ("sliding_*", MIXED, [0, 2, 4]),
            ("full_attention", MIXED, [1, 3, 5]),
        ],
    )
    def test_selectors(self, selector, types, selected):
        config = KVQuantConfig("nvfp4", layers={selector: "fp8_e4m3"})
        expected = ["fp8_e4m3" if i in selected else "nvfp4" for i in range(6)]
        assert formats(config, types) == expected
        resolved = config.resolved(types)
        assert formats(resolved, types) == expected
        assert {entry.selector for entry in resolved.layers} == {str(i) for i in selected}
        skipped = KVQuantConfig("nvfp4", skip_layers=[selector])
        assert formats(skipped, types) == ["bf16" if i in selected else "nvfp4" for i in range(6)]

    def test_key_and_value_apart_later_entries_and_skipped_ones_win(self):
        layers = {"0:4": "fp8_e5m2", "2:": {"key_format": "bf16"}, 3: {"format": "fp8_e4m3", "value_format": "nvfp4"}}
        config = KVQuantConfig("nvfp4", value_format="fp8_e4m3", layers=layers, skip_layers=5)
        mixed = [("bf16", "fp8_e5m2"), ("fp8_e4m3", "nvfp4"), ("bf16", "fp8_e4m3"), "bf16"]
        assert formats(config) == ["fp8_e5m2", "fp8_e5m2", *mixed]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"layers": {"4-7": "bf16"}}, r"layer '4-7' is no index .* no range \('4:8' is 4 to 7\)"),
            ({"layers": {"first": "bf16"}}, "layer 'first' is no index"),
            ({"skip_layers": [True]}, "layer True is no index"),
            ({"layers": {0: "fp3"}}, "unknown KV format 'fp3'"),
            ({"layers": {0: {"key": "bf16"}}}, "unknown configuration key 'key'; known: format, key_format"),
            ({"skip_layer": [0]}, "unknown configuration key 'skip_layer'.* Did you mean 'skip_layers'"),
            ({"scales": 7}, "scales are a int; give a KVScales, the path of a JSON file"),
            ({"scales": {"kvpass_scales": 1, "layers": {"0": {"key": {}}}}}, "scales: layer 0, key: format is None"),
        ],
    )
    def test_what_is_refused(self, fields, message):
        with pytest.raises(ValueError, match=message):
            KVQuantConfig.from_dict(fields)

    @pytest.mark.parametrize("selector", [6, -7, "6:", "*.layers.17.*", "sliding_*"])
    def test_a_selector_without_a_layer(self, selector):
        with pytest.raises(ValueError, match="is none of the model's 6, 0 to 5") as caught:
            KVQuantConfig(layers={selector: "bf16"}).resolved(FULL)
        assert f"layer '{selector}'" in str(caught.value)

    def test_without_the_model_only_what_counts_from_the_start(self):
        config = KVQuantConfig(layers={2: "nvfp4", "4:6": "bf16"})
        found = [config.layer(i).key.name for i in range(6)]
        assert found == ["fp8_e4m3", "fp8_e4m3", "nvfp4", "fp8_e4m3", "bf16", "bf16"]
        for selector in (-1, "-2:", "*.layers.2.*"):
            with pytest.raises(ValueError, match="can only be found where the model is known"):
                KVQuantConfig(layers={selector: "nvfp4"}).layer(0)


SCALES = KVScales.of({0: (0.5, [1.0, 2.0]), 1: (0.25, 3.0)})


@pytest.mark.parametrize(
    "config",
    [
        KVQuantConfig(),
        KVQuantConfig("nvfp4", "fp8_e4m3", strict=True),
        KVQuantConfig("nvfp4", layers={-1: "bf16", "0:2": {"key_format": "fp8_e5m2"}}, skip_layers=("::3", 1)),
        KVQuantConfig(scales=SCALES, skip_layers=[0]),
    ],
)
def test_round_trips(tmp_path, config):
    """Through plain data, JSON, YAML, a copy, and what it prints."""
    assert KVQuantConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for name in ("kv.json", "kv.yaml", "kv.yml"):
        config.to_file(tmp_path / name)
        assert KVQuantConfig.from_file(tmp_path / name) == config
    again = copy.deepcopy(config)
    assert again == config and hash(again) == hash(config) and {config: 1}[again] == 1
    if config.scales is None:
        assert eval(repr(config)) == config


def test_printed():
    assert str(KVQuantConfig()) == "KVQuantConfig(format='fp8_e4m3')"
    text = str(KVQuantConfig("nvfp4", skip_layers=[0], scales=SCALES))
    assert text.startswith("KVQuantConfig(format='nvfp4', skip_layers=['0'], scales=<KVScales of 2 layers, per ")


class TestScales:
    def test_by_layer_converted_to_the_layers_format(self):
        config = KVQuantConfig(value_format="nvfp4", layers={1: "bf16"}, scales=SCALES)
        first, second = config.layer(0), config.layer(1)
        assert first.key_scale.tolist() == [0.5]
        assert first.value_scale.tolist() == pytest.approx([1 / 6, 2 / 6])
        assert second.key_scale is None and second.value_scale is None
        with pytest.raises(ValueError, match="has no scales for layer 2; it has 0-1"):
            config.layer(2)

    def test_from_a_path_beside_the_configuration(self, tmp_path):
        SCALES.to_json(tmp_path / "scales.json")
        (tmp_path / "kv.yaml").write_text("format: nvfp4\nscales: scales.json\n")
        assert KVQuantConfig.from_file(tmp_path / "kv.yaml") == KVQuantConfig("nvfp4", scales=SCALES)
        assert KVQuantConfig(scales=str(tmp_path / "scales.json")).scales == SCALES

    def test_a_file_of_scales_is_a_configuration(self, tmp_path):
        sides = {"key": {"format": "fp8_e4m3", "scale": 1.0}, "value": {"format": "nvfp4", "scale": 1.0}}
        plain = {side: {"format": "bf16"} for side in ("key", "value")}
        values = {"kvpass_scales": 1, "layers": {"0": sides, "1": plain, "2": sides}}
        (tmp_path / "kv.json").write_text(json.dumps(values))
        config = KVQuantConfig.from_file(tmp_path / "kv.json")
        assert (config.key.name, config.value.name) == ("fp8_e4m3", "nvfp4")
        assert formats(config, FULL[:3]) == [("fp8_e4m3", "nvfp4"), "bf16", ("fp8_e4m3", "nvfp4")]

    def test_a_mistake_in_the_file_names_it(self, tmp_path):
        (tmp_path / "kv.yaml").write_text("fromat: nvfp4\n")
        with pytest.raises(ValueError, match="kv.yaml: unknown configuration key 'fromat'.*Did you mean 'format'"):
            KVQuantConfig.from_file(tmp_path / "kv.yaml")


class TestPresets:
    @pytest.mark.parametrize("name", sorted(PRESETS))
    def test_wherever_a_configuration_is_taken(self, name):
        config = KVQuantConfig.preset(name)
        assert KVQuantConfig.of(name) == KVQuantConfig.from_dict({"format": name}) == config
        assert KVQuantConfig.from_dict(config.to_dict()) == config
        for field, value in PRESETS[name].items():
            assert f"{field}={value!r}" in repr(config)

    def test_fields_beside_it_win(self):
        config = KVQuantConfig.from_dict({"format": "compact", "keep_first": 8, "strict": True})
        assert config == KVQuantConfig.preset("compact", keep_first=8, strict=True)
        assert (config.keep_first, config.value.name) == (8, "nvfp4+4over6")

    def test_unknown(self):
        with pytest.raises(ValueError, match="unknown preset 'compct'; known: fast, .*Did you mean 'compact'"):
            KVQuantConfig.preset("compct")
        with pytest.raises(ValueError, match=r"'fast' is no format but a preset: write KVQuantConfig.preset\('fast'\)"):
            KVQuantConfig("fast")


class TestDerivedFormats:
    def test_wherever_a_formats_name_is_taken(self):
        config = KVQuantConfig("nvfp4+rotated+centred", layers={2: "fp8_e4m3+centred"}, skip_layers=[0])
        assert config.layer(1).key.name == "nvfp4+centred+rotated"
        assert config.layer(2).value.name == "fp8_e4m3+centred" and config.layer(0).key.name == "bf16"
        assert KVQuantConfig.from_dict(config.to_dict()) == config
        with pytest.raises(ValueError, match="suffix of format 'nvfp4'"):
            KVQuantConfig(layers={2: "nvfp4+turned"})

    @pytest.mark.parametrize("name", ["keep_first", "keep_last"])
    @pytest.mark.parametrize("count", [-1, 65, 1.5, True])
    def test_kept_tokens_out_of_range(self, name, count):
        with pytest.raises(ValueError, match=f"{name} is {count}; it must be a whole number from 0 to 64"):
            KVQuantConfig(**{name: count})

    def test_what_a_prompt_gives(self):
        assert KVQuantConfig().learns == KVQuantConfig("mxfp4").learns == KVQuantConfig(skip_layers=[0]).learns == ()
        assert KVQuantConfig.preset("fast").learns == ("centre of K",)
        assert KVQuantConfig.preset("balanced").learns == ("centre of K", "tensor scale of V")
        assert KVQuantConfig(layers={0: {"value_format": "nvfp4+sweep"}}).learns == ("tensor scale of V",)
        scales = KVScales.of({0: (1.0, 1.0)})
        assert KVQuantConfig("nvfp4", scales=scales).learns == ()
        assert KVQuantConfig("nvfp4+centred", scales=scales).learns == ("centre of K", "centre of V")

    def test_centres_of_scales(self):
        scale = Scale((0.5,), "fp8_e4m3", ((1.0, 2.0), (3.0, 4.0)))
        scales = KVScales((LayerScales(0, scale, Scale((0.25,))),))
        config = KVQuantConfig.from_scales(scales, keep_first=4, keep_last=8)
        assert (config.key.name, config.value.name) == ("fp8_e4m3+centred", "fp8_e4m3")
        layer = config.layer(0)
        assert layer.key_centre.tolist() == [[1.0, 2.0], [3.0, 4.0]] and layer.value_centre is None
        assert layer.key_scale.tolist() == [0.5] and (layer.keep_first, layer.keep_last) == (4, 8)
        with pytest.raises(ValueError, match=r"layer 0: scales made for 'fp8_e4m3\+centred' do not fit"):
            KVQuantConfig("nvfp4+rotated", scales=scales).layer(0)
