"""A constraint of a request: what the engine is asked, and what its answer is recorded as."""

import msgspec
import pytest

from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.completions import Constraint, RequestedCompletion, Support
from forgemq_contracts.episodes import Sampling
from forgemq_inference.core.context import TokenContext
from forgemq_inference.core.engine_answer import EngineAnswer, EngineFinish, EngineMeta
from forgemq_inference.core.engine_limits import EngineLimits
from forgemq_inference.core.generation import (
    Timing,
    finished_completion,
    generate_body,
    refused_completion,
)
from forgemq_inference.core.lane import Refused
from forgemq_inference.core.routes import Experts
from forgemq_inference.core.weights import Weights
from tests.lane_scene import TURN, request_id

WEIGHTS = Weights(1, 4)

TAG = '{"type": "structural_tag", "format": {"type": "regex", "pattern": "a"}}'
LIMITS = EngineLimits(
    context_tokens_max=100,
    input_tokens_max=94,
    vocabulary_size=50,
    experts=Experts(layers=1, top_k=1),
    records_routes=True,
)
FREE = RequestedCompletion(
    request_id=request_id(1),
    attempt=0,
    episode_id="g-0.0.0",
    group_id="g-0",
    lane=0,
    epoch=3,
    sampling=Sampling(),
    deadline_ms=1000,
    requested_ms=0,
    turn=TURN,
    context=pack_ids([1, 2, 3]),
)
BOUND = msgspec.structs.replace(FREE, constraint=Constraint(structural_tag=TAG))
UNCOMPILED = "engine: /generate: HTTP 400: Failed to compile structural_tag grammar: no"


def body_of(request: RequestedCompletion) -> dict[str, object]:
    context = TokenContext().extended(request.context)
    body = generate_body(request, rid="r", context=context, limits=LIMITS, weights=WEIGHTS)
    assert isinstance(body, dict)
    return body


def test_the_engine_gets_the_constraint_and_is_asked_for_no_routes_of_its_tokens() -> None:
    bound, free = body_of(BOUND), body_of(FREE)
    assert bound["sampling_params"] == {**free["sampling_params"], "structural_tag": TAG}  # type: ignore[dict-item]  # the body is of objects
    assert "return_routed_experts" in free
    assert "return_routed_experts" not in bound


@pytest.mark.parametrize(
    ("temperature", "support", "recorded"), [(1.0, "grammar", 1.0), (0.0, "grammar", 0.0)]
)
def test_constrained_tokens_are_recorded_with_a_truncated_support(
    temperature: float, support: Support, recorded: float
) -> None:
    request = msgspec.structs.replace(BOUND, sampling=Sampling(temperature=temperature))
    meta = EngineMeta(
        finish_reason=EngineFinish("stop"),
        weight_version="0.0",
        output_token_logprobs=[(0.0, 7, None)],
    )
    answer = EngineAnswer(output_ids=[7], meta_info=meta)
    record = finished_completion(
        request, answer, limits=LIMITS, timing=Timing(0.0, 0.0), is_cancelled=False
    )
    assert (record.support, record.temperature, record.routes) == (support, recorded, b"")


@pytest.mark.parametrize(
    ("request_", "error", "is_refused"),
    [
        (BOUND, UNCOMPILED, True),
        (BOUND, "engine: /generate: HTTP 500: out of memory", False),
        (FREE, UNCOMPILED, False),
    ],
)
def test_only_a_constraint_that_does_not_compile_is_the_requests_own_fault(
    request_: RequestedCompletion, error: str, is_refused: bool
) -> None:
    record = refused_completion(request_, Refused("error", "engine", error))
    assert (record.failure, record.is_constraint_refused) == ("engine", is_refused)
