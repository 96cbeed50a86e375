"""What SGLang does not compute of a family that the trainer trains exactly.

With a window that it ignores it starts and serves, with other log-probabilities than the trainer's.
With a context beyond the model's positions it does not start.
"""

from typing import Any

from msgspec import Struct

from forgemq_contracts.model_families import ENGINE_EXTRAS_MODEL_TYPES, MODEL_TYPES

WITHOUT_WINDOWS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Families whose classes in SGLang 0.5.23 attend to all ancestors, whatever window a model has."""

ON_GPUS_ONLY = ("gpt_oss",)
"""Families whose sinks its attention on a CPU does not have, with which it does not start."""


class Rotary(Struct, frozen=True, kw_only=True):
    """What is read of the scaling of a rotary embedding."""

    rope_type: Any = None
    type: Any = None
    """The name of `rope_type` in older configurations."""
    factor: Any = None
    """Transformers takes what is no number too, and warns."""


class FamilyConfig(Struct, frozen=True, kw_only=True):
    """What is read of a model's config.json."""

    model_type: str = ""
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_position_embeddings: int | None = None
    rope_scaling: Rotary | None = None
    rope_parameters: Rotary | None = None
    """The name of `rope_scaling` since transformers 5."""

    @property
    def positions(self) -> int | None:
        """Tokens of a context at most, as SGLang derives them; None if the file does not say."""
        if self.max_position_embeddings is None:
            return None
        rotary = self.rope_parameters or self.rope_scaling or Rotary()
        # Of yarn and llama3 the model's positions are those with the scaling.
        is_linear = "linear" in (rotary.rope_type, rotary.type)
        factor = rotary.factor if is_linear and isinstance(rotary.factor, int | float) else 1.0
        return int(self.max_position_embeddings * factor)

    @property
    def window(self) -> int | None:
        """Tokens that a query sees at most in some layer, if SGLang leaves that out; else None."""
        is_used = self.model_type == "mistral" or self.use_sliding_window
        return self.sliding_window if is_used and self.model_type in WITHOUT_WINDOWS else None


def check_family(config: FamilyConfig, *, context_tokens_max: int, has_gpu: bool) -> None:
    """Refuse a model of which an engine would compute something else.

    Args:
        config: Of the model.
        context_tokens_max: The run's; a window that holds as many tokens hides none.
        has_gpu: Whether all engines run on GPUs.

    Raises:
        ValueError: names the field and the rule.
    """
    if config.positions is not None and config.positions < context_tokens_max:
        raise ValueError(
            f"model.context_tokens_max must be at most the model's positions, {config.positions} "
            f"(max_position_embeddings in its config.json), got {context_tokens_max}: SGLang "
            "starts with no longer context; if the model takes more, write its positions there"
        )
    if config.window is not None and config.window < context_tokens_max:
        raise ValueError(
            f"model.context_tokens_max must be at most the model's sliding_window, "
            f"{config.window}, got {context_tokens_max}: SGLang ignores the window of a model of "
            f"type {config.model_type}"
        )
    if config.model_type in ON_GPUS_ONLY and not has_gpu:
        raise ValueError(
            f"model.path: a model of type {config.model_type} needs engines on GPUs: SGLang's "
            "attention on a CPU has no sinks"
        )


def check_format(model_type: str, quantization: str) -> None:
    """Refuse 8-bit weights of a family for which no test has tried them.

    Args:
        model_type: Of the model.
        quantization: `model.engine_quantization` of the run.

    Raises:
        ValueError: names the field and the rule.
    """
    is_tried = model_type not in MODEL_TYPES or model_type in ENGINE_EXTRAS_MODEL_TYPES
    if quantization != "none" and not is_tried:
        raise ValueError(
            f"model.engine_quantization must be none for a model of type {model_type}, got "
            f"{quantization}: supported for {', '.join(ENGINE_EXTRAS_MODEL_TYPES)}"
        )
