"""A model split among two ranks by transformers: numbers, scales, fusion, and what is refused."""

import dataclasses
from types import SimpleNamespace

import pytest
import tensor_parallel as tp
import torch

import kvpass
from kvpass.devices import ranks_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tp.save_models(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """What two processes found, which share the work through gloo."""
    return tp.launch(folder)


@pytest.mark.parametrize("name", tp.CASES)
def test_two_ranks_are_as_one(ranks, folder, name):
    """One process, eager and unfused, on all heads."""
    model = tp.load(folder / f"kv{tp.CASES[name]}", torch.float32, "cpu", 1)
    kvpass.enable(model, dataclasses.replace(tp.config_of(name, folder), strict=False))
    expected = tp.generate(model, disable_compile=True)
    first, second = (rank[name] for rank in ranks)
    assert torch.equal(first["tokens"], second["tokens"]) and torch.equal(first["logits"], second["logits"])
    print(tp.check_parting(first, expected, 1e-2))


@pytest.mark.parametrize("name", tp.CASES)
def test_every_layer_is_fused_on_each_rank(ranks, name):
    for rank, found in enumerate(ranks):
        case = found[name]
        assert case["fused"] == 2 and case["graphs"] == 1 and case["breaks"] == 0, case["report"]
        assert case["heads"] == tp.CASES[name] // 2
        assert f"tensor-parallel rank {rank} of 2" in case["report"]
        assert case["same_again"]


@pytest.mark.parametrize("name", tp.CASES)
def test_sharded_weights_are_stacked_and_put_back(ranks, name):
    for case in (found[name] for found in ranks):
        assert case["linears"] == (10, 4) and case["stacked"], case["report"]
        assert not case["stacked_after"] and case["plain_again"]


def test_scales_reach_their_rank(ranks):
    for rank, found in enumerate(ranks):
        of_file = [torch.tensor(tp.RANK_SCALES[rank][str(layer)]).expand(2) for layer in range(2)]
        of_heads = [torch.tensor(tp.HEAD_SCALES[0][2 * rank : 2 * rank + 2]) / (layer + 1) for layer in range(2)]
        for source, expected in (("ranks.json", of_file), ("heads.json", of_heads), ("checkpoint", of_heads)):
            for scale, right in zip(found["scales"][source], expected, strict=True):
                torch.testing.assert_close(scale, right, msg=lambda text, at=(rank, source): f"{at}: {text}")


def test_half_a_head_is_refused(ranks):
    for found in ranks:
        assert "1 KV heads, which 2 tensor-parallel ranks cannot share" in found["refusal"]


class Mesh:
    """The part of a DeviceMesh that is asked for."""

    def __init__(self, **sizes):
        self.sizes, self.mesh_dim_names, self.ndim = sizes, tuple(sizes), len(sizes)

    def __getitem__(self, name):
        return SimpleNamespace(size=lambda: self.sizes[name], get_local_rank=lambda: self.sizes[name] - 1)


def test_how_a_model_is_split(tiny_llama):
    model = tiny_llama()
    assert ranks_of(model) == (0, 1, 1)
    model._tp_size, model._device_mesh = 2, Mesh(pp=1, fsdp=1, tp=2)
    assert ranks_of(model) == (1, 2, 2)
    model._tp_plan = {name: "colwise_gather_output" for name in model.tp_plan}  # every rank has all heads
    assert ranks_of(model) == (1, 2, 1)
    model._device_mesh = Mesh(pp=2, tp=2)
    with pytest.raises(NotImplementedError, match="layers are split among 2 ranks"):
        kvpass.enable(model, "bf16")


def test_scales_of_several_ranks_need_as_many(tiny_llama, tmp_path):
    model = tiny_llama()
    scales = kvpass.KVScales.from_dict({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {
        "0": {"0": 1.0, "1": 1.0}, "1": {"0": 2.0, "1": 2.0}}}}, "kv.json")  # fmt: skip
    config = kvpass.KVQuantConfig(scales=scales)
    assert kvpass.KVQuantConfig.from_dict(config.to_dict()).scales == scales
    for refused in (
        lambda: kvpass.enable(model, config),
        lambda: kvpass.QuantizedCache(model.config, config),
        lambda: scales.shard(0, 4),
    ):
        with pytest.raises(ValueError, match="kv.json has scales for 2 tensor-parallel ranks, and the model runs on"):
            refused()
    with pytest.raises(ValueError, match="kv.json is one rank's part of 2"):
        kvpass.enable(model, kvpass.KVQuantConfig(scales=scales.shard(1, 2)))
