"""Scales in checkpoints: the layouts that quantization tools publish, made here, and copies with scales in them."""

import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvpass.checkpoint import Checkpoint, declaration
from kvpass.config import KVQuantConfig
from kvpass.scales import KVScales, Scale

LAYERS, HEADS, DIM = 4, 2, 16
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
QUARK_OUTPUT = {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}}
QUARK = {"quant_method": "quark", "layer_quant_config": {"*k_proj": QUARK_OUTPUT, "*v_proj": QUARK_OUTPUT}}


def modelopt(algorithm="FP8"):
    return {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": algorithm, "exclude_modules": ["lm_head"]},
    }


def number(layer, side):
    """A scale that no other layer or side has."""
    return 0.01 * (layer + 1) + (1.0 if side == "v" else 0.0)


def named(pattern, layers=range(LAYERS), make=torch.tensor):
    """A tensor for K and V of each layer under ``pattern``, which says where ``{layer}`` and ``{s}`` go."""
    return {pattern.format(layer=i, s=s): make(number(i, s)) for i in layers for s in "kv"}


MODELOPT = "model.layers.{layer}.self_attn.{s}_proj.{s}_scale"
PLAIN = "model.layers.{layer}.self_attn.{s}_scale"


def write(folder, tensors, shards=1, config=CONFIG, quantization=None, modelopt=None, attention="model.layers.{}"):
    """A checkpoint with attention weights, ``tensors`` spread over ``shards`` files, and quantization configs."""
    folder.mkdir(exist_ok=True)
    weights = {}
    for i in range(LAYERS):
        prefix = attention.format(i)
        weights |= {f"{prefix}.self_attn.{s}_proj.weight": torch.randn(HEADS * DIM, 8) for s in "kv"}
        weights |= {f"{prefix}.self_attn.{s}_proj.bias": torch.randn(HEADS * DIM) for s in "kv"}
        weights |= {f"{prefix}.self_attn.k_proj.weight_scale": torch.tensor(9.0)}
        weights |= {f"{prefix}.post_attention_layernorm.weight": torch.randn(8)}
    everything = sorted((weights | tensors).items())
    if shards == 1:
        save_file(dict(everything), folder / "model.safetensors", {"format": "pt"})
    else:
        weight_map = {}
        for n in range(shards):
            file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
            save_file(dict(everything[n::shards]), folder / file, {"format": "pt"})
            weight_map |= {name: file for name, _ in everything[n::shards]}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = config | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    if modelopt:
        (folder / "hf_quant_config.json").write_text(json.dumps(modelopt))
    return folder


def check(scales, format="fp8_e4m3", factor=1.0):
    """Every layer has its own number, bit for bit as float32."""
    assert scales.indexes == list(range(LAYERS))
    for layer in scales.layers:
        for side, scale in (("k", layer.key), ("v", layer.value)):
            value = torch.tensor(number(layer.index, side), dtype=torch.float32).item() * factor
            assert scale == Scale((value,), format), (layer.index, side)


