"""Evaluation: its figures against others worked out by hand, that all reads are quantized, retrieval, the command."""

import importlib.machinery
import json
import math
import re
import sys
import types

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvpass
from kvpass import cli, reference
from kvpass.accuracy.harness import run_tasks
from kvpass.accuracy.layer_errors import LayerErrors
from kvpass.accuracy.plot import plot_evaluation
from kvpass.accuracy.retrieval import Retrieval
from kvpass.accuracy.statistics import Tally, compare
from kvpass.accuracy.storage import bits_per_value, stored
from kvpass.cache import QuantizedCache
from kvpass.config import KVQuantConfig
from kvpass.formats import get_format

pytestmark = pytest.mark.usefixtures("no_code_is_generated")


def run(model, data, formats=("nvfp4",), **settings):
    return kvpass.evaluate(model, data, formats, **({"progress": False, "window": 48, "layers": False} | settings))


@pytest.fixture
def model(tiny_llama):
    return tiny_llama()


@pytest.fixture
def ids():
    return torch.randint(0, 512, (3, 48), generator=torch.Generator().manual_seed(1))


def singly(model, config, ids):
    """Logits of ``ids``, a token at a time through a quantized cache: every read is of decoded bytes."""
    cache = QuantizedCache(model.config, config, max_cache_len=ids.shape[1])
    with torch.no_grad():
        return torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, 1)], 1)


def divergence(full, other):
    return torch.nn.functional.kl_div(
        other.log_softmax(-1), full.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)


