"""Which models of transformers can have a quantized cache: each of its generative architectures is tried or refused."""

import inspect

import compatibility_table
import pytest
import torch
import transformers
from architectures import DECODERS, ENCODER_DECODERS, OTHERS, VOCABULARY, Architecture
from test_compatibility import GENERATED, ROUNDING
from transformers import GenerationMixin
from transformers.models.auto import modeling_auto
from trial import errors

import kvpass
from kvpass.architecture import _GENERATES_WITH

pytestmark = pytest.mark.usefixtures("no_code_is_generated")

# Those of OTHERS; which of DECODERS are, and why, is in docs/compatibility.md.
REFUSED = {
    **dict.fromkeys(("OpenAIGPT", "Reformer", "Rwkv", "XLNet"), "takes no KV cache"),
    **dict.fromkeys(("FalconMamba", "Mamba", "Mamba2", "xLSTM"), "no attention layers|no KV cache"),
    **dict.fromkeys(("AXK2", "Dots3Note", "GlmMoeDsa", "HYV4", "HYV4VL", "MistralLarge4"), "keeps more than K and V"),
    **dict.fromkeys(("Inkling2", "Inkling2Loop", "Moshi"), "leave the sliding window to the cache"),
    **dict.fromkeys(("FSMT", "LED"), "it would attend to empty slots"),
    **dict.fromkeys(("Git", "ProphetNet"), "takes no mask but"),
    "Blt": "several caches",
    "Mllama": "keeps K and V of images",
    "UnlimitedOcr": "keeps more than K and V",
    "XLM": "keeps no K and V",
}
if not compatibility_table.is_of_this_version():
    REFUSED |= dict.fromkeys(("BigBird", "MegatronBert", "RemBert", "RoFormer"), "it would attend to empty slots")
# Architectures without a tiny model here, and why.
UNTRIED = {
    **dict.fromkeys(
        "Apertus1p5 CohereCompass Dots3Note FastVlm Florence2 Gemma3n Inkling Inkling2 Inkling2Loop Janus Llama4 "
        "PerceptionLM VibeVoiceAsr".split(),
        "its text model is tried",
    ),
    **dict.fromkeys(
        "EncoderDecoder Idefics Kosmos2_5 Musicgen MusicgenMelody Nemotron3_5Transcribe NemotronH_Omni_Reasoning_V3_ "
        "Pix2Struct PPFormulaNet Udop VisionEncoderDecoder VoxtralRealtime Whisper".split(),
        "it does not take text alone",
    ),
    **dict.fromkeys(
        "Cosmos3Edge Dbrx DeepseekOcr2 Ernie4_5_VLMoe Evolla Gemma4Assistant Gemma4UnifiedAssistant Glm5Next "
        "Granite4Vision Mistral4 Molmo2 MuseGlimmer MuseSpark Qwen2_5OmniThinker Qwen3OmniMoeThinker Qwen4Exp "
        "Qwen4ExpText Zamba2".split(),
        "its configuration needs more settings, or cannot be small",
    ),
    "PaliGemma": "it has a test of its own below",
}


@pytest.mark.parametrize("architecture", OTHERS, ids=lambda a: a.name)
def test_it_is_right_or_refused(architecture):
    if not hasattr(transformers, architecture.config):
        pytest.skip(f"transformers {transformers.__version__} has no {architecture.config}")
    model = architecture.model()
    if reason := REFUSED.get(architecture.name):
        with pytest.raises(NotImplementedError, match=reason):
            kvpass.enable(model, "bf16")
        return
    error, generate_error = errors(model)
    assert error < ROUNDING and generate_error < GENERATED