class TestTheRightNumberInTheRightLayer:
    @pytest.mark.parametrize("shards", [1, 3])
    @pytest.mark.parametrize(
        "pattern",
        [MODELOPT, PLAIN, "model.layers.{layer}.self_attn.attn.{s}_scale",
         "model.layers.{layer}.self_attn.{s}_proj.output_scale", "model.layers.{layer}.self_attn.qkv_proj.{s}_scale",
         "transformer.h.{layer}.attn.{s}_scale"],
    )  # fmt: skip
    def test_names_and_shards(self, tmp_path, pattern, shards):
        check(KVScales.from_checkpoint(write(tmp_path / "m", named(pattern), shards)))

    @pytest.mark.parametrize(
        "prefix", ["model.language_model.layers.", "language_model.model.layers.", "model.text_model.layers."]
    )
    def test_nested_in_a_multimodal_model(self, tmp_path, prefix):
        """The vision tower has layers, and scales, of its own, and more of them."""
        tensors = named(MODELOPT.replace("model.layers.", prefix))
        tower = "model.vision_tower.encoder.layers.{layer}.self_attn.{s}_proj.{s}_scale"
        tensors |= named(tower, range(9), make=lambda x: torch.tensor(100 * x))
        config = {"model_type": "llava", "text_config": CONFIG, "vision_config": {"num_hidden_layers": 9}}
        folder = write(tmp_path / "m", tensors, 2, config, modelopt=modelopt(), attention=prefix + "{}")
        scales = KVScales.from_checkpoint(folder)
        check(scales)
        assert scales.model_type == "llama"

    def test_tied(self, tmp_path):
        """Tensors that share storage are saved once; the file's metadata tells under which name."""
        folder = write(tmp_path / "m", named(PLAIN))
        extra = {"lm_head.weight": "model.embed_tokens.weight", "format": "pt"}
        tied = {PLAIN.format(layer=2, s="v"): PLAIN.format(layer=2, s="k")}
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if name not in tied}
        save_file(tensors, folder / "model.safetensors", extra | tied)
        scales = KVScales.from_checkpoint(folder)
        assert scales[2].value == scales[2].key and scales[1].value != scales[1].key

    def test_kv_scale_is_for_both(self, tmp_path):
        names = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor([number(i, "k")]) for i in range(LAYERS)}
        scales = KVScales.from_checkpoint(write(tmp_path / "m", names))
        assert [layer.key.scale for layer in scales.layers] == [layer.value.scale for layer in scales.layers]
        assert scales[3].key.scale == (torch.tensor(number(3, "k")).item(),)

    def test_separate_scales_win_over_kv_scale(self, tmp_path):
        names = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor(7.0) for i in range(LAYERS)}
        check(KVScales.from_checkpoint(write(tmp_path / "m", named(PLAIN) | names)))

    @pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1, 1), (1, HEADS, 1, 1)])
    def test_one_per_head(self, tmp_path, shape):
        names = named(PLAIN, make=lambda x: torch.arange(1.0, 1 + HEADS).mul(x).reshape(shape))
        quantization = COMPRESSED | {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}
        scales = KVScales.from_checkpoint(write(tmp_path / "m", names, quantization=quantization))
        for layer in scales.layers:
            expected = torch.arange(1.0, 1 + HEADS) * number(layer.index, "v")
            assert torch.equal(torch.tensor(layer.value.scale), expected)
        part = KVScales.from_checkpoint(tmp_path / "m", tp_rank=1, tp_size=2)
        assert part[0].value.scale == scales[0].value.scale[1:]

    def test_affine(self, tmp_path):
        bias = {
            f"model.layers.{i}.self_attn.{s}_proj.{s}_bias": torch.full((1, HEADS, 1, DIM), number(i, s))
            for i in range(LAYERS)
            for s in "kv"
        }
        folder = write(tmp_path / "m", named(MODELOPT) | bias, modelopt=modelopt("NVFP4_AFFINE"))
        scales = KVScales.from_checkpoint(folder)
        for layer in scales.layers:
            assert layer.key.format == "nvfp4+centred"
            value = torch.tensor(number(layer.index, "k")).item()
            assert layer.key.scale == (value,) and layer.key.centre == ((value,) * DIM,) * HEADS

    def test_layers_of_multi_token_prediction_are_left_out(self, tmp_path):
        names = named(PLAIN, range(LAYERS + 1))
        with pytest.raises(ValueError, match="layer 4 has a scale"):
            KVScales.from_checkpoint(write(tmp_path / "m", names))
        config = CONFIG | {"num_nextn_predict_layers": 1}
        check(KVScales.from_checkpoint(write(tmp_path / "n", names, config=config)))

    def test_only_layers_that_attend(self, tmp_path):
        types = ["linear_attention", "full_attention", "linear_attention", "sliding_attention"]
        folder = write(tmp_path / "m", named(PLAIN, (1, 3)), config=CONFIG | {"layer_types": types})
        assert KVScales.from_checkpoint(folder).indexes == [1, 3]

    @pytest.mark.parametrize(
        "changes",
        [
            {"quantization": COMPRESSED | {"kv_cache_scheme": SCHEME | {"dtype": "float8_e4m3fnuz"}}},
            {"quantization": json.loads(json.dumps(QUARK).replace("fp8_e4m3", "fp8_e4m3fnuz"))},
            {"modelopt": modelopt() | {"fp8_variant": "e4m3fnuz"}},
        ],
    )
    def test_fnuz_scales_are_doubled(self, tmp_path, changes):
        check(KVScales.from_checkpoint(write(tmp_path / "m", named(PLAIN), **changes)), factor=2.0)


