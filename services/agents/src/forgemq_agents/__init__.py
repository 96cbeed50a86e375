"""What a user's agent imports: the episode and its messages."""

from forgemq_agents.completion import Completion, FunctionCall, Message, Tool
from forgemq_agents.episode import Episode
from forgemq_agents.errors import PolicyFailedError

__all__ = ["Completion", "Episode", "FunctionCall", "Message", "PolicyFailedError", "Tool"]
