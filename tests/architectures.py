"""Architectures of transformers, as tiny models with random weights: what the compatibility tests run over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

VOCABULARY = 128
WINDOW = 16
# What a configuration is made with, as far as its class has such a field.
_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "global_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),  # large enough for attention to matter
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "initializer_factor": 8.0,
}


@dataclass(frozen=True)
class Architecture:
    """One model class of transformers.

    Attributes:
        config: Name of its configuration class.
        settings: Fields of the configuration beyond the usual ones, or in their place.
        attention: Other attention implementation than transformers' default.
    """

    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    attention: str | None = None

    @property
    def name(self) -> str:
        """The configuration's name without what all of them end in."""
        return self.config.removesuffix("Config").removesuffix("Text") + (
            f"-{self.attention}" if self.attention else ""
        )

    def configuration(self) -> PreTrainedConfig:
        """The configuration of the tiny model."""
        kind = getattr(transformers, self.config)
        known = kind()
        settings = {name: value for name, value in _SETTINGS.items() if _has_field(known, name)} | self.settings
        return kind(**settings)

    def model(self) -> Any:
        """The tiny model, in fp32 on the CPU."""
        torch.manual_seed(0)
        config = self.configuration()
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        return auto.from_config(config, attn_implementation=self.attention).eval()


def _has_field(config: PreTrainedConfig, name: str) -> bool:
    if getattr(config, "is_heterogeneous", False) and name in type(config).__annotations__:
        return True  # its value differs from layer to layer, and asking for it is an error
    return hasattr(config, name) and not isinstance(getattr(type(config), name, None), property)


def _mla(**more: Any) -> dict[str, Any]:
    """Settings of multi-head latent attention."""
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    return {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, **ranks, **more}


_MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
DECODERS = [
    Architecture("AfmoeConfig"),
    Architecture("ApertusConfig"),
    Architecture("ArceeConfig"),
    Architecture(
        "BambaConfig", {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8}
    ),
    Architecture("BioGptConfig"),
    Architecture("BloomConfig"),
    Architecture("CodeGenConfig"),
    Architecture("CpmAntConfig"),
    Architecture("CohereConfig"),
    Architecture("Cohere2Config", _MIXED),
    Architecture("DeepseekV2Config", _mla()),
    Architecture("DeepseekV3Config", _mla()),
    Architecture("DeepseekV32Config", _mla(index_head_dim=16, index_n_heads=2, index_topk=8)),
    Architecture("DeepseekV4Config"),
    Architecture("DiffLlamaConfig"),
    Architecture("DogeConfig"),
    Architecture("Dots1Config", {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    Architecture("Ernie4_5Config"),
    Architecture("Exaone4Config", _MIXED),
    Architecture("FalconConfig"),
    Architecture("FalconH1Config", {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8}),
    Architecture("GemmaConfig"),
    Architecture("Gemma2Config", _MIXED),
    Architecture("Gemma3TextConfig", _MIXED),
    Architecture("Gemma4TextConfig", {"global_head_dim": 16, **_MIXED}),
    Architecture("GlmConfig"),
    Architecture("Glm4Config"),
    Architecture("GPT2Config"),
    Architecture("GPTBigCodeConfig"),
    Architecture("GPTJConfig"),
    Architecture("GPTNeoConfig", {"attention_types": [[["global", "local"], 1]]}),
    Architecture("GPTNeoXConfig"),
    Architecture("GptOssConfig", _MIXED),
    Architecture("GraniteConfig"),
    Architecture("GraniteMoeConfig"),
    Architecture(
        "GraniteMoeHybridConfig", {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32}
    ),
    Architecture("HeliumConfig"),
    Architecture("HunYuanDenseV1Config"),
    Architecture("InklingTextConfig", {"layer_types": ["hybrid_sliding", "hybrid"]}),
    Architecture("JambaConfig", {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    Architecture("JetMoeConfig", {"kv_channels": 16, "num_key_value_heads": 4}),
    Architecture("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    Architecture("Lfm3Config", {"layer_types": ["sliding_attention", "full_attention"]}),
    Architecture("LlamaConfig"),
    Architecture("LlamaConfig", attention="eager"),
    Architecture(
        "Llama4TextConfig", {"layer_types": ["chunked_attention", "full_attention"], "intermediate_size_mlp": 128}
    ),
    Architecture("LongcatFlashConfig", _mla(zero_expert_num=2, moe_topk=2)),
    Architecture("MiniMaxConfig"),
    Architecture("MiniMaxM2Config"),
    Architecture("MiniMaxM3VLTextConfig"),
    Architecture("MinistralConfig"),
    Architecture("MistralConfig"),
    Architecture("MixtralConfig"),
    Architecture("MptConfig"),
    Architecture("NemotronConfig"),
    Architecture("NemotronHConfig", {"layer_types": ["linear_attention", "full_attention"]}),
    Architecture("OlmoConfig"),
    Architecture("Olmo2Config"),
    Architecture("Olmo3Config", _MIXED),
    Architecture("OlmoHybridConfig", {"layer_types": ["linear_attention", "full_attention"]}),
    Architecture("OlmoeConfig"),
    Architecture("OPTConfig"),
    Architecture("PersimmonConfig"),
    Architecture("PhiConfig"),
    Architecture("Phi3Config"),
    Architecture("PhimoeConfig"),
    Architecture("Qwen2Config", {"use_sliding_window": True, **_MIXED}),
    Architecture("Qwen2MoeConfig"),
    Architecture("Qwen3Config"),
    Architecture("Qwen3MoeConfig"),
    Architecture("Qwen3_5TextConfig", {"layer_types": ["linear_attention", "full_attention"]}),
    Architecture("Qwen3NextConfig", {"layer_types": ["linear_attention", "full_attention"]}),
    Architecture("SeedOssConfig"),
    Architecture("SmolLM3Config"),
    Architecture("StableLmConfig"),
    Architecture("Starcoder2Config"),
    Architecture("XGLMConfig", {"attention_heads": 4}),
]
ENCODER_DECODERS = [
    Architecture("BartConfig"),
    Architecture("MarianConfig"),
    Architecture("MBartConfig"),
    Architecture("PegasusConfig"),
    Architecture("T5Config", {"decoder_start_token_id": 3}),
    Architecture("UMT5Config", {"decoder_start_token_id": 3}),
]