class TestWhatIsRefused:
    def refuse(self, folder, message):
        with pytest.raises(ValueError, match=message) as caught:
            KVScales.from_checkpoint(folder)
        assert str(folder) in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ((PLAIN, 2, "v", None), "layer 2 has a k_scale in .*, and no positive v_scale"),
            ((PLAIN, 1, "k", 0.0), "layer 1 has a v_scale in .*, and no positive k_scale"),
            ((PLAIN, 1, "k", torch.nan), "layer 1: .*k_scale in .* holds nan"),
            ((PLAIN, 1, "k", torch.inf), "layer 1: .*k_scale in .* holds inf"),
            (
                (PLAIN, 1, "k", [1.0] * 3),
                r"layer 1: .* shape \[3\]; expected one number, or one for each of 2 KV heads",
            ),
            ((PLAIN, 1, "k", [1.0, 0.0]), "layer 1 has scales for some of its heads only"),
            ((PLAIN, 9, "k", 1.0), "layer 9 has a scale .* the config's layers with a KV cache are 0 to 3, 4 of them"),
            ((MODELOPT, 1, "k", 5.0), "layer 1 has two k_scales"),
            ((MODELOPT[:-5] + "bias", 1, "k", [1.0] * 3), r"layer 1: .* shape \[3\]; expected 2 heads of 16 values"),
        ],
    )
    def test_it_names_layer_and_file(self, tmp_path, change, message):
        pattern, layer, side, value = change
        tensors = named(PLAIN) | {pattern.format(layer=layer, s=side): torch.tensor(0.0 if value is None else value)}
        if value is None:
            del tensors[pattern.format(layer=layer, s=side)]
        self.refuse(write(tmp_path / "m", tensors, 2), message)

    def test_nothing_at_all(self, tmp_path):
        self.refuse(write(tmp_path / "m", {}), "holds no KV scales and says nothing of a quantized KV cache")

    def test_two_towers_that_cannot_be_told_apart(self, tmp_path):
        tensors = named("a.layers.{layer}.attn.{s}_scale") | named("b.layers.{layer}.attn.{s}_scale")
        self.refuse(write(tmp_path / "m", tensors), "cannot tell whose KV scales are the language model's")

    def test_files_that_do_not_hold_what_the_index_says(self, tmp_path):
        folder = write(tmp_path / "m", named(PLAIN), 2)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"]["model.layers.0.self_attn.q_scale"] = "model-00001-of-00002.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        self.refuse(folder, "lists model.layers.0.self_attn.q_scale in .*, which does not hold it")
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"{}")
        self.refuse(folder, "model-00001-of-00002.safetensors is missing or broken")
        (folder / "model-00001-of-00002.safetensors").unlink()
        self.refuse(folder, "model-00001-of-00002.safetensors is missing or broken")

    @pytest.mark.parametrize("source", ["nobody/no-such-model", "no such folder", ""])
    def test_no_checkpoint(self, source):
        with pytest.raises(FileNotFoundError):
            KVScales.from_checkpoint(source)

    def test_a_folder_without_config(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="has no config.json"):
            KVScales.from_checkpoint(tmp_path)


