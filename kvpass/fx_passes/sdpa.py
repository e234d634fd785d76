"""Recognize ``scaled_dot_product_attention``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from kvpass.fx_passes.forms import Added, Attention, example, number

SDPA = torch.nn.functional.scaled_dot_product_attention


def find(graph: fx.Graph) -> list[Attention]:
    """Every ``scaled_dot_product_attention`` of ``graph``."""
    return [_recognize(node) for node in graph.find_nodes(op="call_function", target=SDPA)]


def is_causal(node: fx.Node) -> bool:
    """Whether ``node`` is a call with ``is_causal=True``."""
    return node.target is SDPA and bool(_arguments(node)["is_causal"])


def _recognize(node: fx.Node) -> Attention:
    call = _arguments(node)
    query, mask = call["query"], call["attn_mask"]
    scale, obstacle = 1 / math.sqrt(example(query).shape[-1]), None
    if call["scale"] is not None:
        if (given := number(call["scale"])) is None:
            obstacle = "the softmax scale is a tensor"
        else:
            scale = given
    if call["dropout_p"] != 0.0:
        obstacle = f"dropout_p is {call['dropout_p']}; only 0.0 can be fused (call model.eval())"
    elif call["is_causal"]:
        obstacle = "is_causal=True counts from the cache's first slot, not from the newest token; pass a mask"
    added = () if mask is None else (Added(mask),)
    return Attention(node, query, call["key"], call["value"], scale, added, obstacle=obstacle)


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    return defaults | dict(zip(names, node.args, strict=False)) | node.kwargs
