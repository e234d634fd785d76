"""Fixtures shared by all tests: a tiny model and tokenizer, interruption, and what to do without a GPU."""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    # Triton kernels run in its interpreter; this must be set before triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-compatibility", action="store_true", help="write docs/compatibility.md; needs -n 0")


_found: dict[str, dict[str, dict[str, str]]] = {}


@pytest.fixture
def compatibility(request: pytest.FixtureRequest):
    """Compares cells of docs/compatibility.md with what a test found, or records them for the file to be written."""
    import compatibility_table

    def check(section: str, name: str, **cells: str) -> None:
        if request.config.getoption("--write-compatibility"):
            _found.setdefault(section, {}).setdefault(name, {}).update(cells)
            return
        if not compatibility_table.is_of_this_version():
            return
        row = compatibility_table.read()[section].get(name, {})
        assert {column: row.get(column) for column in cells} == cells, "pytest --write-compatibility writes the table"

    return check


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _found and exitstatus == 0:
        import compatibility_table

        compatibility_table.write(_found)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test compiles for itself, and counts its own graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    """Triton's interpreter prepares `triton.language` once a launch, and not at every call of a device function too.

    It undoes that after the launch only, and takes a third of its time to do the same again.
    """
    if not os.environ.get("TRITON_INTERPRET") or find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    launch, patch, done = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launch_anew(self, *args, **kwargs):
        done.clear()
        return launch(self, *args, **kwargs)

    def patch_once(function):
        if id(function.__globals__) in done:
            return None  # which callers of device functions ignore; a launch finds nothing done
        done.add(id(function.__globals__))
        return patch(function)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture
def no_code_is_generated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the rewritten graph runs as it is: what Inductor makes of it is test_backend.py's matter."""
    from kvpass import backend

    if "gpu" not in request.keywords:
        monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, mode, patches: gm)


@pytest.fixture
def tiny_llama():
    """Makes a two-layer Llama with random weights: 4 query and 2 KV heads unless told otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0, **overrides):
        settings = {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 512,
            "initializer_range": 0.2,  # large enough for attention to matter
        }
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(settings | overrides)))
        return model.to(device, dtype).eval()

    return make


@pytest.fixture
def tokenizer():
    """One token a byte, ids from 1 to 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i + 1 for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def stopped():
    """Interrupts a model before the forward after ``after`` ones; the list it gives grows with each forward."""

    @contextmanager
    def stop(model, after=None):
        calls = []

        def count(*_):
            if len(calls) == after:
                raise KeyboardInterrupt
            calls.append(1)

        handle = model.register_forward_pre_hook(count)
        yield calls
        handle.remove()

    return stop
