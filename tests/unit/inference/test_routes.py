"""Which requests ask the engine for expert routes, and what the record keeps of its answer."""

import base64
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in_answers import Speed
from stand_in_engine import StandInEngine, serving

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.completions import FinishedCompletion, RequestedCompletion
from forgemq_contracts.episodes import Sampling
from forgemq_inference.core.context import TokenContext
from forgemq_inference.core.engine_answer import EngineAnswer, InvalidAnswerError
from forgemq_inference.core.engine_limits import EngineLimits
from forgemq_inference.core.generation import Timing, finished_completion, generate_body
from forgemq_inference.core.lane import Refused
from forgemq_inference.core.routes import Experts, InvalidRoutesError, packed_routes
from forgemq_inference.core.weights import Weights
from forgemq_inference.engine import ServerInfo
from forgemq_inference.limits import engine_limits
from tests.lane_scene import TURN, LaneScene, create_topics, request_id

EXPERTS = Experts(layers=2, top_k=2)
WEIGHTS = Weights(1, 4)
LIMITS = EngineLimits(
    context_tokens_max=100,
    input_tokens_max=94,
    vocabulary_size=50,
    experts=EXPERTS,
    records_routes=True,
)
CONTEXT = [1, 2, 3]
ROUTES = [[[3, 0], [1, 2]], [[2, 300], [32767, 1]]]


def requested(**sampling: float) -> RequestedCompletion:
    return RequestedCompletion(
        request_id=request_id(1),
        attempt=0,
        episode_id="g-0.0.0",
        group_id="g-0",
        lane=0,
        epoch=3,
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
        deadline_ms=1000,
        requested_ms=0,
        turn=TURN,
        context=pack_ids(CONTEXT),
    )


def asked(limits: EngineLimits, **sampling: float) -> dict[str, object]:
    """The part of the body that asks for expert routes."""
    context = TokenContext().extended(pack_ids(CONTEXT))
    body = generate_body(
        requested(**sampling), rid="r", context=context, limits=limits, weights=WEIGHTS
    )
    assert not isinstance(body, Refused)
    return {name: value for name, value in body.items() if "routed" in name}


def answer(routes: object, *, tokens: int = 2) -> EngineAnswer:
    """The engine's answer, as JSON."""
    meta: dict[str, object] = {
        "finish_reason": {"type": "stop", "matched": 7},
        "weight_version": "1.2",
        "output_token_logprobs": [[-0.5, 7, None]] * tokens,
    }
    if routes is not None:
        data = np.asarray(routes, "<i4").tobytes()
        meta["routed_experts"] = base64.b64encode(data).decode()
    text = json.dumps({"output_ids": [7] * tokens, "meta_info": meta})
    return msgspec.json.decode(text, type=EngineAnswer)


def recorded(
    given_answer: EngineAnswer, limits: EngineLimits = LIMITS, **sampling: float
) -> FinishedCompletion:
    return finished_completion(
        requested(**sampling),
        given_answer,
        limits=limits,
        timing=Timing(0.0, 0.0),
        is_cancelled=False,
    )


def test_routes_are_asked_from_the_last_token_of_the_context_where_the_output_may_train() -> None:
    assert asked(LIMITS) == {"return_routed_experts": True, "routed_experts_start_len": 2}
    assert asked(LIMITS, temperature=0.0) == {}
    assert asked(LIMITS, top_p=0.9) == {}


def test_a_dense_model_and_an_engine_that_records_nothing_are_not_asked_for_routes() -> None:
    for limits in (
        msgspec.structs.replace(LIMITS, experts=None),
        msgspec.structs.replace(LIMITS, records_routes=False),
    ):
        assert asked(limits) == {}
        assert recorded(answer(None), limits).routes == b""


def test_a_record_has_one_row_of_int16_for_each_sampled_token() -> None:
    routes = np.frombuffer(recorded(answer(ROUTES)).routes, "<i2")
    assert routes.reshape(2, 2, 2).tolist() == ROUTES
    assert recorded(answer(None), temperature=0.0).routes == b""


@pytest.mark.parametrize(
    ("routes", "match"),
    [
        (None, "asked for and are not there"),
        (ROUTES[:1], "16 bytes, but 2 tokens, 2 layers and 2 experts make 32"),
        ([[[3, 0], [1, -1]], ROUTES[1]], "no int16 of 0 or more"),
        ([[[3, 0], [1, 32768]], ROUTES[1]], "no int16 of 0 or more"),
        ([[[3, 0], [1, 65536]], ROUTES[1]], "no int16 of 0 or more"),
    ],
)
def test_routes_that_are_not_of_the_output_are_refused(routes: object, match: str) -> None:
    with pytest.raises(InvalidAnswerError, match=match):
        recorded(answer(routes))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4))
def test_experts_are_packed_exactly_where_int16_holds_them(values: list[int]) -> None:
    data = np.asarray(values, "<i4").tobytes()
    if all(0 <= value < 2**15 for value in values):
        packed = packed_routes(data, tokens_count=1, experts=EXPERTS)
        assert np.frombuffer(packed, "<i2").tolist() == values
    else:
        with pytest.raises(InvalidRoutesError):
            packed_routes(data, tokens_count=1, experts=EXPERTS)


@given(st.lists(st.integers(0, 2**15 - 1), min_size=4, max_size=4))
def test_every_expert_that_int16_holds_is_packed(values: list[int]) -> None:
    packed = packed_routes(np.asarray(values, "<i4").tobytes(), tokens_count=1, experts=EXPERTS)
    assert np.frombuffer(packed, "<i2").tolist() == values


@pytest.mark.parametrize(
    ("sizes", "experts"),
    [
        ({"num_hidden_layers": 5, "num_experts_per_tok": 2}, Experts(layers=5, top_k=2)),
        ({"num_hidden_layers": 5}, None),
        (
            {"text_config": {"num_hidden_layers": 3, "num_experts_per_tok": 8, "vocab_size": 704}},
            Experts(layers=3, top_k=8),
        ),
    ],
)
async def test_the_models_configuration_says_how_large_a_route_is(
    tmp_path: Path, sizes: dict[str, object], experts: Experts | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 704} | sizes))
    server = ServerInfo(
        max_total_num_tokens=100, max_req_input_len=94, enable_return_routed_experts=True
    )
    limits = await engine_limits(server, model_path=str(tmp_path), context_tokens_max=90)
    assert limits.experts == experts
    assert limits.records_routes


async def test_an_engine_that_records_no_routes_serves_and_it_is_said(base: Path) -> None:
    sizes = {"vocab_size": 704, "num_hidden_layers": 3, "num_experts_per_tok": 2}
    (base / "config.json").write_text(json.dumps(sizes))
    log = MemoryLog(run="r")
    await create_topics(log)
    async with serving(StandInEngine(Speed(tokens=3))) as url:
        scene = LaneScene(log, model=base, engine_url=url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT)
            (record,) = await scene.finished(count=1)
    assert (record.finish_reason, len(record.output), record.routes) == ("stop", 12, b"")
    assert [event["url"] for event in scene.events_named("routes_not_recorded")] == [url]
