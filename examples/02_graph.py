"""Print one layer's attention in the graph that torch.compile captures, before and after the kvquant pass.

    python examples/02_graph.py [FORMAT]

Needs no download: the model is a small Llama with random weights.
"""

from __future__ import annotations

import argparse

import torch
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import kvpass
from kvpass.backend import kvquant

CONFIG = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, vocab_size=1000,
)  # fmt: skip


def around_the_attention(graph: fx.Graph) -> str:
    """The nodes of the first layer from the one that writes the cache to the output projection."""
    lines, writing = [], False
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        writing = writing or name == "store.default"
        if writing:
            inputs = ", ".join(str(i) for i in node.all_input_nodes)
            lines.append(f"  {node.name:22} = {name}({inputs})".replace("l_kwargs_past_key_values_layers_0_", ""))
        if writing and name == "contiguous":
            break
    return "\n".join(lines)


def main() -> None:
    logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("format", nargs="?", default="nvfp4", choices=kvpass.format_names())
    name = parser.parse_args().format
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(CONFIG).to(device, torch.bfloat16).eval()
    cache = kvpass.QuantizedCache(model.config, name, max_cache_len=64)

    def show(gm: fx.GraphModule, inputs: list[torch.Tensor]):
        print(f"before the pass\n{around_the_attention(gm.graph)}\n")
        compiled = kvquant(gm, inputs)
        print(f"after the pass\n{around_the_attention(gm.graph)}\n")
        return compiled

    ids = torch.randint(0, 1000, (1, 16), device=device)
    with torch.no_grad():
        model(ids, past_key_values=cache)  # the prefill, eagerly, as `generate` runs it
        torch.compile(model, backend=show)(ids[:, :1], past_key_values=cache)
    print(kvpass.report(model))


if __name__ == "__main__":
    main()
