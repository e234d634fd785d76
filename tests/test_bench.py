"""The kernel benchmarks: what they accept, their statistics, and that nothing wrong gets a time."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from kvpass import ops
from kvpass.bench import attention, case, peers, record, store, timing
from kvpass.bench.case import Case, check, stored_variant
from kvpass.bench.shapes import (
    ATTENTION_SHAPES,
    AttentionShape,
    StoreShape,
    parse_attention_shape,
    parse_formats,
    parse_store_shape,
)
from kvpass.formats import KVBuffers, get_format

CPU = torch.device("cpu")


def attention_options(**changes):
    given = {
        "shapes": ["tiny"],
        "formats": ["nvfp4"],
        "mask": "none",
        "dtype": "bf16",
        "peers": ["static"],
        "unfused": False,
        "rounds": 2,
        "device": CPU,
    }
    return attention.Options.parse(**(given | changes))


def rows_of(capsys):
    return {row["variant"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}


# What is accepted ----------------------------------------------------------------------------------------------------


def test_named_shape():
    name, shape = parse_attention_shape("A")
    assert name == "A" and shape == AttentionShape(32, 8, 4, 128, 8192) and shape.max_len == 8192


def test_own_shape():
    text = "batch=2,kv_heads=3,group=4,head_dim=64,tokens=100,query=2,slots=128"
    assert parse_attention_shape(text)[1] == AttentionShape(2, 3, 4, 64, 100, query=2, slots=128)
    assert parse_store_shape("batch=2,tokens=5") == ("custom", StoreShape(2, 5, 8, 128))


OTHERS = "batch=1,kv_heads=1,group=1,head_dim=64"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("AA", ["'AA'", "A, B, long"]),
        ("decode-3k", ["decode-3k", "Did you mean 'decode-"]),
        (f"{OTHERS},length=3", ["'length'", "batch, kv_heads, group, head_dim, tokens, query, slots"]),
        (OTHERS, ["tokens missing"]),
        (f"{OTHERS},tokens=-3", ["tokens is '-3'", "positive whole number"]),
        (f"{OTHERS},tokens=1.5", ["tokens is '1.5'"]),
        (f"{OTHERS},tokens=", ["tokens is ''"]),
        (f"{OTHERS},tokens=0", ["tokens is 0"]),
        (f"{OTHERS},tokens=3,tokens=4", ["given twice"]),
        (f"{OTHERS},tokens=3,query=4", ["query=4", "tokens=3"]),
        (f"{OTHERS},tokens=30,slots=4", ["slots=4", "tokens=30"]),
    ],
)
def test_wrong_shape(text, names):
    with pytest.raises(ValueError) as error:
        parse_attention_shape(text)
    assert all(name in str(error.value) for name in names), error.value


def test_formats():
    assert parse_formats("nvfp4") == (get_format("nvfp4"),) * 2
    assert parse_formats("fp8_e4m3/nvfp4") == (get_format("fp8_e4m3"), get_format("nvfp4"))
    with pytest.raises(ValueError, match="slash"):
        parse_formats("bf16/bf16/bf16")
    with pytest.raises(ValueError, match="unknown KV format 'int3'"):
        parse_formats("bf16/int3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": "causal"}, "unknown mask 'causal'; known: none, bool, ragged"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'; known: bf16, fp16, fp32"),
        ({"peers": ["fa3"]}, "unknown peer 'fa3'; known: static, sdpa"),
        ({"rounds": 0}, "rounds is 0"),
        ({"keep": (0, 65)}, "keep_last is 65; it must be a whole number from 0 to 64"),
        ({"keep": (40, 60)}, "40 and 60 slots to keep are more than the 80 there are"),
        ({"shapes": ["batch=1,kv_heads=1,group=1,head_dim=72,tokens=9"]}, "cannot hold head_dim 72"),
    ],
)
def test_wrong_option(changes, message):
    with pytest.raises(ValueError, match=message):
        attention_options(**changes)


def test_no_peers_and_no_repeats():
    options = attention_options(peers=["none"], formats=["nvfp4", "nvfp4/nvfp4", "bf16"])
    assert options.peers == [] and len(options.formats) == 2


def test_padding_leaves_every_query_something_to_see():
    for shape in ATTENTION_SHAPES.values():
        padding = shape.padding("ragged")
        assert len(padding) == shape.batch and padding[-1] == 0 and padding == sorted(padding, reverse=True)
        assert all(pad % 16 == 0 and pad <= shape.tokens - shape.query for pad in padding)
        assert not any(shape.padding("bool"))
    assert ATTENTION_SHAPES["A"].padding("ragged")[0] > 5000
    assert AttentionShape(4, 1, 1, 64, 20, query=19).padding("ragged") == [0] * 4


# Statistics ----------------------------------------------------------------------------------------------------------


def test_quantiles():
    assert timing.quantile([3.0], 0.9) == 3.0
    assert timing.quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    summary = timing.summarize([float(n) for n in range(10, -1, -1)])
    assert summary == timing.Summary(median=5.0, p10=1.0, p90=9.0)
    with pytest.raises(ValueError, match="no values"):
        timing.quantile([], 0.5)


def test_interleaving():
    order = []

    def replay(name, calls):
        return timing.Replay(lambda: order.append(name), calls, torch.empty(0), lambda index: torch.empty(0))

    times = timing.interleave({"a": replay("a", 1), "b": replay("b", 4)}, 3, CPU)
    assert order == ["a", "b"] + ["a", "b", "b", "a", "a", "b"]  # warm-up, then each round begins with another one
    assert all(summary.p10 <= summary.median <= summary.p90 for summary in times.values())
    assert timing.interleave({}, 3, CPU) == {}


def test_time_is_of_one_call(monkeypatch):
    monkeypatch.setattr(timing, "_one_round", lambda replays, device: [8.0 for _ in replays])
    replay = timing.Replay(lambda: None, 4, torch.empty(0), lambda index: torch.empty(0))
    assert timing.interleave({"a": replay}, 3, CPU)["a"] == timing.Summary(2.0, 2.0, 2.0)


def test_comparison():
    rows = [
        {"variant": "nvfp4", "kind": "kvpass", "ms": 2.0, "bytes": 100},
        {"variant": "peer", "kind": "peer", "ms": 5.0, "bytes": 400},
        {"variant": "broken", "kind": "peer", "status": "FAILED"},
        {"variant": "read", "kind": "ceiling", "ms": 1.0, "bytes": 200},
    ]
    record.compare(rows, "read")
    assert [row.get("share_of_ceiling") for row in rows] == [0.25, 0.4, None, 1.0]
    assert rows[0]["ratios"] == {"peer": 2.5} and "ratios" not in rows[1]


def test_bytes_are_those_attention_sees():
    shape, pair = AttentionShape(2, 2, 2, 64, 80, slots=200), parse_formats("fp8_e4m3/nvfp4")
    tokens = {"none": 160, "ragged": 160 - 16}
    for mask, count in tokens.items():
        built = Case(shape, [pair], mask, torch.bfloat16, CPU)
        assert stored_variant(built, pair).nbytes == count * 2 * (64 + 36)
        assert built.dense_bytes() == count * 2 * 2 * 64 * 2


@pytest.mark.parametrize("config", [(32, 4, 1), (64, 1, 1)])
def test_read_kernel_reads_everything_once(config, device):
    pytest.importorskip("triton")
    from kvpass.bench import read_kernel

    source = torch.randint(-(2**31), 2**31 - 1, (1024,), dtype=torch.int32, device=device)
    config = read_kernel.Configuration(*config)
    sums = read_kernel.read(source, config)
    expected = source.view(-1, config.block * config.steps).long().sum(1)
    assert torch.equal(sums, expected.to(torch.int32))
    with pytest.raises(ValueError, match="multiple"):
        read_kernel.read(source[:1000], config)


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "bool", "ragged"])
@pytest.mark.parametrize("shape", ["tiny", "batch=3,kv_heads=2,group=3,head_dim=32,tokens=70,slots=99,query=2"])
def test_attention_run(shape, mask, capsys):
    formats = ["bf16", "fp8_e5m2", "fp8_e4m3/nvfp4", "fp4_mx_block16"]
    options = attention_options(shapes=[shape], mask=mask, formats=formats, peers=list(peers.PEERS), unfused=True)
    assert attention.run(options, record.Output(as_json=True)) == 0
    rows = rows_of(capsys)
    for name in (*formats, "dequantize + SDPA fp8_e4m3/nvfp4", "transformers static path"):
        row = rows[name]
        assert row["status"] == "ok" and row["relative_error"] <= row["error_budget"] and row["ms"] > 0
    assert "dequantize + SDPA bf16" not in rows
    sdpa = rows["torch SDPA, GQA, no mask"]
    assert sdpa["status"] == ("ok" if shape == "tiny" and mask != "ragged" else "skipped")
    assert rows["FlashInfer FA2"]["reason"] == "needs a CUDA GPU" and "ms" not in rows["FlashInfer FA2"]
    timed = {name for name, row in rows.items() if row["kind"] in ("peer", "unfused") and "ms" in row}
    assert rows["fp8_e5m2"]["ratios"].keys() == timed
    assert rows["read ceiling"]["share_of_ceiling"] == 1.0


def test_attention_run_with_slots_that_are_kept(capsys):
    options = attention_options(formats=["bf16", "nvfp4"], peers=["none"], keep=(4, 8))
    assert attention.run(options, record.Output(as_json=True)) == 0
    rows = rows_of(capsys)
    assert {name for name in rows if "kept" in name} == {"nvfp4, 4 + 8 kept"}
    kept = rows["nvfp4, 4 + 8 kept"]
    assert kept["status"] == "ok" and kept["keep"] == [4, 8] and "keep" not in rows["nvfp4"]
    assert kept["relative_error"] != rows["nvfp4"]["relative_error"]


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_attention_run_in_other_dtypes(dtype, capsys):
    options = attention_options(dtype=dtype, formats=["bf16", "fp8_e4m3", "nvfp4"])
    assert attention.run(options, record.Output()) == 0
    assert "FAILED" not in capsys.readouterr().out


def scaled_output(output):
    return output * 1.02


def swapped_rows(output):
    return output.flip(0)


def one_nan(output):
    return output.index_fill(1, torch.tensor([0]), torch.nan)


@pytest.mark.parametrize("spoil", [scaled_output, swapped_rows, one_nan])
def test_wrong_kernel_gets_no_time(spoil, monkeypatch, capsys, tmp_path):
    def wrong(built, pair):
        right = stored_variant(built, pair)
        if right.name != "nvfp4":
            return right
        return dataclasses.replace(right, call=lambda index: spoil(right.call(index)))

    monkeypatch.setattr(attention, "stored_variant", wrong)
    path = tmp_path / "rows.jsonl"
    assert attention.run(attention_options(formats=["nvfp4", "fp8_e4m3"]), record.Output(path)) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nvfp4")]
    assert line.split()[1] == "FAILED" and len(line.split()) <= 3  # the error, and no time
    rows = {row["variant"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert rows["nvfp4"]["status"] == "FAILED" and "relative error" in rows["nvfp4"]["reason"]
    assert not rows["nvfp4"].keys() & {"ms", "ms_p10", "tb_per_s", "ratios", "share_of_ceiling"}
    assert rows["fp8_e4m3"]["status"] == "ok" and rows["fp8_e4m3"]["ms"] > 0


def test_kernel_that_raises_fails_the_run(monkeypatch, capsys):
    def broken(built, pair):
        raise RuntimeError("no\nkernel image")

    monkeypatch.setattr(attention, "stored_variant", broken)
    assert attention.run(attention_options(), record.Output()) == 1
    assert "FAILED: RuntimeError: no kernel image (nvfp4)" in capsys.readouterr().out


def test_peer_that_raises_is_a_row(monkeypatch, capsys):
    def broken(label, built):
        raise OSError("no compiler")

    monkeypatch.setitem(peers.PEERS, "static", peers.Peer("static", broken))
    assert attention.run(attention_options(), record.Output(as_json=True)) == 0
    rows = rows_of(capsys)
    assert rows["static"]["status"] == "FAILED" and rows["static"]["reason"] == "OSError: no compiler"
    assert rows["nvfp4"]["ratios"] == {}


def test_check_sees_what_is_read(monkeypatch):
    """The oracle decodes what the variant reads: other bytes in one head of the last row are noticed."""
    pair = parse_formats("nvfp4")
    built = Case(ATTENTION_SHAPES["tiny"], [pair], "none", torch.bfloat16, CPU)
    variant = stored_variant(built, pair)
    output = variant.call(0)
    assert check(built, variant, output).passed
    built.stored[pair][1].codes[-1, -1] ^= 0x11
    assert not check(built, variant, output).passed


def test_slots_past_the_length_are_poisoned():
    pair = parse_formats("fp8_e4m3/nvfp4")
    built = Case(AttentionShape(1, 1, 1, 32, 40, slots=64), [pair], "none", torch.bfloat16, CPU)
    key, value = built.stored[pair]
    assert (key.codes[:, :, 40:] == 0xFF).all() and (value.codes[:, :, 40:] == 0xFF).all()
    assert (key.codes[:, :, :40] != 0xFF).any()


def test_ragged_pages_hold_what_attention_sees():
    built = Case(AttentionShape(4, 2, 1, 32, 70), [], "ragged", torch.bfloat16, CPU)
    pages = peers._Pages(built, torch.bfloat16)
    for row, (numbers, pad) in enumerate(zip(pages.rows(), built.padding, strict=True)):
        held = pages.copies[0][numbers.long()]  # [pages, 2, page, kv_heads, head_dim]
        for which, dense in enumerate((built.key, built.value)):
            tokens = held[:, which].flatten(0, 1).transpose(0, 1)[:, : 70 - pad]
            assert torch.equal(tokens, dense[row, :, pad:])
    assert torch.equal(pages.decoded(2, 1)[0], built.key[2, 1].double())


class FakeFlashInfer:
    """FlashInfer's two decode interfaces over a paged cache, in plain PyTorch."""

    def __init__(self, workspace, layout, paged_kv_indices_buffer, backend, **_):
        assert layout == "NHD" and backend == "fa2"
        self.indices = paged_kv_indices_buffer

    def plan(self, indptr, indices, last, heads, kv_heads, head_dim, page, q_data_type, kv_data_type):
        assert indices.dtype == indptr.dtype == last.dtype == torch.int32 and len(indices) == len(self.indices)
        self.indptr, self.last, self.page = indptr.tolist(), last.tolist(), page

    def run(self, query, pages):
        counts = [end - begin for begin, end in zip(self.indptr, self.indptr[1:], strict=False)]
        lengths = [(n - 1) * self.page + last for n, last in zip(counts, self.last, strict=True)]
        rows = [self.indices[begin : begin + n] for begin, n in zip(self.indptr, counts, strict=False)]
        return self.attention(query, pages, rows, lengths, query.shape[-1] ** -0.5)

    @classmethod
    def xqa(cls, query, pages, workspace, table, lengths, longest, bmm1_scale, bmm2_scale, kv_layout):
        assert kv_layout == "NHD" and bmm2_scale == 1.0 and longest == max(lengths) and table.dtype == torch.int32
        return cls.attention(query, pages, table, lengths.tolist(), bmm1_scale)

    @staticmethod
    def attention(query, pages, rows, lengths, scale):
        outputs = []
        for one, numbers, length in zip(query, rows, lengths, strict=True):
            key, value = pages[numbers.long()].to(query.dtype).transpose(0, 1).flatten(1, 2).transpose(1, 2)
            one, key, value = one[None, :, None], key[None, :, :length], value[None, :, :length]
            outputs.append(F.scaled_dot_product_attention(one, key, value, scale=scale, enable_gqa=True)[0, :, 0])
        return torch.stack(outputs)


