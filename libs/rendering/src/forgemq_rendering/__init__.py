"""Messages to token ids and back, with the templates of `renderers` and of the model."""

from forgemq_rendering.rendering import Parsed, Rendered, Rendering, ToolCall

__all__ = ["Parsed", "Rendered", "Rendering", "ToolCall"]
