"""Models that benchmarks run: one of your own, or a shape with random weights, which needs no download."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from kvpass.fx_passes.stack import local

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}


def load_config(model: str) -> PreTrainedConfig:
    """The configuration of a name in :data:`SHAPES`, a local folder, or a model on the hub.

    Raises:
        ValueError: It is none of these.
    """
    if model in SHAPES:
        return LlamaConfig(**SHAPES[model])
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model {model!r} is no shape ({', '.join(SHAPES)}), and transformers finds no folder or hub model of that "
            f"name: {' '.join(str(error).split())[:200]}"
        ) from error
    return config


def load_model(
    model: str, dtype: torch.dtype, device: torch.device, ranks: int = 1, device_map: str | None = None
) -> PreTrainedModel:
    """The model itself, in eval mode; a shape of :data:`SHAPES` gets random weights, the same each time.

    Args:
        model: As :func:`load_config` takes it.
        dtype: Of the weights.
        device: Where they are; with several ranks this rank's.
        ranks: Tensor-parallel ranks that transformers splits the model among. Each of them makes all of a shape's
            weights first, so that they are those of one process.
        device_map: ``auto`` to have accelerate deal the layers out to all GPUs.
    """
    config = load_config(model)
    split: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=ranks)} if ranks > 1 else {}
    split |= {"device_map": device_map} if device_map else {}
    if model not in SHAPES:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **split)
        return cast(PreTrainedModel, (loaded if split else loaded.to(device)).eval())
    torch.manual_seed(0)
    with torch.device(device):
        made: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if split:
        # In a wider dtype: what would be taken as it is, is taken as a view, and keeps the whole in memory.
        wider = torch.float64 if dtype == torch.float32 else torch.float32
        whole = {name: value.to(wider) for name, value in made.state_dict().items()}
        made = type(made).from_pretrained(None, config=config, state_dict=whole, dtype=dtype, **split)
    return cast(PreTrainedModel, made.eval())


def streamed_bytes(model: Any) -> int:
    """Bytes of weights that a decode step has to read on this rank: all but an input embedding that is not also the
    output's."""
    total = sum(local(parameter).nbytes for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding
    return int(total if is_tied else total - local(embedding).nbytes)