class TestFigures:
    def test_by_hand(self, model, ids):
        result = run(model, [ids], chunk=1)["nvfp4"].overall
        with torch.no_grad():
            full, quantized = model(ids).logits[:, :-1], singly(model, "nvfp4", ids)[:, :-1]
        targets = ids[:, 1:].flatten()
        losses = [torch.nn.functional.cross_entropy(x.flatten(0, 1), targets).item() for x in (full, quantized)]
        assert result.tokens == 3 * 47
        assert result.full_perplexity.value == pytest.approx(math.exp(losses[0]), rel=1e-5)
        assert result.perplexity.value == pytest.approx(math.exp(losses[1]), rel=1e-5)
        assert result.ratio.value == pytest.approx(math.exp(losses[1] - losses[0]), rel=1e-5)
        assert result.divergence.value == pytest.approx(float(divergence(full, quantized).mean()), rel=1e-4)
        same = (full.argmax(-1) == quantized.argmax(-1)).double().mean()
        assert result.agreement.value == pytest.approx(float(same), rel=1e-6)

    def test_compare(self):
        full, other = torch.randn(2, 2, 700, 11, generator=torch.Generator().manual_seed(0)).unbind(0)
        targets = torch.randint(0, 11, (2, 700), generator=torch.Generator().manual_seed(0))
        found = compare(full, other, targets)
        torch.testing.assert_close(found[..., 2], divergence(full, other))
        losses = torch.nn.functional.cross_entropy(other.flatten(0, 1), targets.flatten(), reduction="none")
        torch.testing.assert_close(found[..., 1].flatten(), losses)
        assert torch.equal(compare(full, full, targets)[..., 2], torch.zeros(2, 700))
        full[..., 3] = other[..., 3] = -torch.inf
        assert compare(full, other, targets)[..., 2].isfinite().all()
        other[0, 5, 7] = torch.nan
        assert compare(full, other, targets)[..., 2].isnan().nonzero().tolist() == [[0, 5]], "it must not pass for 0"

    @pytest.mark.parametrize("chunk", [7, 16, 100])
    def test_the_first_chunk_reads_decoded_bytes_too(self, model, ids, chunk):
        """A first prefill would attend to exact K and V. Rounding differs with the chunk, and turns few codes."""
        chunked, single = (run(model, [ids], chunk=n, buckets=[0, 7, 16])["nvfp4"] for n in (chunk, 1))
        for (_, found), (_, expected) in zip(chunked.by_position, single.by_position, strict=True):
            assert found.divergence.value == pytest.approx(expected.divergence.value, rel=0.1)
        assert single.by_position[0][1].divergence.value > 0.01

    def test_coarser_formats_diverge_more(self, tiny_llama, ids):
        formats = ["bf16", "fp8_e4m3", "fp8_e4m3/nvfp4", "nvfp4"]
        evaluation = run(tiny_llama(dtype=torch.bfloat16), [ids], formats)
        found = [result.overall.divergence.value for result in evaluation.formats]
        assert [result.name for result in evaluation.formats] == formats
        assert found == sorted(found) and found[0] < 1e-2 * found[1] and found[3] > 2 * found[1]

    def test_bf16_gives_the_models_own_predictions(self, tiny_llama, ids):
        model = tiny_llama(dtype=torch.bfloat16)
        overall = run(model, [ids], ["bf16"], chunk=100).formats[0].overall
        assert overall.divergence.value < 1e-4 and overall.ratio.value == pytest.approx(1, abs=1e-3)

    def test_decode_runs_the_compiled_step(self, model, ids):
        eager, decoded = (run(model, [ids], decode=n, chunk=16)["nvfp4"] for n in (0, 8))
        assert counters["stats"]["unique_graphs"] == 1 and kvpass.report(model).fused == 2
        assert decoded.overall.tokens == eager.overall.tokens
        assert decoded.overall.divergence.value == pytest.approx(eager.overall.divergence.value, rel=0.05)

    def test_the_newest_tokens_are_exact_where_tokens_run_singly(self, model, ids):
        config = kvpass.KVQuantConfig("nvfp4", keep_last=8)
        chunked, decoded = (run(model, [ids], {"keeping": config}, decode=n, chunk=16) for n in (0, 47))
        assert "The newest tokens, which keeping keep in bf16" in str(chunked)
        assert "newest tokens" not in str(decoded)
        found = [evaluation["keeping"].overall.divergence.value for evaluation in (chunked, decoded)]
        assert found[1] < 0.9 * found[0]
        single = run(model, [ids], {"keeping": config}, chunk=1)
        assert found[1] == pytest.approx(single["keeping"].overall.divergence.value, rel=0.05)

    def test_decode_of_another_batch_compiles_another_step(self, model, ids):
        single, batched = (run(model, [ids], decode=8, batch_size=n)["nvfp4"].overall for n in (1, 2))
        assert counters["stats"]["unique_graphs"] == 1 + 2, "batches of 2 windows and of 1"
        assert batched.divergence.value == pytest.approx(single.divergence.value, rel=0.05)

    def test_decode_does_not_measure_what_is_not_fused(self, model, ids, monkeypatch):
        def complain(report, strict):
            assert strict
            raise kvpass.NotFusedError("layer 0 is not fused")

        monkeypatch.setattr("kvpass.backend._complain", complain)
        with pytest.raises(NotImplementedError, match="measures the fused kernel, but nvfp4: layer 0 is not fused"):
            run(model, [ids], decode=4)

    def test_batches_and_short_windows(self, model, ids):
        data = [*ids, ids[0, :20], ids[1, :1]]
        single, batched = (run(model, data, batch_size=n, chunk=16) for n in (1, 2))
        assert single.windows == batched.windows == 4
        assert single["nvfp4"].overall.tokens == batched["nvfp4"].overall.tokens == 3 * 47 + 19
        assert batched["nvfp4"].overall.perplexity.value == pytest.approx(
            single["nvfp4"].overall.perplexity.value, rel=1e-2
        )

    def test_what_is_left_out(self, model, ids):
        whole = run(model, [ids[2:]], chunk=16)["nvfp4"].overall
        assert run(model, list(ids), chunk=16, skip_tokens=50)["nvfp4"].overall == whole
        late = run(model, [ids[2:]], chunk=16, skip_first=20, buckets=[0, 20])["nvfp4"]
        by_position = run(model, [ids[2:]], chunk=16, buckets=[0, 20])["nvfp4"].by_position
        assert late.overall == by_position[1][1] and late.overall.tokens == 28

    def test_state_of_the_model(self, model, ids):
        model.train()
        kvpass.enable(model, "fp8_e5m2")
        run(model, [ids])
        assert model.training and kvpass.report(model).config.format == "fp8_e5m2"


class TestPositions:
    def test_ranges_add_up(self, model, ids):
        result = run(model, [ids], buckets=[0, 5, 30, 40, 4096])["nvfp4"]
        assert [edge for edge, _ in result.by_position] == [0, 5, 30, 40]
        parts = [figures for _, figures in result.by_position]
        assert [part.tokens for part in parts] == [3 * n for n in (4, 25, 10, 8)]
        assert sum(part.tokens for part in parts) == result.overall.tokens
        for name in ("divergence", "agreement"):
            total = sum(getattr(part, name).value * part.tokens for part in parts)
            assert total / result.overall.tokens == pytest.approx(getattr(result.overall, name).value)
        loss = sum(math.log(part.perplexity.value) * part.tokens for part in parts)
        assert math.exp(loss / result.overall.tokens) == pytest.approx(result.overall.perplexity.value)

    def test_a_tokens_position_is_how_many_it_is_predicted_from(self):
        tally = Tally([0, 4])
        tally.start(1)
        tally.add(torch.ones(1, 5, 4), first=1)
        assert tally.sums[0, :, 0].tolist() == [3, 2]


