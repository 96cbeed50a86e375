"""Outputs that come with their request: what the engine reads, and the record of it."""

from collections.abc import Sequence

import msgspec
import pytest

from forgemq_contracts.arrays import pack_ids, unpack_floats
from forgemq_contracts.completions import WeightSpan
from forgemq_inference.core.engine_answer import EngineAnswer, InvalidAnswerError
from forgemq_inference.core.lane import Refused
from forgemq_inference.core.reading import WeightsChangedError, read_completion, reading_body
from forgemq_inference.core.weights import Weights
from tests.unit.inference.test_core import LIMITS, TIMING, context_of, requested

GIVEN = pack_ids([7, 9])
WEIGHTS = Weights(1, 2)


def read(*entries: tuple[float, int], version: str = "1.2", ended: str = "length") -> EngineAnswer:
    meta = {
        "finish_reason": {"type": ended, "message": "no room"},
        "weight_version": version,
        "input_token_logprobs": [[value, token, None] for value, token in entries],
        "cached_tokens": 2,
    }
    return msgspec.convert({"output_ids": [], "meta_info": meta}, EngineAnswer)


def body_of(context: Sequence[int], given: bytes = GIVEN):
    request = msgspec.structs.replace(requested(), context=pack_ids(context), given=given)
    return reading_body(
        request, rid="r", context=context_of(list(context)), limits=LIMITS, weights=WEIGHTS
    )


def recorded(answer: EngineAnswer):
    request = msgspec.structs.replace(requested(), given=GIVEN)
    return read_completion(request, answer, weights=WEIGHTS, timing=TIMING)


def test_the_engine_reads_context_and_output_under_the_weights_it_has_and_samples_nothing():
    body = body_of([4, 5, 6])
    assert bytes(body["input_ids"]) == b"[4,5,6,7,9]"
    assert (body["logprob_start_len"], body["extra_key"], body["rid"]) == (2, "1.2", "r")
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}


def test_the_record_has_the_given_tokens_their_logprobs_and_the_weights_that_read_them():
    record = recorded(read((-0.1, 6), (-0.5, 7), (-2.0, 9)))
    assert (record.output, record.is_given, record.finish_reason) == (GIVEN, True, "stop")
    assert unpack_floats(record.logprobs) == [-0.5, -2.0]
    assert record.spans == (WeightSpan(start=0, end=2, lineage=1, version=2),)
    assert (record.temperature, record.support, record.cached_tokens) == (1.0, "full", 2)


def test_weights_that_changed_meanwhile_make_no_record():
    with pytest.raises(WeightsChangedError, match=r"weights '1\.3' ended what '1\.2' began"):
        recorded(read((-0.5, 7), (-2.0, 9), version="1.3"))


def test_an_answer_about_other_tokens_is_not_taken():
    with pytest.raises(InvalidAnswerError, match="other tokens"):
        recorded(read((-0.5, 7), (-2.0, 8)))


def test_an_aborted_reading_is_a_failed_attempt():
    record = recorded(read(ended="abort"))
    assert (record.finish_reason, record.failure, record.error) == (
        "abort",
        "engine",
        "engine: no room",
    )


def test_what_is_too_long_with_its_output_is_refused_as_overflow():
    longest = min(LIMITS.context_tokens_max - 1, LIMITS.input_tokens_max)
    fits = body_of([4] * (longest - 2))
    assert isinstance(fits, dict)
    refused = body_of([4] * (longest - 1))
    assert isinstance(refused, Refused)
    assert refused.failure == "context_overflow"
    assert f"a context of {longest + 1} tokens is over the engine's limit" in refused.error


def test_a_token_that_the_model_has_not_never_reaches_the_engine():
    refused = body_of([4], given=pack_ids([LIMITS.vocabulary_size]))
    assert isinstance(refused, Refused)
    assert refused.error == "engine: a token id is outside the vocabulary of 50"


def test_an_output_behind_nothing_is_refused_as_that():
    refused = body_of([])
    assert isinstance(refused, Refused)
    assert refused.error == "engine: the context is empty"
