"""Messages to token ids and back, with the templates of `renderers` and of the model."""

from forgemq_rendering.parsed import Parsed, ToolCall, chat_message
from forgemq_rendering.rendering import Rendered, Rendering

__all__ = ["Parsed", "Rendered", "Rendering", "ToolCall", "chat_message"]
