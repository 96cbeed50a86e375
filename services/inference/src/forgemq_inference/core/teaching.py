"""What a teacher's engine is asked about an output, and the log-probabilities in its answer."""

from typing import Any

from msgspec import Raw

from forgemq_contracts.arrays import pack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_inference.core.context import TokenContext
from forgemq_inference.core.generation import EngineAnswer, InvalidAnswerError


def is_taught(record: FinishedCompletion) -> bool:
    """Whether a teacher is asked: the output may train, and has tokens."""
    return record.support == "full" and bool(record.output)


def teaching_body(context: TokenContext, output: bytes) -> dict[str, Any]:
    """The body of /generate: read context and output, and sample nothing.

    SGLang's log-probabilities begin with the token after `logprob_start_len`, so that of the first
    output token needs the one before it.
    """
    return {
        "input_ids": Raw(b"[" + context.extended(output).text + b"]"),
        "return_logprob": True,
        "logprob_start_len": max(0, context.tokens_count - 1),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    }


def teacher_logprobs(answer: EngineAnswer, output: bytes) -> bytes:
    """Log-probability of each output token under the teacher, float32.

    Raises:
        InvalidAnswerError: the answer is about other tokens, or one has no finite log-probability.
    """
    ids = unpack_ids(output)
    entries = answer.meta_info.input_token_logprobs[-len(ids) :]
    if [token for _, token, _ in entries] != list(ids):
        raise InvalidAnswerError("the teacher answered about other tokens than it was asked about")
    values = [value for value, _, _ in entries if value is not None]
    if len(values) != len(ids):
        raise InvalidAnswerError("the teacher gave no log-probability for some of the tokens")
    return pack_floats(values)