@pytest.mark.parametrize("mask", ["none", "ragged"])
@pytest.mark.parametrize("tokens", [70, 80])
def test_flashinfer_is_called_for_the_same_case(tokens, mask, monkeypatch, capsys):
    """What the page tables say is the case: with a stand-in for FlashInfer, its peers pass the check."""
    flashinfer, decode = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.decode")
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = FakeFlashInfer
    decode.xqa_batch_decode_with_kv_cache = FakeFlashInfer.xqa
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    monkeypatch.setattr(peers, "_need_flashinfer", lambda case: None)
    text = f"batch=3,kv_heads=2,group=2,head_dim=32,tokens={tokens}"
    options = attention_options(shapes=[text], mask=mask, peers=["fa2", "fa2-fp8", "xqa", "xqa-fp8"])
    assert attention.run(options, record.Output(as_json=True)) == 0
    found = [row for row in rows_of(capsys).values() if row["kind"] == "peer"]
    assert len(found) == 4 and all(row["status"] == "ok" and row["relative_error"] < 5e-3 for row in found)


def test_store_run(capsys):
    formats = list(store.DEFAULT_FORMATS)
    options = store.Options.parse(["tiny", "batch=1"], formats, "bf16", 2, CPU)
    assert store.run(options, record.Output(as_json=True)) == 0
    rows = rows_of(capsys)
    assert rows.keys() == {*formats, "index_copy_", "copy"}
    assert rows["nvfp4"]["bytes"] == 2 * 8 * (128 * 2 + 72)
    assert all(row["status"] == "ok" and row["ms"] > 0 for row in rows.values())