class TestIntervals:
    def tally(self, windows=12, seed=0):
        tally = Tally([0])
        tally.start(windows)
        figures = torch.rand(windows, 100, 4, generator=torch.Generator().manual_seed(seed))
        figures[..., :2] += torch.linspace(0, 3, windows).view(-1, 1, 1)  # windows differ much, equally for both
        tally.add(figures, 0)
        return tally

    def test_contain_the_figure_and_depend_on_the_seed_alone(self):
        figures, _ = self.tally().figures(2000, seed=0)
        for estimate in figures[1:]:
            assert estimate.low < estimate.value < estimate.high
        assert self.tally().figures(2000, seed=0)[0] == figures != self.tally().figures(2000, seed=1)[0]

    def test_are_paired(self):
        """Windows that are hard for both make perplexity uncertain, and not its ratio."""
        figures, _ = self.tally().figures(2000, seed=0)
        width = {name: getattr(figures, name).high / getattr(figures, name).low for name in ("perplexity", "ratio")}
        assert width["perplexity"] > 2 and width["ratio"] < 1.2

    def test_have_the_width_of_the_standard_error(self):
        tally = self.tally(200)
        estimate = tally.figures(4000, seed=0)[0].divergence
        by_window = tally.sums[:, 0, 3] / 100
        expected = 2 * 1.96 * float(by_window.std()) / math.sqrt(200)
        assert estimate.high - estimate.low == pytest.approx(expected, rel=0.1)

    def test_need_two_windows(self, model, ids):
        assert run(model, [ids[:1]])["nvfp4"].overall.divergence[1:] == (None, None)


class TestBits:
    @pytest.mark.parametrize(
        ("config", "bits"),
        [
            ("bf16", 16),
            ("fp8_e4m3", 8),
            ("nvfp4", 4.5),
            ({"format": "fp8_e4m3", "value_format": "nvfp4"}, 6.25),
            ({"format": "nvfp4", "skip_layers": [-1]}, (4.5 + 16) / 2),
            ({"format": "nvfp4", "layers": {"0": {"key_format": "fp8_e4m3"}}}, (3 * 4.5 + 8) / 4),
        ],
    )
    def test_by_hand(self, model, config, bits):
        assert bits_per_value(model.config, config) == bits

    def test_are_those_of_a_real_cache(self, model):
        cache = QuantizedCache(model.config, "nvfp4", max_cache_len=2048)
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        assert bits_per_value(model.config, "nvfp4") == 8 * cache.nbytes / (2 * 2 * 2 * 64 * 2048)


def decibels(exact, found):
    return float(10 * torch.log10(exact.square().sum() / (found - exact).square().sum()))


