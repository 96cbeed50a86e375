"""What chat completions and completions write in the same way: places of choices, token counts."""

from collections.abc import Sequence
from typing import Any

from forgemq_gateway.core.replies import Answer


def choice_head(answer: Answer, index: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """The place of a choice; if it is not the only one, also its id, for rewards."""
    is_alone = len(answers) == 1
    return {"index": index} if is_alone else {"index": index, "completion_id": answer.request_id}


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Token counts of all choices; the context of several samples counts once."""
    context = output = cached = 0
    for answer in answers:
        output += answer.output_tokens
        if not answer.sample:
            context += answer.context_tokens
            cached += answer.cached_tokens
    return {
        "prompt_tokens": context,
        "completion_tokens": output,
        "total_tokens": context + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
