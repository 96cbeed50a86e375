"""Which families of models train on trees, and why known others do not.

A family is the `model_type` of a config.json, as transformers has it. Each supported one has a test
that compares it with per-request training (`tests/unit/trainer/test_equivalence.py`).
"""

MODEL_TYPES = (
    "deepseek_v3",
    "gemma3_text",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "minimax_m2",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""Families that train exactly on trees."""

ENGINE_EXTRAS_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families that engines may hold in 8-bit blocks, and for which a draft head may train. No test has
tried either with the others."""

_LINEAR = (
    "some of its layers have linear attention and a convolution, whose state runs along one "
    "sequence and would have to be kept at every branch of a tree"
)
_RECURRENT = "its layers carry a recurrent state, which would have to be kept at every branch"
_SPARSE_KEYS = "a query picks its keys by a score over all of them, which tree attention has not"
_IMAGES = "tokens of an image see one another in both directions, and trees hold text alone"

REFUSED_MODEL_TYPES = {
    "deepseek_v32": _SPARSE_KEYS,
    "gemma2": "its attention caps the scores and its head caps the logits, and no kernel here does",
    "gemma3": f"{_IMAGES}; its text model alone, saved as gemma3_text, is supported",
    "glm_moe_dsa": _SPARSE_KEYS,
    "gpt2": "it has dropout and layer norms, and no test compares it with per-request training",
    "jamba": _RECURRENT,
    "kimi_linear": _LINEAR,
    "llama4_text": "its layers attend within chunks, and scale queries by their position",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "minimax": _LINEAR,
    "ministral3": "it scales queries by their position, which no test has compared",
    "mixtral": "no test compares it with per-request training",
    "phi3": "its rotary scaling may depend on the length of the sequence",
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
}
"""Families that are refused, and why."""


def refusal(model_type: str) -> str:
    """Why a family is refused, to follow its name; for one that no table names, what is lacking."""
    reason = REFUSED_MODEL_TYPES.get(
        model_type, "no test compares this family with per-request training"
    )
    return f"not supported for tree training: {reason}; supported: {', '.join(MODEL_TYPES)}"
