"""What a teacher's engine is asked about an output."""

from typing import Any

from forgemq_contracts.completions import FinishedCompletion
from forgemq_inference.core.context import TokenContext
from forgemq_inference.core.reading import reading_fields


def is_taught(record: FinishedCompletion) -> bool:
    """Whether a teacher is asked: the output may train, and has tokens."""
    return record.support == "full" and bool(record.output)


def teaching_body(context: TokenContext, output: bytes) -> dict[str, Any]:
    """The body of /generate: read context and output, and sample nothing."""
    return reading_fields(context, output)