class TestMissingScales:
    @pytest.mark.parametrize("value", [None, 0.0, -1.0])
    def test_both_missing_or_not_positive_gives_one_with_a_single_warning(self, tmp_path, value):
        given = {} if value is None else named(PLAIN, (0, 1, 3), make=lambda _: torch.tensor(value))
        folder = write(tmp_path / "m", named(PLAIN, (2,)) | given, quantization=COMPRESSED)
        with pytest.warns(UserWarning) as caught:
            scales = KVScales.from_checkpoint(folder)
        (warning,) = caught
        assert "no positive K and V scales for layers 0-1, 3" in str(warning.message)
        assert "±448 there saturates" in str(warning.message) and "kvpass calibrate" in str(warning.message)
        assert warning.filename == __file__
        assert scales[0].key == scales[3].value == Scale((1.0,)) and scales[2].key.scale != (1.0,)

    def test_declared_and_none_there(self, tmp_path):
        with pytest.warns(UserWarning, match="no positive K and V scales for layers 0-3"):
            KVScales.from_checkpoint(write(tmp_path / "m", {}, modelopt=modelopt()))


class TestDeclaration:
    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            (modelopt("FP8"), "fp8_e4m3"),
            (modelopt("NVFP4"), "nvfp4"),
            (modelopt("NVFP4_AFFINE"), "nvfp4"),
            (modelopt(None), None),
            ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
            ({"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"}, "nvfp4"),
            ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8_e4m3"),
            (COMPRESSED, "fp8_e4m3"),
            (COMPRESSED | {"kv_cache_scheme": None}, None),
            ({"config_groups": {"a": {"targets": ["LlamaAttention"], "input_activations": SCHEME}}}, "fp8_e4m3"),
            ({"config_groups": {"a": {"targets": ["Linear"], "input_activations": SCHEME}}}, None),
            (QUARK, "fp8_e4m3"),
            ({"quant_method": "quark", "layer_quant_config": None}, None),
            ({"quant_method": "awq", "bits": 4}, None),
        ],
    )
    def test_formats(self, values, expected):
        found = declaration(values, "config.json")
        assert (found and (found.key, found.value)) == (expected and (expected, expected))

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (modelopt("INT8"), "unknown kv_cache_quant_algo 'INT8'; known: FP8, NVFP4, NVFP4_AFFINE"),
            (COMPRESSED | {"kv_cache_scheme": SCHEME | {"type": "int"}}, "8 bits of type 'int'; supported are float"),
            ({"quant_method": "quark", "layer_quant_config": {"*k_proj": QUARK_OUTPUT}}, "output of k_proj only"),
        ],
    )
    def test_what_there_is_no_format_for(self, values, message):
        with pytest.raises(ValueError, match=f"config.json.*{message}"):
            declaration(values, "config.json")

    def test_the_config_follows_it(self, tmp_path):
        folder = write(tmp_path / "m", named(MODELOPT), modelopt=modelopt("NVFP4"))
        config = KVQuantConfig.from_pretrained(folder)
        assert config.format == "nvfp4" and config.scales == KVScales.from_checkpoint(folder)
        assert KVQuantConfig.from_pretrained(folder, format="fp8_e5m2", strict=True).key.name == "fp8_e5m2"

    def test_two_files_that_contradict_each_other(self, tmp_path):
        folder = write(tmp_path / "m", named(MODELOPT), quantization=COMPRESSED, modelopt=modelopt("NVFP4"))
        with pytest.raises(ValueError, match="hf_quant_config.json.* says nvfp4, and .*config.json.* says fp8_e4m3"):
            KVQuantConfig.from_pretrained(folder)

    def test_nothing_declared_is_the_default(self, tmp_path):
        assert KVQuantConfig.from_pretrained(write(tmp_path / "m", {})) == KVQuantConfig()


