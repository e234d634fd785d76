"""Configurations of the attention kernel: whose table is used, what a file may hold, and how one is measured."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch

from kvpass import cli
from kvpass import tiles as module
from kvpass.formats import get_format
from kvpass.tiles import ALLOWED, BUILT_IN, VARIABLE, Configuration, ShapeClass, configuration, table

ROOT = Path(__file__).parents[1]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DECODE = ShapeClass("decode", 4, 128)
ENTRY = {
    **DECODE._asdict(),
    "block_n": 64,
    "num_warps": 8,
    "num_stages": 4,
    "programs_per_sm": 3,
}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The package's folder of files, empty; nothing was read yet."""
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    table.cache_clear()
    yield tmp_path
    table.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for a GPU with this name and shared memory, in KiB."""

    def make(name="NVIDIA H200", room=227):
        properties = types.SimpleNamespace(shared_memory_per_block=48 << 10, shared_memory_per_block_optin=room << 10)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    make()
    return make


def write(path, *entries, gpu="NVIDIA H200", **more):
    path.write_text(json.dumps({"gpu": gpu, "configurations": list(entries), **more}))
    return path


def chosen(rows=4, head_dim=128, key="nvfp4", value="nvfp4", is_fp32=False, device=GPU):
    return configuration(get_format(key), get_format(value), head_dim, rows, is_fp32, device)


# Whose table ---------------------------------------------------------------------------------------------------------


def test_built_in_table_has_every_class():
    classes = {
        ShapeClass(*key)
        for key in ((k, b, d) for k in ALLOWED["kind"] for b in (4, 8, 16) for d in ALLOWED["head_dim"])
    }
    assert BUILT_IN.keys() == classes
    for config in BUILT_IN.values():
        assert all(value in ALLOWED[name] for name, value in config._asdict().items() if name != "block_m")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, ("decode", 4, 128)),
        ({"rows": 16, "head_dim": 16}, ("decode", 4, 64)),
        ({"rows": 17, "head_dim": 80}, ("chunk", 4, 128)),
        ({"value": "fp8_e4m3", "head_dim": 256}, ("decode", 8, 256)),
        ({"key": "bf16", "value": "nvfp4", "head_dim": 272}, ("decode", 16, 512)),
    ],
)
def test_class_of_a_call(call, expected):
    config, built_in = chosen(**call, device=CPU), BUILT_IN[ShapeClass(*expected)]
    assert config[1:] == built_in[1:]


def test_rows_of_a_program():
    assert [chosen(rows=rows, device=CPU).block_m for rows in (1, 16, 17, 32, 33, 500)] == [16, 16, 32, 32, 64, 64]
    assert chosen(is_fp32=True, rows=500, head_dim=256, device=CPU) == Configuration(16, 32, 8, 1, 2)


def test_gpu_never_seen(gpu):
    gpu("Some GPU")
    assert table(GPU) == BUILT_IN and module.source(GPU) is None


@pytest.mark.parametrize(("room", "stages"), [(227, (3, 2)), (163, (3, 1)), (99, (2, 1)), (64, (1, 1))])
def test_gpu_with_less_shared_memory(room, stages, gpu):
    """What was seen to be needed: 104 and 113 KiB by int8 in decode with 3 stages, 192 by chunks of head_dim 512."""
    gpu("Some GPU", room)
    found = table(GPU)
    chunk = found[ShapeClass("chunk", 16, 512)]
    assert (found[ShapeClass("decode", 8, 128)].num_stages, chunk.num_stages) == stages
    assert chunk.block_m == (64 if room == 227 else 32) and found[ShapeClass("decode", 16, 64)].block_m == 16
    if room == 64:
        assert all(config.block_n == 32 and config.num_stages == 1 for config in found.values())
    else:
        assert found[ShapeClass("decode", 4, 128)] == BUILT_IN[ShapeClass("decode", 4, 128)]


def test_file_of_this_gpu(gpu, folder):
    write(folder / "NVIDIA_H200.json", ENTRY, made={"torch": "2.13"})
    assert chosen() == Configuration(16, 64, 8, 4, 3)
    assert chosen(rows=40) == BUILT_IN[ShapeClass("chunk", 4, 128)]  # what the file does not have
    assert chosen(device=CPU) == BUILT_IN[DECODE]
    gpu("NVIDIA H100 80GB HBM3")
    table.cache_clear()
    assert chosen() == BUILT_IN[DECODE]
    assert module.packaged("NVIDIA H100 80GB HBM3").name == "NVIDIA_H100_80GB_HBM3.json"


def test_chunks_of_few_rows(gpu, folder):
    write(folder / "NVIDIA_H200.json", ENTRY | {"kind": "chunk"})
    assert chosen(rows=20) == Configuration(32, 64, 8, 4, 3) and chosen(rows=40) == Configuration(64, 64, 8, 4, 3)


def test_block_m_is_that_of_the_gpu(gpu, folder):
    gpu(room=99)
    write(folder / "NVIDIA_H200.json", ENTRY | {"kind": "chunk", "head_dim": 512, "block_n": 32})
    assert table(GPU)[ShapeClass("chunk", 4, 512)] == Configuration(32, 32, 8, 4, 3)


def test_own_file_comes_first(gpu, folder, monkeypatch):
    write(folder / "NVIDIA_H200.json", ENTRY)
    monkeypatch.setenv(VARIABLE, str(write(folder / "own.json", ENTRY | {"num_stages": 2})))
    assert chosen().num_stages == 2


def test_file_is_read_once(gpu, folder):
    path = write(folder / "NVIDIA_H200.json", ENTRY)
    first = chosen()
    path.write_text("not JSON")
    assert chosen() == first


def test_own_file_of_another_gpu(gpu, folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(write(folder / "own.json", ENTRY, gpu="NVIDIA L4")))
    with pytest.raises(ValueError, match="own.json: gpu is 'NVIDIA L4', and this one is 'NVIDIA H200'"):
        chosen()


def test_own_file_that_is_not_there(gpu, folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(folder / "none.json"))
    with pytest.raises(ValueError, match=f"none.json: cannot be read.*kvpass bench configurations.*{VARIABLE}"):
        chosen()


def test_env_says_which(gpu, folder, monkeypatch):
    assert cli._configurations(GPU).startswith("built in; `kvpass bench configurations`")
    table.cache_clear()
    path = write(folder / "NVIDIA_H200.json", ENTRY)
    assert cli._configurations(GPU) == str(path)
    table.cache_clear()
    monkeypatch.setenv(VARIABLE, str(folder / "none.json"))
    assert "none.json: cannot be read" in cli._configurations(GPU)


# What a file may hold ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "the file is not a JSON object"),
        ({"gpu": "NVIDIA H200"}, "the file lacks configurations"),
        ({"gpu": "NVIDIA H200", "configurations": {}}, "configurations is not a list"),
        ({"gpu": 3, "configurations": []}, "gpu is 3"),
        (
            {"gpu": "NVIDIA H200", "configurations": [], "date": 1},
            "unknown key 'date'; allowed: gpu, configurations, made",
        ),
        ([ENTRY, ENTRY], r"configurations\[1\] is the second one for decode, 4 bits, head_dim 128"),
        ([3], r"configurations\[0\] is not a JSON object"),
        ([{**ENTRY, "block_m": 16}], r"configurations\[0\] has an unknown key 'block_m'; allowed: kind, bits"),
        ([{k: v for k, v in ENTRY.items() if k != "bits"}], r"configurations\[0\] lacks bits"),
        ([ENTRY | {"kind": "prefill"}], "kind is 'prefill'; allowed: decode, chunk"),
        ([ENTRY | {"bits": 5}], "bits is 5; allowed: 4, 8, 16"),
        ([ENTRY | {"head_dim": 96}], "head_dim is 96; allowed: 64, 128, 256, 512"),
        ([ENTRY | {"block_n": 48}], "block_n is 48; allowed: 32, 64, 128, 256"),
        ([ENTRY | {"block_n": 16}], "block_n is 16"),
        ([ENTRY | {"num_warps": 6}], "num_warps is 6; allowed: 1, 2, 4, 8, 16"),
        ([ENTRY | {"num_stages": True}], "num_stages is True"),
        ([ENTRY | {"num_stages": 2.0}], "num_stages is 2.0"),
        ([ENTRY | {"programs_per_sm": 0}], "programs_per_sm is 0"),
        ([ENTRY | {"programs_per_sm": "2"}], "programs_per_sm is '2'"),
    ],
)
def test_malformed_file(content, message, gpu, folder):
    path = folder / "NVIDIA_H200.json"
    if isinstance(content, list):
        content = {"gpu": "NVIDIA H200", "configurations": content}
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message) as error:
        chosen()
    assert str(error.value).startswith(f"{path}: ")


def test_files_of_the_package(monkeypatch):
    """Each one that is committed is read as it will be on its GPU."""
    monkeypatch.undo()
    for path in (ROOT / "kvpass/kernels/configurations").glob("*.json"):
        gpu = json.loads(path.read_text())["gpu"]
        assert module.read(path, gpu) and module.packaged(gpu).name == path.name


def test_writing_keeps_other_classes(folder):
    path, chunk = folder / "own.json", ENTRY | {"kind": "chunk"}
    module.write(path, "NVIDIA H200", {"torch": "1"}, [chunk, ENTRY | {"ms": 0.5}])
    module.write(path, "NVIDIA H200", {"torch": "2"}, [ENTRY | {"num_warps": 4, "ms": 0.25}])
    content = json.loads(path.read_text())
    assert content["made"] == {"torch": "2"}
    assert content["configurations"] == [ENTRY | {"num_warps": 4, "ms": 0.25}, chunk]
    with pytest.raises(ValueError, match="gpu is 'NVIDIA H200', and this one is 'NVIDIA L4'"):
        module.write(path, "NVIDIA L4", {}, [ENTRY])
    with pytest.raises(ValueError, match="block_n is 48"):
        module.write(path, "NVIDIA H200", {}, [ENTRY | {"block_n": 48}])
    assert json.loads(path.read_text()) == content


def test_wheel_holds_the_files(tmp_path):
    pytest.importorskip("hatchling")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvpass", tmp_path / "kvpass", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    path = tmp_path / "kvpass/kernels/configurations/Some_GPU.json"
    path.parent.mkdir(exist_ok=True)
    write(path, gpu="Some GPU")
    code = "from hatchling.build import build_wheel; print(build_wheel('.'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "kvpass/kernels/configurations/Some_GPU.json" in zipfile.ZipFile(wheel).namelist()


# How one is measured -------------------------------------------------------------------------------------------------


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
ARGUMENTS = "bench configurations --kind decode --bits 8 --head-dim 64 --rounds 1 --device"


@pytest.fixture
def small(monkeypatch):
    """The command on small shapes, and such as the interpreter bears; gives the module of it."""
    pytest.importorskip("triton")
    from kvpass.bench import configurations
    from kvpass.bench.shapes import AttentionShape

    if not torch.cuda.is_available():
        monkeypatch.setitem(configurations.SMALL_SHAPES, "decode", AttentionShape(1, 1, 2, 64, 90, slots=100))
        monkeypatch.setitem(configurations.SMALL_SHAPES, "chunk", AttentionShape(1, 1, 4, 64, 90, query=9, slots=100))
    for kind in ("decode", "chunk"):
        monkeypatch.setitem(configurations.SHAPES, kind, configurations.SMALL_SHAPES[kind])
        monkeypatch.setitem(configurations.TILES, kind, [(64, 4, 2), (128, 8, 3), (32, 4, 3)])
    monkeypatch.setitem(configurations.FORMATS, 8, ("fp8_e4m3", "int8/nvfp4"))
    return configurations


def spoil(monkeypatch, action):
    """``action`` may change what the kernel gives, or raise: it is given the call's configuration and output."""
    from kvpass.kernels import attention as launcher

    right = launcher.attention
    monkeypatch.setattr(launcher, "attention", lambda *args, config: action(config, args, right(*args, config=config)))


