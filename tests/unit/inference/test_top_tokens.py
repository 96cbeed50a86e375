"""The most likely tokens beside each sampled one, from the engine to the record."""

from typing import Any

import pytest

from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_inference.core.engine_answer import InvalidAnswerError
from forgemq_inference.core.generation import finished_completion, generate_body
from forgemq_inference.core.weights import Weights
from tests.unit.inference.test_core import LIMITS, TIMING, answer, context_of, requested

WEIGHTS = Weights(1, 4)


def test_the_most_likely_tokens_are_recorded_as_the_engine_says_them_if_asked_for() -> None:
    rows = [[(-0.5, 7, None), (-2.25, 3, None)], [(-0.25, 9, None), (None, 4, None)]]
    asked = requested(top_tokens=2)
    body = generate_body(asked, rid="r", context=context_of([1]), limits=LIMITS, weights=WEIGHTS)
    assert isinstance(body, dict)
    assert body["top_logprobs_num"] == 2
    how: Any = {"limits": LIMITS, "timing": TIMING, "is_cancelled": False}
    top = finished_completion(asked, answer(output_top_logprobs=rows), **how).top_tokens
    assert top is not None
    assert unpack_ids(top.ids) == [7, 3, 9, 4]
    assert unpack_floats(top.logprobs) == [-0.5, -2.25, -0.25, float("-inf")]
    assert finished_completion(requested(), answer(), **how).top_tokens is None
    with pytest.raises(InvalidAnswerError):
        finished_completion(asked, answer(output_top_logprobs=rows[:1]), **how)
