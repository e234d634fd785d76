"""Architectures of transformers, as tiny models with random weights: what the compatibility tests run over."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, PreTrainedConfig

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
        return _tiny(getattr(transformers, self.config), copy.deepcopy(self.settings))  # rope_parameters are written to

    def model(self) -> Any:
        """The tiny model, in fp32 on the CPU."""
        torch.manual_seed(0)
        config = self.configuration()
        autos = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText)
        autos = autos[1:] if config.is_encoder_decoder else autos
        auto = next(auto for auto in autos if type(config) in auto._model_mapping)
        return auto.from_config(config, attn_implementation=self.attention).eval()


def _tiny(kind: type[PreTrainedConfig], settings: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of these settings and the usual ones; those of its parts too, where they are configurations."""
    known = kind()
    parts = {name: getattr(known, name, None) for name in kind.sub_configs}
    usual = {name: value for name, value in _SETTINGS.items() if _has_field(known, name)}
    usual |= {name: _tiny(type(p), {}) for name, p in parts.items() if isinstance(p, PreTrainedConfig)}
    for name in usual.keys() & settings.keys():
        if isinstance(usual[name], PreTrainedConfig):
            settings = settings | {name: _tiny(type(usual[name]), settings[name])}
    return kind(**usual | settings)


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


def _all(names: str, **settings: Any) -> list[Architecture]:
    return [Architecture(f"{name}Config", settings) for name in names.split()]


_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_LOOPED = {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3}
_FOUR_HYBRIDS = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2}
_SHARING = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _MIXED["layer_types"] * 2}


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    """Settings of rotary embedding by time, height and width, so many pairs of channels each."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}, **more}


_COMPASS = {"sliding_attention": _mrope(4, 2, 2)["rope_parameters"], "full_attention": None}
# Not in docs/compatibility.md: most share their code with one that is, or are seldom used. Logits are compared all the
# same (tests/test_architecture.py). Models of images get text alone.
OTHERS = [
    *_all("Apertus1p5Text AriaText AXK2 Beam BitNet Blt Cohere2Moe CTRL Cwm Ernie4_5_Moe Exaone ExaoneMoe FalconMamba"),
    *_all("FlexOlmo Flint Fuyu Gemma4UnifiedText Git Glm4Moe GlmMoeDsa GPTNeoXJapanese GraniteSWA GraniteMoeSWA"),
    *_all("GraniteMoeShared HunYuanMoEV1 HYV3 HYV4 HyperCLOVAX Inkling2Text Inkling2LoopText InternLM3"),
    *_all("IQuestCoder Jais2 Kolibri1 Laguna LaraMini Mamba Mellum MiMoV2Flash Ministral3 ModernBertDecoder Moshi"),
    *_all("NanoChat OpenAIGPT Phi4Multimodal Rwkv SarvamMoE SolarOpen TrOCR VaultGemma XLM XLNet xLSTM"),
    *_all("AXK1 Glm4MoeLite MiniCPM3 SarvamMLA Youtu", **_mla()),
    *_all("Bert BertGeneration Camembert Data2VecText Electra Ernie MegatronBert RemBert Roberta", is_decoder=True),
    *_all("RobertaPreLayerNorm RoCBert RoFormer XLMRoberta XLMRobertaXL", is_decoder=True),
    *_all("BigBird", is_decoder=True, attention_type="original_full"),
    *_all("Xmod", is_decoder=True, default_language="en_XX"),
    *_all("Reformer", is_decoder=True, attn_layers=["local", "local"], axial_pos_embds=False),
    *_all("BailingHybrid KimiLinear", **_LINEAR, **_mla()),
    *_all("Dory", **_LOOPED, layer_types=["sliding_attention", "full_attention", "full_attention"], head_dim=32),
    *_all("CohereCompassText", **_MIXED, rope_parameters=_COMPASS),
    *_all("Dots3NoteText", num_key_value_heads=4),
    *_all("Gemma3nText", **_SHARING, activation_sparsity_pattern=[0.0] * 4, intermediate_size=[128] * 4),
    *_all("HrmText", L_cycles=1),  # every time round multiplies what the rounding of K and V costs
    *_all("Lfm2Moe", layer_types=["conv", "full_attention"]),
    *_all("Mamba2", num_heads=8, head_dim=16),
    *_all("Qwen3_5MoeText", **_LINEAR),
    *_all("RecurrentGemma", block_types=["recurrent", "attention"]),
    *_all("Zaya", num_experts_per_tok=1),
    *_all("Zamba", **_FOUR_HYBRIDS, n_mamba_heads=2, mamba_d_state=8, use_mamba_kernels=False),
    # encoder-decoders, and what transformers lists among them
    *_all("AudioFlamingo3 BigBirdPegasus Blenderbot BlenderbotSmall FSMT GlmAsr GraniteSpeech GraniteSpeechPlus LED"),
    *_all("LongT5 M2M100 MossTranscribeDiarize MT5 MusicFlamingo Mvp NllbMoe OmniASR PegasusX PLBart ProphetNet"),
    *_all("Qwen2Audio Qwen3ASR SeamlessM4T SeamlessM4Tv2 SwitchTransformers T5Gemma Voxtral", decoder_start_token_id=3),
    *_all("T5Gemma2", decoder=_MIXED, encoder={"text_config": _MIXED}),
    # images and text
    *_all(
        "Aria AyaVision Cohere2Vision Cosmos3Omni DeepseekVL DeepseekVLHybrid Exaone4_5_ Gemma3 Gemma4 Gemma4Unified"
    ),
    *_all("GotOcr2 HYV4VL HyperCLOVAXVisionV2 Idefics2 Idefics3 InternVL Lfm2Vl LightOnOcr Llava LlavaNext"),
    *_all(
        "LlavaNextVideo LlavaOnevision MiniMaxM3VL Mistral3 Mllama Ovis2 PPChart2Table QianfanOCR Qwen3VL ShieldGemma2"
    ),
    *_all("SmolVLM Step3p7 UnlimitedOcr VideoLlama3 VideoLlava VipLlava"),
    *_all("Glm46V Glm4v Glmga GlmOcr HunYuanVL PaddleOCRVL Qwen2_5_VL Qwen2VL", text_config=_mrope(2, 3, 3)),
    *_all("Glm4vMoe", text_config=_mrope(1, 1, 2)),
    *_all("MiniCPMOcr MiniCPMV4_6 MiniCPMV4_7 Qwen3_5 Qwen3_5Moe", text_config=_LINEAR),
    *_all("Kimi_K25 MistralLarge4", text_config=_mla()),
    *_all("Chameleon Emu3", vocabulary_map={"<image>": 4}),
    *_all("GraniteDocling", vision_config={"out_hidden_size": 64}),
    *_all("Lfm3Vl", text_config=_MIXED),
    *_all("Qwen3VLMoe", text_config={"sliding_window": None}),
]
