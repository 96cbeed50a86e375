"""What an SGLang server says of itself, and why it cannot serve a lane of a run."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from forgemq_contracts.run import Model

Positive: TypeAlias = Annotated[int, Meta(ge=1)]

_FORMATS = {"fp8_blocks": "fp8"}
"""SGLang's names of formats, by the run's."""
_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
"""Fields of config.json. SGLang ends its process when it loads weights of other sizes."""


class EngineReport(Struct, frozen=True):
    """What /server_info must say: limits in tokens, and options of the start that have a rule."""

    max_total_num_tokens: Positive
    max_req_input_len: Positive
    quantization: str | None = None
    disaggregation_mode: str | None = None
    dp_size: Positive = 1


class ModelInfo(Struct, frozen=True):
    """What /model_info says is loaded.

    Attributes:
        weight_version: The weights' name.
        model_path: The folder that the engine has read last; "" if it does not say.
    """

    weight_version: str
    model_path: str = ""


def start_refusal(report: EngineReport, model: Model, *, url: str) -> str:
    """Why an engine that was started like this cannot serve alone; '' if it can."""
    if report.disaggregation_mode not in (None, "null"):
        return (
            f"{url} is a {report.disaggregation_mode} engine: the lane needs "
            "FORGEMQ_INFERENCE_PREFILL_URL, and FORGEMQ_INFERENCE_ENGINE_URL of a decode engine"
        )
    if report.dp_size > 1:
        return (
            f"{url} has --dp-size {report.dp_size} and not --enable-dp-attention, so it is "
            f"{report.dp_size} engines behind one address: start each as a lane of its own"
        )
    named = model.engine_quantization
    held, wanted = report.quantization or "none", _FORMATS.get(named, named)
    if held != wanted:
        return (
            f"model.engine_quantization is {named}, which needs an engine with --quantization "
            f"{wanted}; that of {url} is {held}"
        )
    return ""


def size_refusal(held: bytes, wanted: bytes, *, url: str) -> str:
    """Why an engine with a model of these sizes cannot load the run's weights; '' if it can.

    Args:
        held: The config.json in the engine's folder; b"" if it cannot be read from here.
        wanted: That in the run's `model.path`.
        url: Of the engine.
    """
    ours, theirs = _sizes(wanted), _sizes(held)
    for field in _SIZES:
        if field in ours and field in theirs and ours[field] != theirs[field]:
            return (
                f"model.path: its config.json has {field} {ours[field]}, and that of the engine at "
                f"{url} has {theirs[field]}: start the engine with the run's model"
            )
    return ""


def _sizes(config: bytes) -> dict[str, object]:
    try:
        read = msgspec.json.decode(config, type=dict[str, object])
    except msgspec.MsgspecError:
        return {}
    text = read.get("text_config")
    return {**read, **text} if isinstance(text, dict) else read
