"""Tuning: the choice is the best there is under its budget, errors are those of single sides, files round-trip."""

import itertools
import json

import pytest
import torch

import kvpass
from kvpass import cli
from kvpass.accuracy.plot import plot_tuning
from kvpass.accuracy.selection import Option, choose, frontier, hull, uniform
from kvpass.accuracy.storage import bits_per_value
from kvpass.config import KVQuantConfig

BITS = {"four": 4.5, "six": 6.0, "eight": 8.0, "whole": 16.0}


def random_sides(count, seed):
    """Sides whose error falls with bits, on the whole: some options are not worth their bits."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(count, generator=generator).exp()
    noise = torch.rand(count, len(BITS), generator=generator)
    return [
        [Option(name, bits, float(scale[i] * noise[i, j] * 2**-bits)) for j, (name, bits) in enumerate(BITS.items())]
        for i in range(count)
    ]


def every_choice(sides):
    for options in itertools.product(*sides):
        yield sum(o.bits for o in options) / len(sides), sum(o.error for o in options)


class TestSelection:
    def test_hull(self):
        options = [
            Option("b", 6, 3.9),
            Option("a", 4, 4.0),
            Option("d", 16, 0.0),
            Option("c", 8, 2.0),
            Option("e", 9, 2.5),
        ]
        assert [option.format for option in hull(options)] == ["a", "c", "d"]
        assert hull([Option("x", 4, 1.0), Option("y", 4, 0.5)]) == [Option("y", 4, 0.5)]

    @pytest.mark.parametrize("seed", range(5))
    def test_every_point_of_the_frontier_is_the_best_of_its_bits(self, seed):
        sides = random_sides(5, seed)
        points = frontier(sides)
        choices = list(every_choice(sides))
        assert len(points) > 5 and [p.bits for p in points] == sorted(p.bits for p in points)
        for point in points:
            best = min(error for bits, error in choices if bits <= point.bits + 1e-9)
            assert point.error == pytest.approx(best, rel=1e-9)

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("budget", [4.5, 5.2, 5.5, 7.3, 11.0, 16.0])
    def test_budget(self, seed, budget):
        """Met, and used: no step that still fits is left out, and none of the frontier below it is better."""
        sides = random_sides(5, seed)
        point = choose(sides, budget)
        named = [next(o for o in side if o.format == name) for side, name in zip(sides, point.formats, strict=True)]
        assert sum(o.bits for o in named) / 5 == pytest.approx(point.bits) and point.bits <= budget + 1e-9
        assert sum(o.error for o in named) == pytest.approx(point.error)
        assert point.error <= min(p.error for p in frontier(sides) if p.bits <= budget + 1e-9)
        best = min(error for bits, error in every_choice(sides) if bits <= budget + 1e-9)
        worst = max(o.error for side in sides for o in side)
        assert best <= point.error + 1e-12 and point.error - best <= worst, "one step at most is missing"

    @pytest.mark.parametrize("budget", [4.4, 16.1, float("nan")])
    def test_a_budget_that_cannot_be_met(self, budget):
        with pytest.raises(ValueError, match=r"cannot be met: the formats to choose from take 4.5 to 16 bits"):
            choose(random_sides(3, 0), budget)

    def test_uniform(self):
        sides = random_sides(3, 0)
        points = uniform(sides, ["four", "nothing"])
        assert set(points) == {"four"} and points["four"].bits == 4.5
        assert points["four"].error == pytest.approx(sum(side[0].error for side in sides))


PLAIN = ["nvfp4", "fp8_e4m3", "bf16"]


def run(model, data, bits=6.0, **settings):
    usual = {"window": 48, "sample_tokens": 96, "check_tokens": 96, "progress": False, "candidates": PLAIN}
    return kvpass.tune(model, data, bits, **(usual | settings))


@pytest.fixture
def model(tiny_llama):
    return tiny_llama(dtype=torch.bfloat16)


@pytest.fixture
def ids():
    return torch.randint(0, 512, (4, 48), generator=torch.Generator().manual_seed(1))


class TestTune:
    def test_budget_and_round_trip(self, model, ids, tmp_path):
        tuning = run(model, [ids], bits=6.0)
        assert bits_per_value(model.config, tuning.config) == tuning.bits <= 6.0
        for name in ("kv.yaml", "kv.json"):
            tuning.config.to_file(tmp_path / name)
            assert KVQuantConfig.from_file(tmp_path / name) == tuning.config
        measured = {result.name: result for result in tuning.evaluation.formats}
        assert set(measured) == {"tuned", "nvfp4", "fp8_e4m3"} and measured["tuned"].bits == tuning.bits
        divergence = {name: result.overall.divergence.value for name, result in measured.items()}
        assert divergence["fp8_e4m3"] < divergence["tuned"] < divergence["nvfp4"]
        assert tuning.predicted == pytest.approx(divergence["tuned"], rel=0.5), "errors add up, roughly"

    @pytest.mark.parametrize("side", [0, 1])
    def test_errors_are_those_of_one_side(self, model, ids, side):
        tuning = run(model, [ids[:2], ids[2:]], check_tokens=96)
        config = {"format": "bf16", "layers": {"1": {("key_format", "value_format")[side]: "nvfp4"}}}
        evaluation = kvpass.evaluate(model, [ids[:2]], {"one": config}, window=48, layers=False, progress=False)
        found = {option.format: option.error for option in tuning.sensitivity[1][side]}
        assert found["nvfp4"] == pytest.approx(evaluation["one"].overall.divergence.value, rel=0.1)
        assert found["nvfp4"] > 2 * found["fp8_e4m3"] > found["bf16"] == 0

    def test_bits_go_where_they_matter(self, model, ids):
        """A layer whose attention has no effect gets the fewest bits, whatever the budget."""
        with torch.no_grad():
            model.model.layers[1].self_attn.o_proj.weight.zero_()
        config = run(model, [ids], bits=7.0).config
        layers = [config.layer(index) for index in range(2)]
        assert [fmt.name for fmt in layers[1][:2]] == ["nvfp4", "nvfp4"]
        assert "nvfp4" not in {fmt.name for fmt in layers[0][:2]}

    def test_candidates_of_v_and_a_base(self, model, ids):
        base = {"format": "fp8_e5m2", "strict": True, "skip_layers": [0]}
        candidates = {"candidates": ["fp8_e4m3"], "value_candidates": ["nvfp4", "fp8_e4m3"]}
        config = run(model, [ids], 7.2, base=base, **candidates).config
        layers = [config.layer(index) for index in range(2)]
        assert config.strict and not config.skip_layers
        assert [layer.key.name for layer in layers] == ["fp8_e4m3"] * 2
        assert sorted(layer.value.name for layer in layers) == ["fp8_e4m3", "nvfp4"], "7.125 bits"

    def test_defaults_are_transformed_formats_and_keep_the_first_tokens(self, model, ids):
        config = run(model, [ids], bits=4.6, candidates=None).config
        layers = [config.layer(index) for index in range(2)]
        assert (config.keep_first, config.keep_last) == (4, 8)
        assert {layer.key.name for layer in layers} == {"nvfp4+centred+rotated+4over6"}
        assert {layer.value.name for layer in layers} == {"nvfp4+4over6"}

    def test_the_whole_range(self, model, ids):
        assert run(model, [ids], bits=4.5).config == KVQuantConfig("nvfp4")
        whole = run(model, [ids], bits=16)
        assert whole.predicted == 0 and whole.frontier[0].bits == 4.5 and whole.frontier[-1].error == 0

    def test_shown(self, model, ids, tmp_path):
        tuning = run(model, [ids])
        text = str(tuning)
        assert "bits against predicted KL" in text and "nvfp4 alone" in text and "tuned" in text
        tuning.to_json(tmp_path / "found.json")
        found = json.loads((tmp_path / "found.json").read_text())
        assert KVQuantConfig.from_dict(found["config"]) == tuning.config and len(found["sensitivity"]) == 2

    def test_plot(self, model, ids, tmp_path):
        pytest.importorskip("matplotlib")
        plot_tuning(run(model, [ids]), tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


class TestResume:
    def test_an_interrupted_run_ends_the_same(self, model, ids, tmp_path, stopped):
        path, data = tmp_path / "state", [ids]
        with stopped(model) as calls:
            expected = run(model, data)
        settings = {"resume": path, "save_every": 0}
        with stopped(model, after=7), pytest.raises(KeyboardInterrupt):
            run(model, data, **settings)
        assert path.exists()
        with stopped(model) as calls_left:
            assert run(model, data, **settings) == expected
        assert len(calls_left) == len(calls) - 6, "all but the exact pass were kept"
        assert list(tmp_path.iterdir()) == []

    def test_what_is_refused(self, model, ids, tmp_path, stopped):
        path = tmp_path / "state"
        with stopped(model, after=3), pytest.raises(KeyboardInterrupt):
            run(model, [ids], resume=path, save_every=0)
        with pytest.raises(ValueError, match="belongs to another model or other settings"):
            run(model, [ids], resume=path, candidates=["nvfp4", "fp8_e4m3"])
        path.write_text("{}")
        with pytest.raises(ValueError, match="is not the state of a tuning"):
            run(model, [ids], resume=path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3.9}, "a budget of 3.9 bits per value cannot be met: the formats to choose from take 4.5 to 16 bits"),
        ({"bits": 17}, "a budget of 17 bits"),
        ({"candidates": ["nvfp4", "int4"]}, "unknown KV format 'int4'"),
        ({"candidates": []}, "no candidates"),
        ({"check_tokens": 96, "sample_tokens": 500}, "too short: the sample of 500 tokens leaves none"),
        ({"data": [torch.ones(1, dtype=torch.long)]}, "the text is too short"),
        ({"data": iter([torch.ones(9, dtype=torch.long)])}, "an iterator can be read once"),
        ({"window": 4096}, "window is 4096"),
    ],
)
def test_what_is_refused(model, ids, settings, message):
    with pytest.raises(ValueError, match=message):
        run(model, **{"data": [ids], **settings})


def test_command(tiny_llama, tokenizer, tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 10)
    argv = ["tune", tmp_path / "model", "--text", tmp_path / "text.txt", "--window", 64, "--dtype", "float32"]
    argv += ["--tokens", 128, "--check-tokens", 128, "--device", "cpu", "--quiet", "--bits"]
    assert cli.main([*map(str, argv), "5.5", "--out", str(tmp_path / "kv.yaml")]) == 0
    config = KVQuantConfig.from_file(tmp_path / "kv.yaml")
    printed = capsys.readouterr().out
    assert str(config) in printed and "of 5.5 allowed" in printed and not list(tmp_path.glob("*.partial"))
    for arguments, message in (
        (["2", "--out", str(tmp_path / "kv.yaml")], "a budget of 2 bits"),
        (["5", "--out", str(tmp_path / "kv.txt")], "must end in .yaml, .yml or .json"),
        (["5", "--out", str(tmp_path / "kv.json"), "--base", "no.yaml"], "no.yaml is not a file"),
    ):
        assert cli.main([*map(str, argv), *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tiny_llama, ids):
    found = [run(tiny_llama(device, torch.bfloat16), [ids]) for device in ("cpu", "cuda")]
    assert found[1].bits <= 6.0
    for cpu, gpu in zip(found[0].sensitivity, found[1].sensitivity, strict=True):
        for side in range(2):
            assert gpu[side][0].error == pytest.approx(cpu[side][0].error, rel=0.25)
