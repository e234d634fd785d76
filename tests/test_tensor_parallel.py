"""A model split among two ranks by transformers: numbers, scales, fusion, and what is refused."""

import dataclasses
from types import SimpleNamespace

import pytest
import tensor_parallel as tp
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

import kvpass
from kvpass import devices
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


@pytest.mark.parametrize("name", tp.CASES)
def test_an_enabled_model_is_saved_whole(ranks, folder, name):
    saved = load_file(folder / f"saved-{name}" / "model.safetensors")
    model = tp.load(folder / f"kv{tp.CASES[name]}", torch.float32, "cpu", 1)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(saved[key].float(), value, rtol=0, atol=0)


def test_random_weights_of_benchmarks_are_those_of_one_process(ranks):
    expected = tp.random_logits(torch.device("cpu"), 1)
    for found in ranks:
        torch.testing.assert_close(found["random"], expected, rtol=1e-4, atol=1e-4)


def test_scales_reach_their_rank(ranks):
    for rank, found in enumerate(ranks):
        for source, expected in tp.scales_of_rank(rank).items():
            print(rank, source, found["scales"][source])
            torch.testing.assert_close(torch.stack(found["scales"][source]), expected)


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


def test_the_modules_of_a_model_are_all_its_modules():
    shared, parent = torch.nn.Linear(2, 2), torch.nn.ModuleList([torch.nn.Sequential(torch.nn.ReLU()), None])
    parent.extend([shared, torch.nn.Sequential(shared)])
    parent[0].add_module("parent", parent)
    found = devices.modules_of(parent)
    assert found[0] is parent and len(found) == len(set(found)) and set(found) == set(parent.modules())


# Dispatched over devices by accelerate -------------------------------------------------------------------------------


def dispatched(model, *parameters):
    """``model`` with accelerate's hooks on every module, all of them for the CPU, as the map says of ``parameters``."""
    from accelerate import dispatch_model

    parts = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    places = dict.fromkeys([*parts, *parameters], "cpu")
    return dispatch_model(model, places, force_hooks=True, skip_keys=model._skip_keys_device_placement)


def test_hooks_do_not_cut_the_decode_step(tiny_llama):
    plain = tiny_llama()
    kvpass.enable(plain, "nvfp4")
    expected = tp.generate(plain)
    torch._dynamo.reset()
    counters.clear()
    model = dispatched(tiny_llama())
    forwards = [module.forward for module in model.modules()]
    kvpass.enable(model, "nvfp4")
    found = tp.generate(model)
    assert torch.equal(found["tokens"], expected["tokens"])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    report = kvpass.report(model)
    assert report.fused == 2 and report.graphs[-1].sites[1].layer == "model.layers.1.self_attn"
    assert report.eager_reads == 0
    # and everything is as it was, for whoever calls the model itself
    assert [module.forward for module in model.modules()] == forwards
    assert not any(module._forward_pre_hooks for module in model.modules())
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(tp.generate(model)["tokens"], expected["tokens"])


def test_tensors_move_where_a_part_begins(tiny_llama):
    """Each part is on a device of its own, in name: what is moved, and where to, is noted instead."""
    model = dispatched(tiny_llama())
    for index, name in enumerate(model.hf_device_map):
        model.get_submodule(name)._hf_hook.execution_device = f"cuda:{index}"
    seen, original = [], devices._to

    def noted(value, device):
        if isinstance(value, torch.Tensor):
            seen.append(device.index)
        return value if isinstance(value, torch.Tensor) else original(value, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_to", noted)
        with devices.substitutes(model, None).in_place(), torch.no_grad():
            model(tp.prompt_of("cpu"))
    assert [index for index, before in zip(seen, [None, *seen], strict=False) if index != before] == list(range(6))


def test_calls_that_overlap_end_in_any_order(tiny_llama):
    """In threads, or one inside another: what is in place stays until the last has ended."""
    model = dispatched(tiny_llama())
    hooked = model.lm_head.forward
    one = devices.substitutes(model, None)
    first, second = one.in_place(), one.in_place()
    first.__enter__()
    assert devices.substitutes(model, one) is one
    second.__enter__()
    plain = model.lm_head.forward
    first.__exit__(None, None, None)
    assert model.lm_head.forward == plain != hooked
    second.__exit__(None, None, None)
    assert model.lm_head.forward == hooked


def test_a_map_that_names_a_parameter(tiny_llama):
    """As accelerate makes it for a parameter that no part holds."""
    model = tiny_llama()
    model.model.image_newline = torch.nn.Parameter(torch.zeros(4))
    model = dispatched(model, "model.image_newline")
    kvpass.enable(model, "nvfp4")
    tp.generate(model)
    assert kvpass.report(model).fused == 2


def test_an_error_puts_the_hooks_back(tiny_llama, stopped):
    model = dispatched(tiny_llama())
    forwards = [module.forward for module in model.modules()]
    kvpass.enable(model, "bf16")
    with stopped(model, after=3), pytest.raises(KeyboardInterrupt):
        tp.generate(model)
    assert [module.forward for module in model.modules()] == forwards


def test_offloaded_parts_are_named(tiny_llama, tmp_path):
    """transformers does not compile such a model: right, not fused, and said; refused where fusion is asked for."""
    plain = tiny_llama()
    expected = tp.generate(plain)["tokens"]
    model = tiny_llama()
    state = {f"model.layers.1.{name}": x for name, x in model.model.layers[1].state_dict().items()}
    from accelerate.utils import offload_state_dict

    offload_state_dict(tmp_path, state)
    from accelerate import dispatch_model

    places = {name: "cpu" for name in ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm")}
    places |= {"lm_head": "cpu", "model.layers.1": "disk"}
    dispatch_model(model, places, offload_dir=tmp_path, main_device="cpu", force_hooks=True)
    kvpass.enable(model, "bf16")
    assert torch.equal(tp.generate(model)["tokens"], expected)
    assert "hf_device_map has parts of the model on cpu, disk" in str(kvpass.report(model))
    kvpass.enable(model, kvpass.KVQuantConfig("bf16", strict=True))
    with pytest.raises(kvpass.NotFusedError, match=r"parts of the model on cpu, disk \(hf_device_map\)"):
        tp.generate(model)