class TestLayers:
    def test_by_hand(self, model, ids):
        """Attention of layer 1 from exact inputs, over K and V as the reference stores them."""
        seen = {}
        attention = model.model.layers[1].self_attn
        attention.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
        model.requires_grad_(False)
        found = run(model, [ids[:1]], ["fp8_e4m3/nvfp4"], layers=True).formats[0].layers[1]

        hidden, (cos, sin) = seen["hidden_states"], seen["position_embeddings"]
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        query, key, value = (project(hidden).unflatten(-1, (-1, 64)).transpose(1, 2) for project in projections)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        slots = torch.arange(key.shape[2])
        outputs, decoded = [], []
        for x, fmt in ((key, get_format("fp8_e4m3")), (value, get_format("nvfp4"))):
            buffers = fmt.allocate_like(x)
            reference.write(buffers, fmt, x, slots)
            decoded.append(reference.dequantize(buffers, fmt))
        for k, v in ((key, value), decoded):
            out = reference.attention(query, k, v, slots, None, attention.scaling, is_causal=True)
            outputs.append(attention.o_proj(out.transpose(1, 2).flatten(2)))
        assert found.key == pytest.approx(decibels(key, decoded[0]), abs=1e-3)
        assert found.value == pytest.approx(decibels(value, decoded[1]), abs=1e-3)
        assert found.output == pytest.approx(decibels(*outputs), abs=1e-2)

    def test_what_is_exact_is_infinite(self, tiny_llama, ids):
        model = tiny_llama(dtype=torch.bfloat16)
        evaluation = run(model, [ids], ["bf16/nvfp4"], layers=True)
        for layer in evaluation.formats[0].layers:
            assert layer.key == math.inf > layer.output > 5 and 15 < layer.value < 25
        assert json.loads(json.dumps(evaluation.to_dict()))["formats"][0]["sqnr_db"][0]["key"] is None
        assert re.search(r"bf16/nvfp4 +exact +\d", str(evaluation))

    def test_is_the_layers_own_error(self, model, ids):
        """A layer behind quantized ones has the error it has alone, and one kept in bf16 has that of bf16."""
        configs = [KVQuantConfig("nvfp4"), KVQuantConfig("nvfp4", layers={"0": "bf16"})]
        errors = LayerErrors(model, configs, 2)
        with torch.no_grad():
            errors.add(ids)
        everywhere, second = errors.results(0), errors.results(1)
        assert everywhere[1] == second[1] and second[0].output > everywhere[0].output + 20

    def test_one_token_and_a_prefill_come_out_of_storage(self):
        key = torch.randn(1, 2, 300, 64)
        whole = stored(KVQuantConfig("nvfp4").layer(0), key, key)[0]
        single = stored(KVQuantConfig("nvfp4").layer(0), key[:, :, :1], key[:, :, :1])[0]
        assert whole.shape == key.shape and torch.equal(whole[:, :, :1], single)
        assert 15 < decibels(key[:, :, :256], whole[:, :, :256]) < 25


TEXT = "The quick brown fox jumps over the lazy dog. " * 40


class TestRetrieval:
    task = Retrieval(lengths=(300, 420), depths=(0, 0.5, 1), trials=2)

    def test_who_knows_the_answer_finds_all(self, tokenizer):
        asked = []

        def knows(prompts, tokens):
            asked.append(prompts)
            texts = [tokenizer.decode(prompt.tolist()) for prompt in prompts]
            keys = [re.search(r"pass key is (\d{5})\. Remember", text).group(1) for text in texts]
            answers = [tokenizer(f" {key}.")["input_ids"] for key in keys]
            return torch.cat([prompts, torch.tensor(answers)[:, :tokens]], 1)

        scores = self.task.scores(knows, TEXT, tokenizer, batch_size=4)
        assert [prompt.shape for prompt in asked] == [(4, 420), (2, 420), (4, 300), (2, 300)]
        assert scores == tuple((tokens, depth, 2, 2) for tokens in (300, 420) for depth in (0, 0.5, 1))
        places = [tokenizer.decode(prompt.tolist()).index("The pass key is") for prompt in torch.cat(asked[:2])]
        assert places == sorted(places) and places[0] == places[1] < places[2] == places[3] < places[4] == places[5]
        texts = [tokenizer.decode(prompt.tolist()) for prompt in torch.cat(asked[:2])]
        assert len(set(texts)) == 6 and all(text.endswith("The pass key is") for text in texts)

    @pytest.mark.parametrize("wrong", ["12", "{key}0", "no idea", "1{key}"])
    def test_only_the_exact_key_counts(self, tokenizer, wrong):
        def answer(prompts, tokens):
            texts = [tokenizer.decode(prompt.tolist()) for prompt in prompts]
            keys = [re.search(r"(\d{5})\. Remember", text).group(1) for text in texts]
            replies = [tokenizer(wrong.format(key=key).ljust(tokens))["input_ids"][:tokens] for key in keys]
            return torch.tensor(replies)

        assert all(score.found == 0 for score in self.task.scores(answer, TEXT, tokenizer))

    def test_runs_through_enable(self, model, ids, tokenizer):
        kvpass.enable(model, "fp8_e5m2")
        task = Retrieval(lengths=(220,), depths=(0.5,), trials=1)
        evaluation = run(model, TEXT, ["nvfp4"], tokenizer=tokenizer, max_tokens=96, retrieval=task)
        assert evaluation.full_retrieval == evaluation.formats[0].retrieval == ((220, 0.5, 0, 1),)
        assert counters["stats"]["unique_graphs"] == 1, (
            "the decode step of nvfp4, and nothing for the model's own cache"
        )
        assert kvpass.report(model).config.format == "fp8_e5m2"
        assert "passkeys found" in str(evaluation) and "220 at 0.5" in str(evaluation)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"lengths": (100,)}, "a prompt of 100 tokens has no room for the question, which needs \\d+"),
            ({"lengths": (10000,)}, "too short for 2 prompts of 10000 tokens"),
            ({"depths": (1.5,)}, "depth is 1.5"),
            ({"trials": 0}, "takes lengths, depths, trials from 1"),
        ],
    )
    def test_what_is_refused(self, tokenizer, settings, message):
        with pytest.raises(ValueError, match=message):
            list(Retrieval(**settings).prompts(TEXT, tokenizer))


