"""Settings that transformers or SGLang ignores are refused; those of published models are taken."""

import pytest
import torch
from transformers import AutoConfig

from forgemq_trainer.engine_differences import differences
from forgemq_trainer.families import UnsupportedModelError, check_supported
from tests.unit.trainer.scene import make_model


def _yarn(**others: object) -> dict[str, object]:
    return {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    } | others


def _half_rotary(rope_type: str) -> dict[str, object]:
    scaled = {"factor": 2.0} if rope_type == "linear" else {}
    return {"rope_type": rope_type, "rope_theta": 1e4, "partial_rotary_factor": 0.5, **scaled}


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act must be silu in a model of type llama, got"),
        ("minimax_m2", {"hidden_act": "relu"}, "hidden_act must be silu in a .* minimax_m2, got"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation must be gelu_pytorch_t"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be sigmoid .* deepseek_v3"),
        ("llama", {"rope_parameters": _half_rotary("default")}, "partial_rotary_factor must be 1"),
        ("llama", {"rope_parameters": _half_rotary("linear")}, "partial_rotary_factor must be 1"),
        ("mistral", {"rope_parameters": _half_rotary("linear")}, "partial_rotary_factor must be 1"),
        ("llama", {"mlp_bias": True}, "^mlp_bias must be False in a model of type llama, got True"),
        ("llama", {"bias": True}, "^bias must be False in a model of type llama, got True"),
        ("mistral", {"attention_bias": True}, "^attention_bias must be False in .* mistral"),
        ("deepseek_v3", {"attention_bias": True}, "^attention_bias must be False in .* deepseek_v"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "^moe_layer_freq must be 1 .* got 2"),
        ("deepseek_v3", {"topk_method": "greedy"}, "^topk_method must be noaux_tc .* got greedy"),
        *(
            (kind, {"tie_word_embeddings": True}, "^tie_word_embeddings must be False .* got True")
            for kind in ("glm4_moe", "gpt_oss", "minimax_m2", "qwen3_moe")
        ),
        ("gemma3_text", {"tie_word_embeddings": False}, "^tie_word_embeddings must be True"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, r"^swiglu_alpha must be 1\.702 .* got 1\.5"),
        ("gpt_oss", {"hidden_act_alpha": 1.5}, r"^hidden_act_alpha must be 1\.702 .* got 1\.5"),
        ("minimax_m2", {"use_qk_norm": False}, "^use_qk_norm must be True .* got False"),
        ("minimax_m2", {"use_routing_bias": None}, "^use_routing_bias must be True .* got None"),
        ("minimax_m2", {"rotary_dim": 8}, "^rotary_dim must be 4 .* turns 0.5 of 8 .* got 8"),
        ("minimax_m2", {"rotary_dim": None}, "^rotary_dim must be 4 .* got None"),
        (
            "qwen3",
            {"rope_parameters": _yarn(attention_factor=1.0)},
            "^attention_factor .* left out",
        ),
        ("qwen2", {"rope_parameters": _yarn(attn_factor=0.5)}, r"^attn_factor .* be 1, got 0\.5"),
        (
            "llama",
            {"rope_parameters": _yarn(extrapolation_factor=0.5)},
            r"^extrapolation_factor .* must be 1, got 0\.5",
        ),
        *(
            (kind, {"rope_parameters": _yarn(**scales)}, "^mscale and mscale_all_dim of a yarn ")
            for kind in ("llama", "deepseek_v3")
            for scales in ({"mscale": 0.7}, {"mscale": 0.7, "mscale_all_dim": 0})
        ),
        ("llama", {"rope_is_neox_style": False}, "^rope_is_neox_style must be True .* got False"),
        ("deepseek_v3", {"rope_parameters": LINEAR}, "^rope_type must be default or yarn"),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": LINEAR,
                }
            },
            "^rope_type of sliding_attention must be default, got linear",
        ),
    ],
)
def test_a_setting_that_one_of_both_ignores_is_refused_by_name(
    kind: str, changes: dict[str, object], reason: str
) -> None:
    config = make_model(kind, torch.float32).config
    check_supported(config)
    changed = type(config).from_dict(config.to_dict() | changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(changed)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (  # Llama 3.1.
            "llama",
            {
                "attention_bias": False,
                "mlp_bias": False,
                "rope_scaling": {
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                    "rope_type": "llama3",
                },
                "rope_theta": 500000.0,
            },
        ),
        (  # Qwen2.5, as its page says to extend its context.
            "qwen2",
            {
                "rope_scaling": {
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                    "type": "yarn",
                },
                "tie_word_embeddings": True,
            },
        ),
        (  # DeepSeek-V3.
            "deepseek_v3",
            {
                "moe_layer_freq": 1,
                "rope_scaling": {
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "factor": 40,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 4096,
                    "type": "yarn",
                },
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
            },
        ),
        (  # MiniMax-M2.
            "minimax_m2",
            {
                "head_dim": 128,
                "rope_theta": 5000000,
                "rotary_dim": 64,
                "scoring_func": "sigmoid",
                "use_qk_norm": True,
                "use_routing_bias": True,
            },
        ),
        ("gpt_oss", {"swiglu_limit": 7.0}),
        (  # The text model of Gemma 3 4B.
            "gemma3_text",
            {
                "rope_local_base_freq": 10000.0,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "rope_theta": 1000000.0,
            },
        ),
        ("glm4_moe", {"partial_rotary_factor": 0.5, "rope_theta": 1000000}),
    ],
)
def test_what_published_models_say_is_taken(kind: str, fields: dict[str, object]) -> None:
    config = AutoConfig.for_model(kind, **fields)
    assert list(differences(config)) == []
    check_supported(config)
