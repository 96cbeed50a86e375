"""Settings of a model by which SGLang would compute something else than transformers does.

One of the two ignores such a setting, so the engine would start, serve, and sample from another
model than the one that trains. Read from SGLang 0.5.23 and transformers 5.19.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forgemq_trainer.core.layers import SILU
from forgemq_trainer.model_sizes import SIGMOID_ROUTERS

GELU = ("gelu_pytorch_tanh",)
"""The activation of Gemma 3."""

PARTIAL_ROTARY = ("glm4_moe", "minimax_m2")
"""Families in which a part of a head may turn with its position. The classes of the others turn all
of it, whatever their configuration says, and SGLang's classes of some of them obey it."""

OFF = (None, False)
ONE = (None, 1)


@dataclass(frozen=True, slots=True)
class Rule:
    """Values of a field with which both compute the same.

    Attributes:
        kinds: Families, by their `model_type`.
        allowed: None among them if the field may be left out.
        why: What the two do otherwise.
    """

    kinds: tuple[str, ...]
    field: str
    allowed: tuple[object, ...]
    why: str


_HEAD = "SGLang has a head of its own, which a tied model's files do not fill"
_BIAS = "the class of transformers has no bias there, and SGLang one that no file fills"
_YARN = "one of transformers and SGLang ignores it"
_SIGMOID = "its class has no other"

RULES = (
    Rule(("llama",), "mlp_bias", OFF, "SGLang's MLP has no biases, and leaves them out"),
    Rule(("llama", "mistral"), "bias", OFF, _BIAS),
    Rule(("llama", "mistral"), "rope_is_neox_style", (None, True), "only SGLang reads it"),
    Rule(("mistral",), "attention_bias", OFF, _BIAS),
    Rule(("deepseek_v3",), "attention_bias", OFF, "SGLang's attention has none, and leaves it out"),
    Rule(("deepseek_v3",), "moe_layer_freq", ONE, "its class has experts in every layer"),
    Rule(("deepseek_v3",), "topk_method", (None, "noaux_tc"), _SIGMOID),
    Rule(SIGMOID_ROUTERS, "scoring_func", (None, "sigmoid"), _SIGMOID),
    Rule(("glm4_moe", "gpt_oss", "minimax_m2", "qwen3_moe"), "tie_word_embeddings", OFF, _HEAD),
    Rule(("gemma3_text",), "tie_word_embeddings", (True,), "SGLang never loads a head of its own"),
    Rule(("gpt_oss",), "swiglu_alpha", (None, 1.702), "SGLang does not read it"),
    Rule(("gpt_oss",), "hidden_act_alpha", (None, 1.702), "only SGLang reads it"),
    Rule(
        ("minimax_m2",), "use_qk_norm", (True,), "only SGLang reads it, and norms nothing without"
    ),
    Rule(
        ("minimax_m2",),
        "use_routing_bias",
        (True,),
        "only SGLang reads it, and chooses experts by no bias without",
    ),
)

ROTARY_RULES = {
    "attention_factor": (None,),
    "attn_factor": ONE,
    "extrapolation_factor": ONE,
}
"""Fields of a yarn rotary embedding, and the values with which both compute the same."""


def differences(config: Any) -> Iterator[str]:  # noqa: ANN401  # a configuration of transformers
    """Each setting of a supported family that the two read differently, with its value and why."""
    kind = config.model_type
    name, known = ("hidden_activation", GELU) if kind == "gemma3_text" else ("hidden_act", SILU)
    if (activation := getattr(config, name, None)) not in known:
        yield (
            f"{name} must be {known[0]} in a model of type {kind}, got {activation}: SGLang has no "
            "other"
        )
    for rule in RULES:
        value = getattr(config, rule.field, None)
        if kind in rule.kinds and value not in rule.allowed:
            wanted = next(each for each in rule.allowed if each is not None)
            yield (
                f"{rule.field} must be {wanted} in a model of type {kind}, got {value}: {rule.why}"
            )
    yield from _rotary(config)


def _rotary(config: Any) -> Iterator[str]:  # noqa: ANN401  # as above
    kind, rotary = config.model_type, getattr(config, "rope_parameters", None)
    by_layer = _by_layer(rotary)
    parts = {each.get("partial_rotary_factor") for each in by_layer.values()}
    parts.add(getattr(config, "partial_rotary_factor", None))
    if kind not in PARTIAL_ROTARY and (others := parts - {None, 1}):
        yield (
            f"partial_rotary_factor must be 1 in a model of type {kind}, got {others.pop()}: its "
            "class turns whole heads"
        )
    if kind == "minimax_m2":
        yield from _turned_part(config, by_layer[""].get("partial_rotary_factor") or 1)
    for layers, each in by_layer.items():
        rotary_type = each.get("rope_type", "default")
        if layers == "sliding_attention" and rotary_type != "default":
            yield (
                f"rope_type of {layers} must be default, got {rotary_type}: SGLang has no other in "
                "layers with a window"
            )
        if kind == "deepseek_v3" and rotary_type not in ("default", "yarn"):
            yield (
                f"rope_type must be default or yarn in a model of type {kind}, got {rotary_type}: "
                "SGLang takes every other for yarn"
            )
        if rotary_type == "yarn":
            yield from _scaled(each)


def _turned_part(config: Any, part: float) -> Iterator[str]:  # noqa: ANN401  # as above
    """What MiniMax-M2 says of the values of a head that turn: SGLang reads another field."""
    head = int(config.head_dim)
    told = getattr(config, "rotary_dim", None)
    if (head if told is None else told) != int(head * part):
        yield (
            f"rotary_dim must be {int(head * part)} in a model of type {config.model_type}, which "
            f"turns {part} of {head} values, got {told}: SGLang reads this field alone"
        )


def _scaled(rotary: Mapping[str, Any]) -> Iterator[str]:
    for name, allowed in ROTARY_RULES.items():
        if (value := rotary.get(name)) not in allowed:
            wanted = "left out" if allowed == (None,) else allowed[-1]
            yield f"{name} of a yarn rotary embedding must be {wanted}, got {value}: {_YARN}"
    scales = [rotary.get(name) for name in ("mscale", "mscale_all_dim")]
    if scales != [None, None] and not all(scales):
        yield (
            "mscale and mscale_all_dim of a yarn rotary embedding must both be left out or neither "
            f"be 0 or left out, got {scales[0]} and {scales[1]}: transformers ignores them "
            "otherwise, and SGLang does not"
        )


def _by_layer(rotary: object) -> dict[str, Mapping[str, Any]]:
    """The rotary embedding of each kind of layers that has its own; "" if all have one."""
    if not isinstance(rotary, dict):
        return {"": {}}
    nested: dict[str, Mapping[str, Any]] = {
        name: each for name, each in rotary.items() if isinstance(each, dict)
    }
    return nested or {"": rotary}
