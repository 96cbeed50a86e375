"""What a model contains by which tree training would not be exact, whatever its family is called.

Read from the fields of a configuration, and from the modules of a model, which may lie on torch's
meta device: nothing is loaded. What is not found here is not thereby exact; `families.py` accepts
only families that a test compares with per-request training.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from forgemq_trainer.core.precision import STATIC_ROTARY_TYPES
from forgemq_trainer.model_config import REFUSALS

EXACT_LAYERS = ("full_attention", "sliding_attention")
"""Layer types in which a token sees ancestors alone: all of them, or the nearest."""

STATE_NAMES = ("Conv", "Delta", "Mamba", "SSM", "Rwkv", "Recurrent", "Lightning", "LinearAttention")
"""Parts of the names of classes that carry a state along a sequence, or mix neighbours of one."""

_CAP = "no kernel here caps scores or logits"
OFF = {
    "attn_logit_softcapping": _CAP,
    "dual_chunk_attention_config": "engines attend in chunks by it, and the trainer does not",
    "final_logit_softcapping": _CAP,
    "logits_soft_cap": _CAP,
    "output_router_logits": "the balance loss would count shared tokens once",
    "router_jitter_noise": "a shared token is disturbed once",
    "use_bidirectional_attention": "a token would see what comes after it",
}
"""Fields that must be off or 0, and why."""

FACTORS = ("logits_scaling", "logit_scale")
POSITIONS = ("attn_temperature_tuning", "llama_4_scaling_beta")


def contents_of_configuration(config: object) -> list[str]:
    """Each field of a configuration that rules out exact training, with its value and why."""
    return list(_fields(config))


def contents_of_modules(model: nn.Module) -> list[str]:
    """Each kind of module that rules out exact training; one of each kind is named."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        what = _module(module)
        if what is not None:
            found.setdefault(what, name)
    return [f"{what} ({name})" for what, name in found.items()]


def contents_of_class(config: Any) -> list[str]:  # noqa: ANN401  # a configuration of transformers
    """As both functions before, of the class that a configuration builds; no weights exist."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (*REFUSALS, ImportError) as error:
        return [*contents_of_configuration(config), f"no causal language model: {error}"]
    return [*contents_of_configuration(config), *contents_of_modules(model)]


def _fields(config: object) -> Iterator[str]:
    yield from _dropouts(config)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(EXACT_LAYERS))
    if others:
        yield f"layer_types must be of {', '.join(EXACT_LAYERS)}, got {', '.join(others)}"
    for name, why in OFF.items():
        if value := getattr(config, name, None):
            yield f"{name} must be off, got {value}: {why}"
    if not getattr(config, "is_causal", True):
        yield "is_causal must be true, got false: a token would see what comes after it"
    for name in FACTORS:
        if (value := getattr(config, name, None)) not in (None, 1, 1.0):
            yield f"{name} must be 1, got {value}: the head multiplies weights alone"
    rotary = getattr(config, "rope_parameters", None)
    for name in POSITIONS:
        if getattr(config, name, None) or (isinstance(rotary, dict) and rotary.get(name)):
            yield f"{name} must be off: no test compares queries that are scaled by position"
    for kind in sorted(_rotary_types(rotary) - set(STATIC_ROTARY_TYPES)):
        yield (
            f"rope_type {kind} depends on the sequence, so a tree cannot share it; supported: "
            f"{', '.join(STATIC_ROTARY_TYPES)}"
        )


def _dropouts(config: object) -> Iterator[str]:
    for name, each in sorted(vars(config).items()):
        if name.endswith(("dropout", "pdrop")) and isinstance(each, int | float) and each:
            yield f"{name} must be 0, got {each}: a shared token drops once"


def _rotary_types(rotary: object) -> set[str]:
    if not isinstance(rotary, dict):
        return set()
    if isinstance(kind := rotary.get("rope_type"), str):
        return {kind}
    return {kind for each in rotary.values() for kind in _rotary_types(each)}


def _module(module: nn.Module) -> str | None:
    name = type(module).__name__
    if isinstance(module, nn.Dropout) and module.p:
        return f"{name} of {module.p}: a shared token drops once"
    if any(part in name for part in STATE_NAMES):
        return f"{name}: a state or a mixture along one sequence, which a branch would need too"
    return None