def _generative():
    """Configuration and model class of each architecture that transformers generates text with."""
    names = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
    for mapping in (getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING") for name in names):
        for config, kinds in mapping.items():
            for kind in kinds if isinstance(kinds, tuple) else (kinds,):
                if issubclass(kind, GenerationMixin):
                    yield config, kind


@pytest.mark.skipif(not compatibility_table.is_of_this_version(), reason="other transformers have other models")
def test_each_of_transformers_is_known():
    """Where this fails for a new one: add it to OTHERS or DECODERS of architectures.py, and see what becomes of it."""
    known = {a.config for a in (*DECODERS, *ENCODER_DECODERS, *OTHERS)}
    handing_over = {config.__name__ for config, _ in _generative() if config.model_type in _GENERATES_WITH}
    assert {config.__name__ for config, _ in _generative()} - known - handing_over == {
        f"{name}Config" for name in UNTRIED
    }


def test_each_that_generates_with_a_part_is_refused_itself():
    """Its own `generate` would make no cache, and the report would say "enabled" of a model that is not."""
    own = {c.model_type for c, kind in _generative() if "super().generate" not in inspect.getsource(kind.generate)}
    plain = {c.model_type for c, kind in _generative() if kind.generate is GenerationMixin.generate}
    makes_a_cache_itself = {"musicgen", "musicgen_melody", "whisper"}
    assert own - plain - makes_a_cache_itself <= _GENERATES_WITH.keys()


def test_the_part_it_generates_with_can_be_enabled():
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = Architecture("OPTConfig").configuration()
    config = transformers.Blip2Config(
        text_config=text.to_dict(),
        vision_config={**small, "image_size": 16, "patch_size": 8},
        qformer_config={**small, "encoder_hidden_size": 64},
        num_query_tokens=4,
        image_token_index=VOCABULARY - 1,
    )
    torch.manual_seed(0)
    model = transformers.Blip2ForConditionalGeneration(config).eval()
    with pytest.raises(NotImplementedError, match=r"a part of it, .* kvpass.enable\(model.language_model,"):
        kvpass.enable(model, "bf16")
    image = torch.randn(1, 3, 16, 16)
    ids = torch.tensor([[VOCABULARY - 1] * 4 + [5, 6, 7]])
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(pixel_values=image, input_ids=ids, **settings)
    kvpass.enable(model.language_model, "bf16")
    assert torch.equal(model.generate(pixel_values=image, input_ids=ids, **settings), expected)
    assert kvpass.report(model.language_model).fused == 2


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("RobertaConfig", {}, "roberta attends to later tokens too"),
        ("BertConfig", {}, "bert attends to later tokens too, so it has no KV cache, unless .* is_decoder=True"),
        ("DoryConfig", {"recurrent_kv_cache_mode": "last_loop"}, "recurrent_kv_cache_mode='last_loop'; .* 'per_loop'"),
        ("FlaubertConfig", {}, "flaubert keeps no K and V"),
        ("Qwen3VLMoeTextConfig", {"sliding_window": 16}, "leave the sliding window to the cache"),
        ("Qwen3OmniMoeTextConfig", {"sliding_window": 16}, "leave the sliding window to the cache"),
    ],
)
def test_settings_that_are_refused(name, settings, message):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with pytest.raises(NotImplementedError, match=message):
        kvpass.QuantizedCache(getattr(transformers, name)(**settings), "bf16", max_cache_len=32)


def test_paligemma_needs_to_know_what_is_the_prompt():
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    text = Architecture("GemmaConfig").configuration()
    config = transformers.PaliGemmaConfig(
        text_config=text.to_dict(),
        vision_config={**vision, "intermediate_size": 64, "image_size": 16, "patch_size": 8},
        projection_dim=64,
        image_token_id=VOCABULARY - 1,
    )
    torch.manual_seed(0)
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    ids = torch.tensor([[VOCABULARY - 1] * 4 + [5, 6, 7]])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}
    inputs |= {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, token_type_ids=torch.zeros_like(ids))
    kvpass.enable(model, "bf16")
    assert torch.equal(model.generate(**inputs, token_type_ids=torch.zeros_like(ids)), expected)
    with pytest.raises(ValueError, match="paligemma needs token_type_ids"):
        model.generate(**inputs)
