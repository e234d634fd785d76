"""Generate with a real model, its KV cache in every format, side by side.

python examples/01_generate.py                          # SmolLM2-135M-Instruct, on a GPU where there is one
python examples/01_generate.py --model Qwen/Qwen3-0.6B --formats fp8_e4m3 balanced kv.yaml --max-new-tokens 128
"""

from __future__ import annotations

import argparse
import sys
import time

import smollm2
import torch
from transformers.utils import logging

import kvpass

PROMPT = "Explain in three sentences why the sky is blue."


def configuration(text: str) -> tuple[str, kvpass.KVQuantConfig]:
    try:
        return text, kvpass.KVQuantConfig.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub id or folder of a causal LM; default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--formats",
        nargs="+",
        type=configuration,
        default=[configuration(name) for name in kvpass.format_names()],
        help="names, pairs for K and V (fp8_e4m3/nvfp4), presets or configuration files; default: every name",
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=48, help="at least 2: the first comes from the prefill")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    logging.set_verbosity_error()

    model, tokenizer = smollm2.load(arguments.model, device=arguments.device)
    chat = [{"role": "user", "content": arguments.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    inputs = inputs.to(arguments.device)
    settings = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    length = inputs["input_ids"].shape[1]

    def text_and_seconds() -> tuple[str, float]:
        started = time.perf_counter()
        tokens = model.generate(**inputs, **settings)[0, length:]
        return tokenizer.decode(tokens, skip_special_tokens=True), time.perf_counter() - started

    print(f"\n{arguments.prompt}\n")
    text, seconds = text_and_seconds()
    print(f"transformers' own bf16 cache, not compiled ({seconds:.1f} s)\n    {text}\n")
    for name, config in arguments.formats:
        kvpass.enable(model, config)
        print(f"{name}: compiling the decode step ...", end="", flush=True, file=sys.stderr)
        _, first = text_and_seconds()
        print(f" {first:.1f} s with the first answer", file=sys.stderr)
        text, seconds = text_and_seconds()
        report = kvpass.report(model)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        print(
            f"{name}: {report.cache_bytes // report.cache_slots:,} bytes per token, cache {report.cache_bytes:,} bytes "
            f"for {report.cache_slots} tokens, {report.fused} of {layers} layers fused ({seconds:.1f} s)\n    {text}\n"
        )
    kvpass.disable(model)


if __name__ == "__main__":
    main()