@pytest.mark.parametrize("buffer", ["codes", "block_scale"])
def test_wrong_store_gets_no_time(buffer, monkeypatch, capsys):
    def wrong(key, value, positions, *rest):
        right(key, value, positions, *rest)
        target = getattr(KVBuffers(*rest[6:12]), buffer)  # of V
        target.select(2, 0)[0, 0, 0] ^= 1

    right = ops.store
    monkeypatch.setattr(store.ops, "store", wrong)
    options = store.Options.parse(["tiny"], ["nvfp4"], "bf16", 2, CPU)
    assert store.run(options, record.Output(as_json=True)) == 1
    row = rows_of(capsys)["nvfp4"]
    assert row["status"] == "FAILED" and "bytes of V differ" in row["reason"] and "ms" not in row


def test_long_store_is_sampled():
    shape = StoreShape(2, 700, 2, 32)
    built = store.StoreCase(shape, torch.bfloat16, CPU)
    fmt = get_format("nvfp4")
    buffers = built.empty(fmt)
    key = built.new[0][0]
    ops.store(key, key, built.positions[0], *buffers, *built.empty(fmt), "nvfp4", "nvfp4")
    assert store.wrong_bytes(key, buffers, fmt, built.positions[0]) == 0
    buffers.codes[:, :, 699] ^= 1
    assert store.wrong_bytes(key, buffers, fmt, built.positions[0]) == 2 * 2 * 16


