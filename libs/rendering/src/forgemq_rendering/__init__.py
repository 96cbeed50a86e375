"""Messages to token ids and back, over the `renderers` package; no chat templates of our own."""

from forgemq_rendering.rendering import Parsed, Rendered, Rendering, ToolCall

__all__ = ["Parsed", "Rendered", "Rendering", "ToolCall"]
