"""What a teacher's engine is asked about an output."""

from typing import Any

from forgemq_contracts.completions import FinishedCompletion
from forgemq_inference.core.context import TokenContext
from forgemq_inference.core.reading import reading_fields


def is_taught(record: FinishedCompletion) -> bool:
    """Whether a teacher is asked: the output may train, and has tokens.

    Its log-probabilities are at temperature 1; those of an output that was sampled at another one
    cannot be compared with them, and its group does not train.
    """
    return record.support == "full" and record.temperature == 1 and bool(record.output)


def teaching_body(context: TokenContext, output: bytes) -> dict[str, Any]:
    """The body of /generate: read context and output, and sample nothing."""
    return reading_fields(context, output)