class TestHarness:
    @pytest.fixture
    def lm_eval(self, monkeypatch):
        """As much of lm-eval as is used: one task asks for generation, the other for a log-likelihood."""
        harness, models, huggingface = (types.ModuleType(name) for name in ("lm_eval", "lm_eval.models", "lm_eval.x"))

        class HFLM:
            def __init__(self, pretrained, tokenizer, batch_size):
                self.model = pretrained

        def simple_evaluate(model, tasks, limit):
            if tasks == ["hellaswag"]:
                model.loglikelihood([types.SimpleNamespace(task_name="hellaswag")])
            config = kvpass.report(model.model).config
            return {"results": {task: {"alias": task, "exact,none": len(str(config)), "n": limit} for task in tasks}}

        huggingface.HFLM, harness.simple_evaluate = HFLM, simple_evaluate
        harness.__spec__ = importlib.machinery.ModuleSpec("lm_eval", None)
        monkeypatch.setitem(sys.modules, "lm_eval", harness)
        monkeypatch.setitem(sys.modules, "lm_eval.models", models)
        monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", huggingface)

    def test_each_configuration_is_enabled_in_turn(self, model, tokenizer, lm_eval):
        configs = {"four": KVQuantConfig("nvfp4")}
        found = run_tasks(model, tokenizer, configs, ["gsm8k"], limit=3)
        assert found == {
            "full": {"gsm8k": {"exact,none": len(str(None)), "n": 3}},
            "four": {"gsm8k": {"exact,none": len(str(configs["four"])), "n": 3}},
        }
        assert kvpass.report(model).config is None

    def test_log_likelihood_is_refused(self, model, tokenizer, lm_eval):
        with pytest.raises(ValueError, match="hellaswag is a log-likelihood task: it reads no KV cache"):
            run_tasks(model, tokenizer, {}, ["hellaswag"])

    def test_not_installed(self, model, tokenizer, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"lm_eval, which is not installed: pip install 'kvpass\[lm-eval\]'"):
            run_tasks(model, tokenizer, {}, ["gsm8k"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"formats": ["int4"]}, "unknown KV format 'int4'"),
        ({"formats": ["nvfp4/bf16/nvfp4"]}, "write one name, or that of K and that of V"),
        ({"formats": ["no.yaml"]}, "no.yaml is not a file"),
        ({"formats": []}, "no formats"),
        ({"window": 4096}, "window is 4096; it must be at least 2, and the model has 2048 positions"),
        ({"window": 1}, "window is 1"),
        ({"chunk": 0}, "chunk is 0; it must be at least 1"),
        ({"decode": 48}, "decode is 48; it must be at least 0, and less than the window of 48"),
        ({"skip_first": -1}, "skip_first is -1"),
        ({"buckets": [1, 2]}, r"buckets are \[1, 2\]; they must ascend, from 0"),
        ({"data": [torch.ones(1, dtype=torch.long)]}, "the text is too short"),
        ({"data": []}, "tokenizer|too short"),
        ({"data": iter([torch.ones(9, dtype=torch.long)])}, "an iterator can be read once"),
        ({"data": "text"}, "text needs the model's tokenizer"),
        ({"skip_tokens": 500}, "too short: nothing is left to score, with skip_tokens=500"),
        ({"retrieval": Retrieval()}, "retrieval needs the model's tokenizer"),
        ({"retrieval": Retrieval(lengths=(2045,)), "tokenizer": "any"}, "prompts of 2045 tokens and their answers"),
    ],
)
def test_what_is_refused(model, ids, settings, message):
    with pytest.raises(ValueError, match=message):
        run(model, **{"data": [ids], **settings})


def test_a_format_by_name_pair_file_dictionary_or_configuration(model, ids, tmp_path):
    path = tmp_path / "kv.yaml"
    KVQuantConfig("fp8_e4m3", value_format="nvfp4").to_file(path)
    same = {"pair": "fp8_e4m3/nvfp4", "file": str(path), "dict": {"format": "fp8_e4m3", "value_format": "nvfp4"}}
    results = run(model, [ids], {**same, "config": KVQuantConfig.from_file(path)}).formats
    assert [result.name for result in results] == ["pair", "file", "dict", "config"]
    assert len({(result.config, result.overall) for result in results}) == 1


