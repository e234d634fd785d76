"""Benchmarks of whole `generate` calls, and what is said to fit: what they accept, count and refuse."""

import json

import pytest
import torch
from tensor_parallel import torchrun
from torch._dynamo.exc import BackendCompilerFailed

import kvpass
from kvpass import cli
from kvpass.bench import capacity, generate, plan
from kvpass.bench.capacity import Attempt, search
from kvpass.bench.chart import newest
from kvpass.bench.generate import BASELINES
from kvpass.bench.models import SHAPES, load_config, load_model, streamed_bytes
from kvpass.bench.plan import Plan, cache_bytes, parse_bytes
from kvpass.bench.record import Output
from kvpass.config import KVQuantConfig

CPU = torch.device("cpu")


def options(**changes):
    given = {
        "model": "tiny",
        "cases": ["2x32"],
        "formats": ["nvfp4"],
        "baselines": ["dynamic"],
        "new_tokens": 8,
        "prefill_chunk": 0,
        "dtype": "fp32",
        "device": CPU,
    }
    return generate.Options.parse(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"cases": ["16"]}, ["'16'", "BATCHxPROMPT"]),
        ({"cases": ["0x8"]}, ["'0x8'"]),
        ({"baselines": ["statik"]}, ["'statik'", "static"]),
        ({"formats": ["nvpf4"]}, ["'nvpf4'", "nvfp4"]),
        ({"new_tokens": 3}, ["3", "at least"]),
        ({"prefill_chunk": -1}, ["-1"]),
        ({"dtype": "int8"}, ["'int8'", "bf16"]),
        ({"device_map": "balanced"}, ["'balanced'", "auto"]),
        ({"device_map": "auto", "ranks": 2}, ["several GPUs", "2 processes"]),
    ],
)
def test_bad_options_are_refused(changes, names):
    with pytest.raises(ValueError) as error:
        options(**changes)
    assert all(name in str(error.value) for name in names)


def test_unknown_model(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="no shape .*llama-3-8b"):
        load_config("./no/such/folder")


