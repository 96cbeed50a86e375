"""The protocols that agents speak: one file for each, which reads requests and writes answers."""

from forgemq_gateway.protocols.chat_completions import ChatCompletions

__all__ = ["PROTOCOLS"]

PROTOCOLS = (ChatCompletions(),)
"""The first one's shape is that of errors on paths that belong to no protocol."""
