"""The command line: tables, environment, and errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kvpass
from kvpass import cli, format_names


def kvpass_output(capsys, *argv):
    assert cli.main(list(argv)) == 0
    return capsys.readouterr().out


def test_formats(capsys):
    text = kvpass_output(capsys, "formats", "--kv-heads", "3", "--head-dim", "64", "--layers", "30")
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert set(format_names()) <= lines.keys()
    assert lines["bf16"][-4:] == ["16", "768", "23,040", "1.00"]
    assert lines["nvfp4"][1] == "e2m1" and lines["nvfp4"][-4:] == ["4.5", "216", "6,480", "3.56"]
    assert str(kvpass.KVQuantConfig.preset("compact")) in text


def test_formats_says_what_does_not_fit(capsys, monkeypatch):
    wide = kvpass.KVFormat("wide", "e2m1", block_scale="e8m0", block=32)
    monkeypatch.setattr(cli, "format_names", lambda: ("nvfp4", "wide"))
    monkeypatch.setattr(cli, "get_format", lambda name: wide if name == "wide" else kvpass.get_format(name))
    assert "not with head_dim 80" in kvpass_output(capsys, "formats", "--head-dim", "80")


def test_env(capsys):
    text = kvpass_output(capsys, "env")
    names = ("python", "torch", "triton", "transformers", "flashinfer-python", "driver", "GPU", "kernels", "Hopper")
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in names)


def test_env_survives_a_broken_kernel(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpass.kernels.hopper_decode", None)
    assert "not usable: ModuleNotFoundError" in kvpass_output(capsys, "env")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "required: COMMAND"),
        ("frobnicate", "frobnicate"),
        ("bench", "required: BENCHMARK"),
        ("calibrate model --data no.txt --out kv.json", "--data no.txt is not a file"),
        ("calibrate model --out kv.json", "required: --data"),
        ("formats --head-dim 72", "cannot hold head_dim 72"),
        ("formats --layers 0", "--layers is 0; it must be at least 1"),
        ("bench attention --device cpu --shape Z", "unknown shape 'Z'; known: A, B"),
        ("bench attention --device cpu --shape batch=2,kv_head=2", "unknown key 'kv_head'; allowed: batch, kv_heads"),
        ("bench attention --device cpu --formats int4", "unknown KV format 'int4'; known: bf16"),
        ("bench attention --device cpu --mask causal", "unknown mask 'causal'; known: none, bool, ragged"),
        ("bench attention --device tpu", "allowed: auto, cuda, cpu"),
        ("bench attention --rounds many", "invalid int value"),
        ("bench attention --device cpu --out nowhere/rows.jsonl", "no folder nowhere"),
        ("bench store --device cpu --shape tokens=4", "batch missing"),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_bench_attention(capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    argv = "bench attention --device cpu --formats nvfp4 fp8_e4m3/nvfp4 --peers static --rounds 2 --json --out"
    printed = kvpass_output(capsys, *argv.split(), str(path)).splitlines()
    assert printed == path.read_text().splitlines()
    rows = [json.loads(line) for line in printed]
    assert [row["kind"] for row in rows] == ["kvpass"] * 2 + ["unfused"] * 2 + ["peer"] + ["ceiling"] * 2
    assert all(row["status"] == "ok" for row in rows)


def test_bench_store(capsys):
    text = kvpass_output(capsys, *"bench store --device cpu --formats nvfp4 --rounds 2".split())
    assert "times as fast as index_copy_" in text and "nvfp4" in text


def test_help(capsys):
    for argv in (["--help"], ["formats", "--help"], ["bench", "attention", "--help"], ["--version"]):
        assert kvpass_output(capsys, *argv)


def test_module_runs():
    result = subprocess.run([sys.executable, "-m", "kvpass.cli", "--version"], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.strip() == f"kvpass {kvpass.__version__}"