def test_store_options():
    with pytest.raises(ValueError, match="unknown key 'group'; allowed: batch, tokens, kv_heads, head_dim"):
        store.Options.parse(["batch=1,group=2"], ["nvfp4"], "bf16", 2, CPU)
    with pytest.raises(ValueError, match="cannot hold head_dim 24"):
        store.Options.parse(["batch=1,head_dim=24"], ["nvfp4"], "bf16", 2, CPU)


# Rows ----------------------------------------------------------------------------------------------------------------


def test_recording_appends(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no folder benchmarks/results"):
        record.Output.choose("attention", record=True, out=None, as_json=False)
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    output = record.Output.choose("attention", record=True, out=None, as_json=False)
    for _ in range(2):
        attention.run(attention_options(peers=["none"]), output)
    rows = [json.loads(line) for line in (tmp_path / "benchmarks/results/attention.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in rows] == 2 * ["nvfp4", "read ceiling", "copy"]
    shape = {"batch": 2, "kv_heads": 2, "group": 2, "head_dim": 64, "tokens": 80, "query": 1, "slots": 0}
    assert rows[0]["shape"] == shape and rows[0]["dtype"] == "bf16" and rows[0]["mask"] == "none"
    assert rows[0]["key_format"] == rows[0]["value_format"] == "nvfp4"
    for field in "gpu driver torch triton commit date kvpass clock".split():
        assert field in rows[0]
    assert rows[0]["torch"] == torch.__version__ and rows[0]["clock"] == "wall clock"


def test_recording_is_off_unless_asked_for(tmp_path):
    assert record.Output.choose("store", record=False, out=None, as_json=True) == record.Output(None, True)
    assert record.Output.choose("store", False, str(tmp_path / "own.jsonl"), False).path == tmp_path / "own.jsonl"


def test_error_that_is_not_a_number_is_valid_json(monkeypatch, capsys):
    monkeypatch.setattr(attention, "check", lambda *_: case.Check(float("nan"), 1.0))
    assert attention.run(attention_options(), record.Output(as_json=True)) == 1
    assert "NaN" not in capsys.readouterr().out


def test_commit_by_name(monkeypatch):
    record.commit.cache_clear()
    monkeypatch.setenv("KVPASS_COMMIT", "abc123")
    assert record.commit() == "abc123"
    record.commit.cache_clear()


def test_table():
    assert record.table(("a", "b"), [("long", "1"), ("x", "22")]) == "a      b\nlong   1\nx     22"


def test_reasons_are_grouped():
    rows = [{"variant": name, "status": "skipped", "reason": "no GPU"} for name in "xy"]
    rows += [{"variant": "z", "status": "FAILED", "reason": "wrong"}, {"variant": "w", "status": "ok"}]
    assert record.reasons(rows) == ["skipped: no GPU (x, y)", "FAILED: wrong (z)"]


@pytest.mark.gpu
def test_graph_calls_rotate_over_copies():
    device = torch.device("cuda")
    seen = torch.zeros(5, device=device)

    def call(index):
        seen[index] += 1
        return seen

    replay = timing.prepare(call, 5, device)
    seen.zero_()
    replay.run()
    assert replay.calls % 5 == 0 and (seen == replay.calls // 5).all()


@pytest.mark.gpu
def test_copies_exceed_the_cache():
    device = torch.device("cuda")
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    assert timing.copies_for(1 << 20, device) << 20 >= 4 * cache and timing.copies_for(8 * cache, device) == 1


@pytest.mark.gpu
def test_runs_on_a_gpu(capsys):
    text = "batch=2,kv_heads=2,group=4,head_dim=64,tokens=1000,slots=1024"
    for mask in ("none", "ragged"):
        options = attention_options(
            shapes=[text], mask=mask, formats=["bf16", "fp8_e4m3", "nvfp4"], unfused=True, device=torch.device("cuda")
        )
        assert attention.run(options, record.Output()) == 0
    options = store.Options.parse(["token-1", "batch=2,tokens=300"], ["nvfp4"], "bf16", 2, torch.device("cuda"))
    assert store.run(options, record.Output()) == 0
    assert "FAILED" not in capsys.readouterr().out