class TestWriting:
    @pytest.mark.parametrize("shards", [1, 3])
    @pytest.mark.parametrize(
        ("format", "layout", "key"),
        [("fp8_e4m3", None, PLAIN), ("fp8_e4m3", "modelopt", MODELOPT), ("nvfp4", None, MODELOPT)],
    )
    def test_round_trip(self, tmp_path, shards, format, layout, key):
        source = write(tmp_path / "m", {}, shards)
        before = {file.name: file.read_bytes() for file in source.iterdir()}
        scales = KVScales.of({i: (number(i, "k"), [number(i, "v"), 0.5]) for i in range(LAYERS)}, format)
        scales.to_checkpoint(source, tmp_path / "copy", layout=layout)
        assert {file.name: file.read_bytes() for file in source.iterdir()} == before
        assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "m"]
        config = KVQuantConfig.from_pretrained(tmp_path / "copy")
        assert config.format == format
        for layer in scales.layers:
            for side in ("key", "value"):
                stored = torch.tensor(getattr(layer, side).scale, dtype=torch.float32)
                assert torch.equal(torch.tensor(getattr(config.scales[layer.index], side).scale), stored)
        index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())
        assert index["weight_map"][key.format(layer=2, s="v")] == "kv_scales.safetensors"
        assert len(index["weight_map"]) == LAYERS * (6 + 2)

    def test_names_follow_a_nested_model(self, tmp_path):
        prefix = "model.language_model.layers."
        vision = {f"model.visual.blocks.{i}.attn.qkv.weight": torch.randn(2) for i in range(6)}
        config = {"model_type": "qwen", "text_config": CONFIG}
        source = write(tmp_path / "m", vision, config=config, attention=prefix + "{}")
        KVScales.of({i: (1.0, 2.0) for i in range(LAYERS)}).to_checkpoint(source, tmp_path / "copy")
        with safe_open(tmp_path / "copy" / "kv_scales.safetensors", framework="pt") as file:
            names = {f"{prefix}{i}.self_attn.{s}_scale" for i in range(LAYERS) for s in "kv"}
            assert set(file.keys()) == names
        assert KVScales.from_checkpoint(tmp_path / "copy")[3].value.scale == (2.0,)

    def test_what_it_says_to_other_engines(self, tmp_path):
        scales = {i: ([1.0, 2.0], 2.0) for i in range(LAYERS)}
        KVScales.of(scales).to_checkpoint(write(tmp_path / "m", {}), tmp_path / "copy")
        quantization = Checkpoint.open(tmp_path / "copy").config["quantization_config"]
        assert quantization["quant_method"] == "compressed-tensors"
        assert quantization["kv_cache_scheme"] == SCHEME | {"strategy": "attn_head"}

    def test_quantized_weights_keep_what_their_config_says(self, tmp_path):
        quantization = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"]}}}
        source = write(tmp_path / "m", {}, quantization=quantization)
        KVScales.of({i: (1.0, 2.0) for i in range(LAYERS)}).to_checkpoint(source, tmp_path / "copy")
        written = Checkpoint.open(tmp_path / "copy").config["quantization_config"]
        assert written["config_groups"] == {"a": {"targets": ["Linear"]}} and written["kv_cache_scheme"] == SCHEME

    @pytest.mark.parametrize(
        ("scales", "source", "arguments", "error", "message"),
        [
            ({"format": "fp8_e5m2"}, {}, {}, ValueError, "holds fp8_e4m3, not fp8_e5m2; write JSON"),
            ({}, {"tensors": named(PLAIN)}, {}, ValueError, "holds KV scales already"),
            ({}, {"quantization": {"quant_method": "awq"}}, {}, ValueError, "is quantized by 'awq'"),
            ({}, {}, {"layout": "modelop"}, ValueError, "unknown layout 'modelop'.*Did you mean 'modelopt'"),
            ({"layers": 3}, {}, {}, ValueError, "none for 3 of the model"),
            ({}, {}, {"target": "m"}, FileExistsError, "exists; name a new folder"),
        ],
    )
    def test_what_is_refused_leaves_nothing(self, tmp_path, scales, source, arguments, error, message):
        source = write(tmp_path / "m", **({"tensors": {}} | source))
        count = scales.pop("layers", LAYERS)
        made = KVScales.of({i: (1.0, 2.0) for i in range(count)}, **scales)
        with pytest.raises(error, match=message):
            made.to_checkpoint(source, tmp_path / arguments.pop("target", "copy"), **arguments)
        assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_model_in_the_hub_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--somebody--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots").mkdir()
    write(repo / "snapshots" / ("0" * 40), named(PLAIN))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(KVScales.from_checkpoint("somebody/model"))
