"""What a user's agent imports: the episode and its messages."""

from forgemq_agents.completion import Completion, FunctionCall, Message, Tool
from forgemq_agents.episode import Episode

__all__ = ["Completion", "Episode", "FunctionCall", "Message", "Tool"]
