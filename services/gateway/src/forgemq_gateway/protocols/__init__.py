"""The protocols that agents speak: one file for each, which reads requests and writes answers."""

from forgemq_gateway.protocols.chat_completions import ChatCompletions
from forgemq_gateway.protocols.completions import Completions
from forgemq_gateway.protocols.messages import CountTokens, Messages
from forgemq_gateway.protocols.responses import CountInputTokens, Responses

__all__ = ["COUNTERS", "PROTOCOLS"]

PROTOCOLS = (ChatCompletions(), Completions(), Messages(), Responses())
"""The first one's shape is that of errors on paths that belong to no protocol."""

COUNTERS = (CountTokens(), CountInputTokens())
"""Paths that say how many context tokens a request has, and sample nothing."""
