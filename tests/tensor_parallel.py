"""What each rank does in the tests of tensor parallelism, and what is compared.

``torchrun --nproc-per-node 2 tests/tensor_parallel.py FOLDER`` loads the checkpoints that :func:`save_models` put into
FOLDER, split among the ranks, and writes what came out to ``FOLDER/rank<rank>.pt``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import kvpass
from kvpass.bench.generate import counted_recordings
from kvpass.bench.models import load_model
from kvpass.fx_passes.stack import local

RANKS = 2
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
NEW_TOKENS = 12
# By the KV heads of the model that they run on. fp8_e4m3 has a scale for each head, some far too small: dealt out to
# other heads, they make other numbers.
CASES = {"bf16": 4, "fp8_e4m3": 4, "nvfp4": 2}
HEAD_SCALES = ([0.02, 0.0005, 0.01, 0.002], [0.01, 0.03, 0.0008, 0.004])
RANK_SCALES = [{"0": 0.25, "1": 0.5}, {"0": 0.0625, "1": 0.125}]


def save_models(folder: Path, **shape: Any) -> None:
    """Checkpoints ``kv1``, ``kv2`` and ``kv4``, by their KV heads, and files of scales."""
    settings = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": 512} | shape
    for heads in (1, 2, 4):
        torch.manual_seed(0)
        config = LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=heads, initializer_range=0.1, **settings
        )
        # in another dtype than it is loaded in: what is loaded as it is may stay a view of the file
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder / f"kv{heads}")
    scales(folder).to_json(folder / "heads.json")
    scales(folder).to_checkpoint(folder / "kv4", folder / "kv4-scales", layout="modelopt")
    ranks = {str(rank): layers for rank, layers in enumerate(RANK_SCALES)}
    (folder / "ranks.json").write_text(
        f'{{"kv_cache": {{"dtype": "float8_e4m3fn", "scaling_factor": {ranks}}}}}'.replace("'", '"')
    )


def scales(folder: Path) -> kvpass.KVScales:
    """One for each of four heads, other ones in each layer."""
    return kvpass.KVScales.of({i: tuple([s / (i + 1) for s in side] for side in HEAD_SCALES) for i in range(2)})


def config_of(name: str, folder: Path) -> kvpass.KVQuantConfig:
    given = {"scales": folder / "heads.json"} if name == "fp8_e4m3" else {}
    return kvpass.KVQuantConfig(name, strict=True, **given)


def prompt_of(device: Any) -> torch.Tensor:
    return torch.randint(1, 512, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)


def load(path: Path, dtype: torch.dtype, device: str, ranks: int) -> Any:
    """The model, split among the ranks if there are several."""
    if ranks > 1:  # it goes to this rank's device by itself
        config = DistributedConfig(tp_size=ranks)
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=config).eval()
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def generate(model: Any, **arguments: Any) -> dict[str, Any]:
    """Tokens and logits of one call, on the CPU, and the cache."""
    settings = GREEDY | {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(prompt_of(model.device), **settings | arguments)
    return {"tokens": out.sequences.cpu(), "logits": torch.stack(out.logits, 1).float().cpu(), "cache": out}


def run(name: str, folder: Path, dtype: torch.dtype, device: str, ranks: int) -> dict[str, Any]:
    """A format on its model: what it computes, and how."""
    torch._dynamo.reset()
    counters.clear()
    model = load(folder / f"kv{CASES[name]}", dtype, device, ranks)
    plain = generate(model)["tokens"]
    with counted_recordings() as recordings:
        return _run(name, folder, model, plain, recordings)


def _run(name: str, folder: Path, model: Any, plain: torch.Tensor, recordings: list[None]) -> dict[str, Any]:
    kvpass.enable(model, config_of(name, folder))
    begin = time.perf_counter()
    result = generate(model)
    keys = result.pop("cache").past_key_values.layers[0].key
    report = kvpass.report(model)
    result |= {
        "seconds": time.perf_counter() - begin,
        "report": str(report),
        "fused": report.fused,
        "linears": report.graphs[-1].linears,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "heads": keys.codes.shape[1],
        "scale": None if keys.scale is None else keys.scale.cpu(),
        "stacked": is_view_of_larger(model),
    }
    del keys
    # of `generate` without the dictionary, which keeps its cache for the next call
    model.generate(prompt_of(model.device), max_new_tokens=NEW_TOKENS, **GREEDY)
    result["recordings"] = [len(recordings)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        again = model.generate(prompt_of(model.device), max_new_tokens=NEW_TOKENS, **GREEDY)
    result["recordings"].append(len(recordings))
    result["same_again"] = torch.equal(again.cpu(), result["tokens"])
    result["skips"] = counters["inductor"]["cudagraph_skips"]
    model.save_pretrained(folder / f"saved-{name}")
    kvpass.disable(model)
    result["stacked_after"] = is_view_of_larger(model)
    result["plain_again"] = torch.equal(generate(model)["tokens"], plain)
    return result


def is_view_of_larger(model: Any) -> bool:
    weight = local(model.model.layers[0].self_attn.q_proj.weight)
    return weight.untyped_storage().nbytes() > weight.nbytes


def scales_on_a_rank(folder: Path, dtype: torch.dtype, device: str, ranks: int) -> dict[str, Any]:
    """The scales of each layer's K in the cache, by where they came from."""
    found = {}
    for source, checkpoint in (("ranks.json", "kv4"), ("heads.json", "kv4"), ("checkpoint", "kv4-scales")):
        model = load(folder / checkpoint, dtype, device, ranks)
        kvpass.enable(model, None if source == "checkpoint" else kvpass.KVQuantConfig.from_file(folder / source))
        cache = generate(model, max_new_tokens=2, disable_compile=True)["cache"].past_key_values
        found[source] = [layer.key.scale.cpu() for layer in cache.layers]
    return found


