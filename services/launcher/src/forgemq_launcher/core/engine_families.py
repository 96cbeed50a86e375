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


POSITIONS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
"""Fields of config.json that bound a context for SGLang 0.5.23; the first that is there holds."""


class Rotary(Struct, frozen=True, kw_only=True):
    """What is read of the scaling of a rotary embedding."""

    rope_type: Any = None
    type: Any = None
    """The name of `rope_type` in older configurations."""
    factor: Any = None
    """Transformers takes what is no number too, and warns."""
    original_max_position_embeddings: Any = None
    full_attention: Any = None
    """Of Gemma 3: that of its layers without a window."""


class FamilyConfig(Struct, frozen=True, kw_only=True):
    """What is read of a model's config.json."""

    model_type: str = ""
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_sequence_length: float | None = None
    seq_length: float | None = None
    max_seq_len: float | None = None
    model_max_length: float | None = None
    max_position_embeddings: int | None = None
    rope_scaling: Rotary | None = None
    rope_parameters: Rotary | None = None
    """The name of `rope_scaling` since transformers 5."""

    @property
    def positions(self) -> tuple[str, int] | None:
        """The field with a context's most tokens, and their number, as SGLang derives them.

        None if the file does not say.
        """
        named = next((name for name in POSITIONS if getattr(self, name) is not None), None)
        if named is None:
            return None
        return named, int(getattr(self, named) * self._stretch)

    @property
    def _stretch(self) -> float:
        """What multiplies the positions: of yarn and llama3 they are those with the scaling."""
        rotary = self.rope_parameters or self.rope_scaling or Rotary()
        is_linear = "linear" in (rotary.rope_type, rotary.type)
        # Of Gemma 3 the scaling is that of some layers, where SGLang does not look for it.
        is_read = self.model_type != "gemma3_text" and not rotary.original_max_position_embeddings
        is_number = isinstance(rotary.factor, int | float)
        return float(rotary.factor) if is_linear and is_read and is_number else 1.0

    @property
    def has_scaling_by_layers(self) -> bool:
        """Whether layers without a window have a rotary scaling that the others have not."""
        rotary = self.rope_parameters or self.rope_scaling or Rotary()
        of_layers = rotary.full_attention
        own = of_layers.get("rope_type") if isinstance(of_layers, dict) else rotary.rope_type
        return self.model_type == "gemma3_text" and own not in (None, "default")

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
    named = config.positions
    if named is not None and named[1] < context_tokens_max:
        raise ValueError(
            f"model.context_tokens_max must be at most the model's positions, {named[1]} "
            f"({named[0]} in its config.json), got {context_tokens_max}: SGLang "
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
    if config.has_scaling_by_layers and not has_gpu:
        raise ValueError(
            f"model.path: a model of type {config.model_type} with a rotary scaling needs engines "
            "on GPUs: SGLang ignores the scaling on a CPU with AMX"
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
