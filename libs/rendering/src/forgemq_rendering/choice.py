"""Chooses a model's renderer: a hand-written one of `renderers`, or the tokenizer's template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from renderers import DefaultRendererConfig, create_renderer
from renderers.base import MODEL_RENDERER_MAP, Renderer
from renderers.configs import config_from_name

from forgemq_rendering.tokenizer import FolderTokenizer, read_json

HistoryPolicy = Literal["append_only", "template"]

# Text in a template -> tool parser of `renderers`; the first that matches counts.
_TOOL_PARSERS = (
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek-v3"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3.5"),
    ("<tool_call>", "qwen3"),
)


def choose_renderer(
    tokenizer: FolderTokenizer, *, folder: Path, name: str, history: HistoryPolicy
) -> Renderer:
    """Make the renderer of this name; `auto` chooses by the published model's name only.

    A fine-tune may have a different template than its base model. So `auto` takes a hand-written
    renderer only if the folder or its config.json names a published model, else the tokenizer's
    chat template.

    Raises:
        ValueError: no such renderer, or a model for images without a chat template.
    """
    config = read_json(folder / "config.json")
    chosen = _published_name(folder, config) if name == "auto" else name
    if chosen == "default":
        if "vision_config" in config and not tokenizer.chat_template:
            raise ValueError(f"{folder}: the model has a vision tower and no chat template")
        return create_renderer(tokenizer, _template_config(tokenizer))
    try:
        settings = config_from_name(chosen)
    except ValueError as error:  # It lists those that there are.
        raise ValueError(f"model.renderer: {error}") from error
    if settings is None:
        raise ValueError(f"model.renderer: {chosen!r} is no renderer of `renderers`")
    if history == "append_only":
        settings = type(settings)(thinking_retention="all")
    return create_renderer(tokenizer, settings)


def _published_name(folder: Path, config: Mapping[str, Any]) -> str:
    candidates = ("/".join(folder.parts[-2:]), str(config.get("_name_or_path", "")))
    for candidate in candidates:
        if candidate in MODEL_RENDERER_MAP:
            return str(MODEL_RENDERER_MAP[candidate])
    return "default"


def _template_config(tokenizer: FolderTokenizer) -> DefaultRendererConfig:
    template = tokenizer.chat_template
    tool_parser = next((parser for mark, parser in _TOOL_PARSERS if mark in template), None)
    thinks = tokenizer.convert_tokens_to_ids("</think>") not in (None, tokenizer.unk_token_id)
    return DefaultRendererConfig(
        tool_parser=tool_parser, reasoning_parser="think" if thinks else None
    )