class TestCommand:
    @pytest.fixture
    def saved(self, tiny_llama, tokenizer, tmp_path):
        tiny_llama().save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        (tmp_path / "text.txt").write_text(TEXT)
        return [tmp_path / "model", "--text", tmp_path / "text.txt", "--dtype", "float32", "--device", "cpu"]

    def call(self, *arguments):
        return cli.main(["eval", *map(str, arguments), "--quiet"])

    def test_table_and_json(self, saved, tmp_path, capsys):
        path = tmp_path / "found.json"
        settings = ["--tokens", 200, "--window", 64, "--formats", "bf16", "fp8_e4m3/nvfp4", "--json", path]
        assert self.call(*saved, *settings) == 0
        printed, found = capsys.readouterr().out, json.loads(path.read_text())
        assert "196 tokens scored in 4 windows" in printed and "95% intervals" in printed
        assert [row["name"] for row in found["formats"]] == ["bf16", "fp8_e4m3/nvfp4"]
        row = found["formats"][1]
        assert row["tokens"] == 196 and row["bits"] == 6.25 and len(row["sqnr_db"]) == 2
        assert row["divergence"]["low"] <= row["divergence"]["value"] <= row["divergence"]["high"]
        assert f"{row['perplexity']['value']:.4f}" in printed

    def test_record(self, saved, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "benchmarks" / "results").mkdir(parents=True)
        own = tmp_path / "kv.json"
        own.write_text('{"format": "nvfp4"}')
        for _ in range(2):
            assert self.call(*saved, "--tokens", 64, "--window", 64, "--formats", own, "bf16", "--record") == 0
        rows = [json.loads(line) for line in (tmp_path / "benchmarks/results/eval.jsonl").read_text().splitlines()]
        assert [row["name"] for row in rows] == ["kv.json", "bf16"] * 2
        assert {"torch", "commit", "date", "window", "text"} <= rows[0].keys()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--formats", "int4"], "unknown KV format 'int4'"),
            (["--plot", "figure.jpeg"], "must end in one of .png"),
            (["--json", "nowhere/found.json"], "there is no such folder"),
            (["--window", 4096], "window is 4096"),
        ],
    )
    def test_bad_input_is_one_line(self, saved, arguments, message, capsys):
        assert self.call(*saved, *arguments) == 2
        captured = capsys.readouterr()
        assert message in captured.err.splitlines()[-1] and "Traceback" not in captured.err and captured.out == ""

    def test_no_such_model_or_text(self, saved, tmp_path, capsys):
        assert self.call(tmp_path / "no", *saved[1:]) == 2
        assert "cannot load" in capsys.readouterr().err
        assert self.call(saved[0], "--text", tmp_path / "no.txt") == 2
        assert "is not a file" in capsys.readouterr().err

    def test_help_says_what_harnesses_do_not_measure(self, capsys):
        assert cli.main(["eval", "--help"]) == 0
        assert "reads no cache" in " ".join(capsys.readouterr().out.split())


def test_plot(model, ids, tmp_path):
    pytest.importorskip("matplotlib")
    plot_evaluation(run(model, [ids], ["bf16", "nvfp4"], layers=True), tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("bf16", "nvfp4", "KL by position", "attention output"))


def test_plot_without_matplotlib(model, ids, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"matplotlib, which is not installed: pip install 'kvpass\[plot\]'"):
        plot_evaluation(run(model, [ids]), tmp_path / "figure.png")


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [["bf16", "fp8_e4m3", "nvfp4"]])
def test_on_a_gpu_the_kernels_give_the_references_figures(tiny_llama, ids, formats):
    data, found = [ids], {}
    for device in ("cpu", "cuda"):
        found[device] = run(tiny_llama(device), data, formats, decode=16, layers=True)
    for name in formats:
        cpu, gpu = (found[device][name] for device in ("cpu", "cuda"))
        assert gpu.overall.divergence.value == pytest.approx(cpu.overall.divergence.value, rel=0.1, abs=1e-3)
        assert gpu.layers[0].key == pytest.approx(cpu.layers[0].key, abs=0.1)
        assert gpu.layers[1].output == pytest.approx(cpu.layers[1].output, abs=0.5)