def scales_of_rank(rank: int) -> dict[str, torch.Tensor]:
    """What :func:`scales_on_a_rank` must find: ``[layers, kv_heads]``."""
    heads = torch.tensor(HEAD_SCALES[0][2 * rank : 2 * rank + 2])
    heads = torch.stack([heads / (layer + 1) for layer in range(2)])
    of_file = torch.tensor([RANK_SCALES[rank][str(layer)] for layer in range(2)])
    return {"ranks.json": of_file[:, None].expand(2, 2), "heads.json": heads, "checkpoint": heads}


def refusal(folder: Path, dtype: torch.dtype, device: str, ranks: int) -> str:
    try:
        kvpass.enable(load(folder / "kv1", dtype, device, ranks), "bf16")
    except ValueError as error:
        return str(error)
    return "not refused"


@torch.no_grad()
def random_logits(device: torch.device, ranks: int) -> torch.Tensor:
    """Of the model with random weights that benchmarks run."""
    model = load_model("tiny", torch.float32, device, ranks)
    return model(prompt_of(device)).logits.cpu()


def check_parting(found: dict[str, Any], expected: dict[str, Any], error: float) -> str:
    """Hold ``found`` against ``expected``: logits to within ``error`` of their deviation up to where the tokens part,
    and there a choice between two that is no larger than that. Returns what was seen, in words."""
    said = []
    for row in range(len(expected["tokens"])):
        tokens = [x["tokens"][row, -NEW_TOKENS:] for x in (found, expected)]
        same = int((tokens[0] == tokens[1]).long().cumprod(0).sum())
        upto = min(same + 1, NEW_TOKENS)
        ours, theirs = (x["logits"][row, :upto] for x in (found, expected))
        deviation = float(theirs.std())
        worst = float((ours - theirs).abs().max()) / deviation
        said.append(f"row {row}: {same} of {NEW_TOKENS} tokens alike, logits differ by {worst:.1e} of their deviation")
        if same < NEW_TOKENS:
            best = theirs[same].topk(2).values
            gap = float(best[0] - best[1]) / deviation
            said[-1] += f", parted at a gap of {gap:.1e}"
            assert gap <= 2 * error, said
        assert worst <= error, said
    return "; ".join(said)


def torchrun(*arguments: str, timeout: int = 240) -> str:
    """Standard output of two ranks that run ``arguments``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-12000:]
    return done.stdout


def launch(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What each rank wrote."""
    torchrun(__file__, str(folder), *arguments)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]


def main(folder: Path, device: str = "cpu") -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    results: dict[str, Any] = {name: run(name, folder, dtype, device, ranks) for name in CASES}
    results["scales"] = scales_on_a_rank(folder, dtype, device, ranks)
    results["refusal"] = refusal(folder, dtype, device, ranks)
    results["random"] = random_logits(
        torch.device(device, torch.cuda.current_device() if device == "cuda" else 0), ranks
    )
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.barrier()
    if device == "cuda":
        os._exit(0)  # NCCL's own end waits for the CUDA graphs that use it
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    main(Path(sys.argv[1]), *sys.argv[2:])
