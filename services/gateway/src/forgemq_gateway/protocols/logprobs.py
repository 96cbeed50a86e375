"""How OpenAI's protocols write the log-probability of a token."""

from collections.abc import Sequence
from typing import Any

from forgemq_gateway.core.replies import TokenLogprob


def entries(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Each sampled token, with the most likely ones in its place."""
    return [
        {**_entry(token), "top_logprobs": [_entry(likely) for likely in token.top]}
        for token in tokens
    ]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.token,
        "logprob": token.logprob,
        "bytes": None if token.data is None else list(token.data),
    }