def test_rows(capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "generate", "--device", "cpu", "--case", "2x32", "--new-tokens", "8", "--dtype", "fp32"]
    arguments += ["--formats", "nvfp4", "--baselines", "dynamic", "quanto", "--json", "--out", str(out)]
    assert cli.main(arguments) == 0
    rows = {row["variant"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert out.read_text().count("\n") == 3
    ours, dynamic = rows["nvfp4"], rows["dynamic cache, eager"]
    assert rows["transformers quantized, quanto int4"]["status"] in ("skipped", "ok")
    assert ours["fused"] == 2 and ours["recompiles"] == 0 and ours["same_tokens_again"]
    assert ours["relative_error"] < 1e-4  # fp32, over the same bytes
    assert ours["ratios"]["dynamic cache, eager"] == pytest.approx(dynamic["ms"] / ours["ms"], rel=1e-3)
    per_token = cache_bytes(load_config("tiny"), KVQuantConfig("nvfp4"), 4096) / 4096
    weights = streamed_bytes(load_model("tiny", torch.float32, CPU))
    read = weights + 2 * 36 * per_token
    assert ours["floor_ms"] == pytest.approx(1e3 * read / (1e12 * ours["read_tb_per_s"]))
    assert ours["times_floor"] == pytest.approx(ours["ms"] / ours["floor_ms"])


def test_rows_of_two_ranks(tmp_path):
    """The first rank writes, and bytes are one rank's."""
    out = tmp_path / "rows.jsonl"
    arguments = ["--device", "cpu", "--case", "2x32", "--new-tokens", "8", "--dtype", "fp32", "--out", str(out)]
    torchrun("-m", "kvpass.cli", "bench", "generate", *arguments, "--formats", "bf16", "--baselines", "static")
    rows = {row["variant"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == 2 == out.read_text().count("\n")
    ours, static = rows["bf16"], rows["static cache, inductor"]
    assert ours["tp"] == static["tp"] == 2 and ours["fused"] == 2 and ours["relative_error"] < 1e-4
    config, whole = load_config("tiny"), streamed_bytes(load_model("tiny", torch.float32, CPU))
    assert ours["cache_bytes"] == 2 * cache_bytes(config, KVQuantConfig("bf16"), ours["slots"]) // 2
    assert static["cache_bytes"] == 2 * 2 * cache_bytes(config, KVQuantConfig("bf16"), 32 + 8) // 2  # fp32
    assert whole / 2 <= ours["weight_bytes"] < 0.6 * whole  # norms are everybody's


@pytest.mark.usefixtures("no_code_is_generated")
def test_wrong_logits_get_no_time(monkeypatch):
    """A fused step that is not what the unfused one computes is a failed row."""
    model, case = load_model("tiny", torch.float32, CPU), generate.Case(2, 32)
    original = generate.Clock.__call__

    def shuffled(self, input_ids, scores):
        result = original(self, input_ids, scores)
        self.logits = scores.flip(-1)
        return result

    monkeypatch.setattr(generate.Clock, "__call__", shuffled)
    (row,) = generate.run_case(case, model, options(baselines=["none"]), 1e12, lambda text: None)
    assert row["status"] == "FAILED" and "logits differ" in row["reason"] and "ms" not in row
    assert "_kvpass" not in vars(model)


def test_streamed_bytes_leave_out_an_embedding_that_is_looked_up():
    model = load_model("tiny", torch.float32, CPU)
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert streamed_bytes(model) == total - model.get_input_embeddings().weight.nbytes
    assert load_model("tiny", torch.float32, CPU).lm_head.weight.equal(model.lm_head.weight)


# What fits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), [("80GB", 80 * 10**9), ("1.5 GiB", 3 * 2**29), ("8e9", 8 * 10**9)])
def test_memory(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "80", "80QB", "-3GB", "GB", "0GB", "1.2.3GB"])
def test_bad_memory(text):
    if text == "80":
        assert parse_bytes(text) == 80
        return
    with pytest.raises(ValueError, match="80GB, 141GiB"):
        parse_bytes(text)


def test_plan_is_what_the_cache_takes():
    config, memory = load_config("tiny"), 4 * 10**9
    made = Plan.of(config, memory, ["bf16", "nvfp4", "fp8_e4m3/nvfp4"], chunk=8)
    cache = kvpass.QuantizedCache(config, "nvfp4", max_cache_len=1000)
    cache.early_initialization(3, 2, 32, torch.bfloat16, CPU)
    assert 3 * made.row_bytes("nvfp4", 1000) == cache.nbytes
    for text in made.formats:
        batch = made.largest_batch(text, 1000)
        assert made.needs(text, batch, 1000) <= made.room < made.needs(text, batch + 1, 1000)
        tokens = made.longest_context(text, 7)
        assert made.needs(text, 7, tokens) <= made.room < made.needs(text, 7, tokens + 32)
    assert made.largest_batch("nvfp4", 1000) > 2 * made.largest_batch("bf16", 1000)


def test_plan_of_a_model_whose_config_does_not_tell_the_shape():
    from transformers import DeepseekV3Config

    with pytest.raises(NotImplementedError, match="deepseek_v3: its configuration does not tell"):
        Plan.of(DeepseekV3Config(num_hidden_layers=2, n_routed_experts=2, n_group=1, topk_group=1), 10**12)


def test_plan_without_room():
    with pytest.raises(ValueError, match="do not hold them"):
        Plan.of(load_config("llama-3-8b"), 10**10)
    tight = Plan.of(load_config("tiny"), plan.OVERHEAD + 2 * 10**6)
    assert tight.largest_batch("bf16", 131072) == 0


def test_plan_on_the_command_line(capsys):
    assert cli.main(["plan", "llama-3-8b", "--gpu-memory", "80GB", "--formats", "fp8_e4m3"]) == 0
    printed = capsys.readouterr().out
    assert "16.06 GB of 80.00 GB" in printed and "65,536" in printed and "2.00" in printed
    assert cli.main(["plan", "tiny", "--gpu-memory", "80 bytes"]) == 2
    assert "80 bytes" in capsys.readouterr().err


def test_parameters_are_counted_without_memory():
    model = load_model("tiny", torch.float32, CPU)
    assert plan.parameter_count(load_config("tiny")) == sum(p.numel() for p in model.parameters())


# The limit, by running -----------------------------------------------------------------------------------------------


def machine(base, row, memory):
    """A pretended GPU on which `batch` sequences take `base + batch * row` bytes."""

    def attempt(batch):
        peak = base + batch * row
        return Attempt(batch, peak if peak <= memory else None, 0.0)

    return attempt


@pytest.mark.parametrize("guess", [1, 50, 95, 99, 100, 101, 103])
def test_search_ends_at_the_largest_batch(guess):
    tried = list(search(guess, machine(10, 10, 1015), 10, 1015))
    assert max(t.batch for t in tried if t.peak) == 100
    assert len(tried) <= capacity.MAX_ATTEMPTS


def test_search_where_nothing_fits():
    tried = list(search(2, machine(10, 10, 5), 10, 5))
    assert [t.batch for t in tried] == [2, 1] and not any(t.peak for t in tried)


def test_search_steps_further_back_each_time():
    tried = list(search(200, machine(10, 10, 1015), 10, 1015))
    assert [t.batch for t in tried] == [200, 194, 182, 160, 121, 62]  # and would go on with 100


def test_memory_that_a_compiler_ran_out_of():
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError as error:
            raise BackendCompilerFailed(lambda: None, error, None) from error
    except BackendCompilerFailed as error:
        assert capacity.is_out_of_memory(error)
    assert not capacity.is_out_of_memory(ValueError("another"))


def test_capacity_keeps_what_it_found_when_it_is_interrupted(monkeypatch, tmp_path, capsys):
    options = capacity.Options("tiny", 1024, {"fp8_e4m3": KVQuantConfig("fp8_e4m3")}, chunk=128, device=CPU)
    seen = []

    def attempt(model, name, options, batch):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(batch)
        return Attempt(batch, None if len(seen) == 1 else 10**9, 1.0)

    monkeypatch.setattr(capacity, "_attempt", attempt)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**11, 10**11))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert capacity.run(options, Output(tmp_path / "rows.jsonl")) == 0
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["variant"] == capacity.STATIC and row["batch"] == seen[1] < seen[0] == row["planned"]
    assert row["attempts"] == [[seen[0], False], [seen[1], True]] and str(seen[1]) in capsys.readouterr().out


def test_capacity_needs_a_gpu():
    with pytest.raises(ValueError, match="kvpass plan"):
        capacity.Options.parse("tiny", 1024, [], True, 128, "bf16", CPU)
    with pytest.raises(ValueError, match="--context is 100"):
        capacity.Options.parse("tiny", 100, [], True, 128, "bf16", torch.device("cuda"))


def test_shapes_have_the_sizes_their_names_say():
    assert plan.parameter_count(load_config("llama-3-8b")) == pytest.approx(8.03e9, rel=1e-3)
    assert set(SHAPES) == {"llama-3-8b", "llama-3.2-1b", "tiny"}


# The picture ---------------------------------------------------------------------------------------------------------


def test_chart_takes_the_newest_run_that_has_the_static_cache(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    static = BASELINES["static"][0]
    row = {"benchmark": "generate", "model": "m", "case": "4x128", "kind": "kvpass", "date": "2"}
    row |= {"gpu": "GPU", "dtype": "bf16"}
    rows = [
        {**row, "variant": static, "kind": "peer", "ms": 1.0, "date": "7", "gpu": "another"},
        {**row, "variant": "a", "ms": 2.0, "date": "1"},
        {**row, "variant": static, "kind": "peer", "ms": 7.0, "date": "1"},
        {**row, "variant": "a", "ms": 1.25},
        {**row, "variant": static, "kind": "peer", "ms": 6.0},
        {**row, "variant": "b", "status": "FAILED"},
        {**row, "variant": "a", "ms": 1.5, "date": "3"},
        {**row, "variant": static, "kind": "peer", "ms": 3.0, "date": "4", "tp": 2},
        {**row, "variant": "a", "ms": 9.0, "date": "5", "device_map": "auto"},
        {**row, "variant": "a", "ms": 8.0, "date": "6", "model": "other"},
        {**row, "variant": "another peer", "kind": "peer", "ms": 0.1, "date": "4"},
        {**row, "variant": "a", "ms": 0.5, "case": "16x8", "tp": 1},
        {**row, "variant": "another peer", "kind": "peer", "ms": 0.7, "case": "16x8"},
        {**row, "variant": "a", "ms": 0.6, "case": "16x8", "date": "3"},
    ]
    file, out = tmp_path / "rows.jsonl", tmp_path / "chart.svg"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {case: [(row["variant"], row["ms"]) for row in rows] for case, rows in newest(file, "m").items()}
    assert found == {"16x8": [("another peer", 0.7), ("a", 0.5)], "4x128": [(static, 6.0), ("a", 1.25)]}
    assert list(found) == ["16x8", "4x128"]
    assert cli.main(["bench", "chart", "--rows", str(file), "--model", "m", "--out", str(out)]) == 0
    drawn = out.read_text()
    assert "<svg" in drawn
    assert cli.main(["bench", "chart", "--rows", str(file), "--model", "m", "--out", str(out)]) == 0
    assert out.read_text() == drawn
    for arguments, named in (
        (["--model", "n", "--out", str(out)], "'n'"),
        (["--model", "m", "--out", "chart.gif"], "chart.gif"),
    ):
        assert cli.main(["bench", "chart", "--rows", str(file), *arguments]) == 2
        assert named in capsys.readouterr().err