def test_every_class_has_candidates():
    pytest.importorskip("triton")
    from kvpass.bench import configurations

    for shape in BUILT_IN:
        tiles = configurations.tiles_of(shape)
        assert 2 <= len(tiles) <= 9 and len(set(tiles)) == len(tiles)
        assert all(n in ALLOWED["block_n"] and warps in ALLOWED["num_warps"] for n, warps, _ in tiles)
        classes = {
            module.shape_class(*configurations.parse_formats(text), shape.head_dim, 1)
            for text in configurations.FORMATS[shape.bits]
        }
        assert classes == {ShapeClass("decode", shape.bits, shape.head_dim)}


@interpreted
@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_command(kind, small, tmp_path, capsys):
    path = tmp_path / "own.json"
    assert cli.main([*ARGUMENTS.replace("decode", kind).split(), "cpu", "--out", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{kind}, 8 bits, head_dim 64\n") and text.count("(built-in)") == 1
    assert text.count("chosen") == 1 and "32 slots" not in text and "left out" not in text
    (config,) = module.read(path, "cpu").values()
    (entry,) = json.loads(path.read_text())["configurations"]
    assert f"{config}" in text and 0 < entry["ms"] <= entry["built_in_ms"]
    assert json.loads(path.read_text())["made"]["torch"] == torch.__version__


@interpreted
def test_wrong_candidate_fails_the_command(small, tmp_path, capsys, monkeypatch):
    spoil(monkeypatch, lambda config, args, out: out * 1.1 if config.num_warps == 8 else out)
    path = tmp_path / "own.json"
    assert cli.main([*ARGUMENTS.split(), "cpu", "--out", str(path)]) == 1
    assert "FAILED: 128 slots, 8 warps, 3 stages, 3 per SM: relative error" in capsys.readouterr().out
    assert json.loads(path.read_text())["configurations"][0]["num_warps"] == 4


@interpreted
def test_candidate_that_does_not_fit_is_left_out(small, tmp_path, capsys, monkeypatch):
    def no_room(config, args, out):
        if config.num_warps == 8:
            raise RuntimeError("out of resource: shared memory")
        return out

    spoil(monkeypatch, no_room)
    assert cli.main([*ARGUMENTS.split(), "cpu", "--out", str(tmp_path / "own.json")]) == 0
    assert "left out: 128 slots, 8 warps, 3 stages, 3 per SM: RuntimeError: out of" in capsys.readouterr().out


@interpreted
def test_choice_runs_every_format(small, tmp_path, capsys, monkeypatch):
    """A tile that only the format that was timed has room for is not chosen, however fast."""

    def no_room(config, args, out):
        if config.num_warps == 8 and "int8" in args:
            raise RuntimeError("out of resource: shared memory")
        return out

    spoil(monkeypatch, no_room)
    monkeypatch.setattr(small, "interleave", lambda replays, *_: {name: times(name) for name in replays})
    times = lambda name: small.Summary(*3 * [1.0 if "8 warps" in name else 2.0 if "3 stages" in name else 3.0])  # noqa: E731
    path = tmp_path / "own.json"
    assert cli.main([*ARGUMENTS.split(), "cpu", "--out", str(path)]) == 0
    assert "left out: 128 slots, 8 warps, 3 stages, 3 per SM: int8/nvfp4: RuntimeError" in capsys.readouterr().out
    assert module.read(path, "cpu")[ShapeClass("decode", 8, 64)] == BUILT_IN[ShapeClass("decode", 8, 64)]


@interpreted
@pytest.mark.parametrize(("faster", "wins"), [(1.005, False), (1.05, True)])
def test_built_in_one_stays_unless_another_is_faster(faster, wins, small, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "interleave", lambda replays, *_: {name: times(name) for name in replays})
    times = lambda name: small.Summary(*3 * [1.0 if "8 warps" in name else faster])  # noqa: E731
    path = tmp_path / "own.json"
    assert cli.main([*ARGUMENTS.split(), "cpu", "--out", str(path)]) == 0
    assert (module.read(path, "cpu")[ShapeClass("decode", 8, 64)].num_warps == 8) == wins


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "name a file for them with --out"),
        ("--out rows.json --bits 5", "bits is 5; allowed: 4, 8, 16"),
        ("--out rows.json --head-dim 96", "head_dim is 96; allowed: 64, 128, 256, 512"),
        ("--out rows.json --kind prefill", "kind is prefill; allowed: decode, chunk"),
        ("--out rows.json --rounds 0", "rounds is 0"),
        ("--out nowhere/rows.json", "there is no folder nowhere"),
    ],
)
@interpreted
def test_wrong_argument(arguments, message, capsys):
    assert cli.main(["bench", "configurations", "--device", "cpu", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@interpreted
def test_file_of_another_gpu_is_not_added_to(small, tmp_path, capsys):
    path = write(tmp_path / "own.json", ENTRY)
    assert cli.main([*ARGUMENTS.split(), "cpu", "--out", str(path)]) == 2
    assert "gpu is 'NVIDIA H200', and this one is 'cpu'" in capsys.readouterr().err


def test_needs_the_interpreter_or_a_gpu(tmp_path):
    code = "import os; os.environ.pop('TRITON_INTERPRET', 0); from kvpass import cli; raise SystemExit(cli.main("
    code += "['bench', 'configurations', '--device', 'cpu', '--out', 'rows.json']))"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and "need a CUDA GPU; set TRITON_INTERPRET=1" in result.stderr


@pytest.mark.gpu
def test_command_on_a_gpu(small, tmp_path, capsys, monkeypatch):
    """The plain kernel is measured, on a Hopper GPU too; and what was measured is what is run then."""
    hopper = pytest.importorskip("kvpass.kernels.hopper_decode")
    path = tmp_path / "own.json"
    with monkeypatch.context() as patch:
        patch.setattr(hopper, "attention", lambda *_: pytest.fail("the Hopper kernel was launched"))
        assert cli.main([*ARGUMENTS.split(), "cuda", "--out", str(path)]) == 0
    assert "chosen" in capsys.readouterr().out
    monkeypatch.setenv(VARIABLE, str(path))
    name = torch.cuda.get_device_name(GPU)
    assert chosen(head_dim=64, key="fp8_e4m3") == module.read(path, name)[ShapeClass("decode", 8, 64)]
