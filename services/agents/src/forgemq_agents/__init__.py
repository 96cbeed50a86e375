"""The agent side: task sources, the white-box loop, launchers for black-box agents."""

from forgemq_agents.completion import Completion, Message, Tool, ToolCall
from forgemq_agents.episode import Episode

__all__ = ["Completion", "Episode", "Message", "Tool", "ToolCall"]
