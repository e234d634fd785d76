"""Two GPUs: tensor parallelism over NCCL, and a model dispatched over both (``device_map``)."""

import pytest
import tensor_parallel as tp
import torch
from torch._dynamo.utils import counters

import kvpass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    pytest.mark.xdist_group("two GPUs"),  # which ranks take, once for all tests
]
# Errors are root mean squares against the model in fp32, its K and V stored in the same format. Those of two ways to
# compute in bf16 differ by how sums are rounded, and by the codes of K and V that turn on it.
AS_RIGHT = 1.5
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
PARTS = {
    **dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), 0),
    **dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tp.save_models(folder, **SHAPE)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return tp.launch(folder, "cuda")


@pytest.fixture(scope="module")
def on_one_gpu(folder):
    """What one GPU computes, eager and unfused, by format."""

    def compute(name):
        model = tp.load(folder / f"kv{tp.CASES[name]}", torch.bfloat16, "cuda:0", 1)
        cache = kvpass.QuantizedCache(model.config, tp.config_of(name, folder), max_cache_len=128)
        return tp.generate(model, past_key_values=cache, disable_compile=True)

    return {name: compute(name) for name in tp.CASES}


@torch.no_grad()
def check_as_right(folder, name, found, one):
    """Hold ``found`` to the error of ``one``, and where their tokens part, to a choice between two that this error
    can turn. Returns what was seen, in words."""
    model = tp.load(folder / f"kv{tp.CASES[name]}", torch.float32, "cuda:0", 1)
    errors = []
    for result in (found, one):
        cache = kvpass.QuantizedCache(model.config, tp.config_of(name, folder), max_cache_len=128)
        prompt, *steps = result["tokens"].to("cuda:0").split([9, *[1] * tp.NEW_TOKENS], 1)
        exact = [model(ids, past_key_values=cache).logits[:, -1].cpu() for ids in (prompt, *steps[:-1])]
        errors.append(float((result["logits"] - torch.stack(exact, 1)).square().mean().sqrt()))
    said = [f"errors {errors[0]:.3f} and {errors[1]:.3f}, logits deviate by {float(one['logits'].std()):.2f}"]
    for row, (a, b) in enumerate(zip(found["tokens"], one["tokens"], strict=True)):
        same = int((a == b)[-tp.NEW_TOKENS :].long().cumprod(0).sum())
        said.append(f"row {row}: {same} of {tp.NEW_TOKENS} tokens alike")
        if same < tp.NEW_TOKENS:
            best = one["logits"][row, same].topk(2).values
            said[-1] += f", parted at a gap of {float(best[0] - best[1]):.3f}"
            assert best[0] - best[1] <= 4 * errors[1], said
    assert errors[0] <= AS_RIGHT * errors[1], said
    return "; ".join(said)


@pytest.mark.parametrize("name", tp.CASES)
def test_two_ranks_are_as_one_gpu(ranks, folder, on_one_gpu, name):
    first, second = (rank[name] for rank in ranks)
    print(first["report"], {key: first[key] for key in ("seconds", "graphs", "recordings", "skips")}, sep="\n")
    print(check_as_right(folder, name, first, on_one_gpu[name]))
    assert torch.equal(first["tokens"], second["tokens"])


@pytest.mark.parametrize("name", tp.CASES)
def test_each_rank_fuses_and_records_once(ranks, name):
    for case in (found[name] for found in ranks):
        facts = {key: value for key, value in case.items() if key not in ("tokens", "logits")}
        print(facts)
        assert case["fused"] == 2 and case["graphs"] == 1 and case["breaks"] == 0
        assert case["linears"] == (10, 4) and case["heads"] == tp.CASES[name] // 2
        # The first call's cache is its caller's; the second's is kept, and what was recorded for it used again.
        recorded, after_another_call = case["recordings"]
        assert case["skips"] == 0 and recorded and after_another_call == recorded
        assert case["same_again"] and not case["stacked_after"] and case["plain_again"]


def test_scales_reach_their_rank(ranks):
    for rank, found in enumerate(ranks):
        for source, expected in tp.scales_of_rank(rank).items():
            print(rank, source, found["scales"][source])
            torch.testing.assert_close(torch.stack(found["scales"][source]), expected)


@pytest.mark.parametrize("name", tp.CASES)
def test_dispatched_over_two_gpus(folder, on_one_gpu, name):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder / f"kv{tp.CASES[name]}", dtype=torch.bfloat16, device_map=PARTS
    ).eval()
    forwards = [module.forward for module in model.modules()]
    kvpass.enable(model, tp.config_of(name, folder))
    found = tp.generate(model)
    report, cache = kvpass.report(model), found["cache"].past_key_values
    print(report, counters["stats"], counters["graph_break"], sep="\n")
    assert [layer.key.codes.device.index for layer in cache.layers] == [0, 1]
    assert [layer.last_position.device.index for layer in cache.layers] == [0, 1]
    assert report.fused == 2 and report.eager_reads == 0 and counters["stats"]["unique_graphs"] == 1
    assert "on cuda:0, cuda:1: without CUDA graphs" in str(report)
    print(check_as_right(folder, name, found, on_one_gpu[name]))
    prompt = tp.prompt_of(model.device)
    model.generate(prompt, max_new_tokens=tp.NEW_TOKENS, **tp.GREEDY)
    with torch._dynamo.config.patch(error_on_recompile=True):
        again = model.generate(prompt, max_new_tokens=tp.NEW_TOKENS, **tp.GREEDY)
    assert torch.equal(again.cpu(), found["tokens"])
    assert [module.forward for module in model.modules()] == forwards


def test_operators_on_the_other_gpu(folder):
    """Launches go to the tensors' device, whichever is current."""
    model = tp.load(folder / "kv4", torch.bfloat16, "cuda:1", 1)
    kvpass.enable(model, "balanced")  # K rotated and in fp8, V in nvfp4
    assert torch.cuda.current_device() == 0
    elsewhere = tp.generate(model)
    kvpass.disable(model)
    kvpass.enable(model.to("cuda:0"), "balanced")
    assert torch.equal(tp.generate(model)["tokens"], elsewhere["tokens"])
