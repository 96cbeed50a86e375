"""Answers that no sane engine gives: each ends its own request, and nothing else."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from stand_in_answers import Generation, Speed
from stand_in_engine import StandInEngine, serving

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import unpack_ids
from forgemq_telemetry.causes import causes
from tests.lane_scene import LaneScene, create_topics, request_id

CONTEXT = [5, 6, 7]

Change = Callable[[dict[str, Any]], None]


class MistakenEngine(StandInEngine):
    """A stand-in whose answers at some paths are changed on their way; `changes` are by path."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        super().__init__(Speed(tokens=2))
        self.changes = dict(changes)
        self.loads_told = 0

    def app(self) -> web.Application:
        @web.middleware
        async def changed(request: web.Request, handler: Any) -> web.StreamResponse:
            response = await handler(request)
            change = self.changes.get(request.path)
            if change is None:
                return response  # type: ignore[no-any-return]  # a handler's
            answer = json.loads(response.body)
            change(answer)
            return web.json_response(answer)

        app = super().app()
        app.middlewares.append(changed)
        app.add_routes([web.get("/v1/loads", self._loads)])
        return app

    async def _loads(self, _: web.Request) -> web.Response:
        self.loads_told += 1
        load = {"num_used_tokens": 3, "decode_moments": [2.0, 3.0, 10.0, 5.0, 16.0, 3.0]}
        return web.json_response({"loads": [load]})


def token(value: int) -> Change:
    """The first token of a completion, with its log-probability."""

    def change(answer: dict[str, Any]) -> None:
        answer["output_ids"][0] = answer["meta_info"]["output_token_logprobs"][0][1] = value

    return change


def logprob(value: float | None) -> Change:
    def change(answer: dict[str, Any]) -> None:
        answer["meta_info"]["output_token_logprobs"][0][0] = value

    return change


def meta(**fields: object) -> Change:
    return lambda answer: answer["meta_info"].update(fields)


def of_weights(name: str) -> Change:
    return meta(weight_version=name, weight_versions=[{"version": name, "start": 0, "end": 2}])


def longer(answer: dict[str, Any]) -> None:
    for entries in (answer["output_ids"], answer["meta_info"]["output_token_logprobs"]):
        entries *= 20
    meta(weight_versions=None)(answer)


async def scene_of(base: Path, url: str) -> LaneScene:
    log = MemoryLog(run="r")
    await create_topics(log)
    return LaneScene(log, model=base, engine_url=url)


ANSWERS: dict[str, tuple[Change, str]] = {
    "token_over_int32": (token(2**31), "2147483648"),
    "negative_token": (token(-1), "`int` >= 0"),
    "token_outside_the_vocabulary": (token(704), "token 704 is outside the vocabulary of 704"),
    "longer_than_asked": (longer, "40 tokens, and at most 30 were asked for"),
    "logprob_over_float32": (logprob(-1e39), "-1e+39 for a log-probability"),
    "logprob_above_0": (logprob(3.0), "3.0 for a log-probability"),
    "no_logprob": (logprob(None), "None for a log-probability"),
    "one_logprob": (meta(output_token_logprobs=[[-1.0, 1, None]]), "2 tokens but 1 log-prob"),
    "negative_cached": (meta(cached_tokens=-1), "$.meta_info.cached_tokens"),
    "negative_tier": (
        meta(cached_tokens_details={"host": -1}),
        "cached_tokens_details",
    ),
    "negative_retractions": (meta(num_retractions=-1), "$.meta_info.num_retractions"),
    "negative_verifications": (meta(spec_verify_ct=-1), "$.meta_info.spec_verify_ct"),
    "negative_repeated": (meta(finish_reason={"type": "stop", "repeated": -1}), "finish_reason"),
    "empty_meta": (lambda answer: answer["meta_info"].clear(), "missing required field"),
    "weights_nobody_published": (of_weights("1.9"), "weights 1.9, and the lane has 0.0"),
    "weights_beyond_all_numbers": (of_weights(f"{10**30}.1"), f"weights {10**30}.1"),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_nonsensical_answer_ends_its_own_request_with_an_error(
    base: Path, name: str
) -> None:
    change, error = ANSWERS[name]
    engine = MistakenEngine({"/generate": change})
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, max_tokens=30)
            (record,) = await scene.finished(count=1, timeout_s=5)
            engine.changes.clear()
            await scene.request(2, CONTEXT, max_tokens=30)
            _, after = await scene.finished(count=2, timeout_s=5)
    assert (record.request_id, record.finish_reason) == (request_id(1), "error")
    assert (record.failure, record.output) == ("engine", b"")
    assert error in record.error
    assert (after.finish_reason, after.error) == ("stop", "")


async def test_a_nonsensical_token_in_a_stream_ends_its_own_request(base: Path) -> None:
    outputs = iter(([2**31, 7], [5, 7]))

    async def decide(_: Generation) -> tuple[list[int], str]:
        return next(outputs), ""

    async with serving(StandInEngine(Speed(latency_s=0.1), answer=decide)) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, max_tokens=30, is_live=True)
            await scene.finished(count=1, timeout_s=5)
            await scene.request(2, CONTEXT, max_tokens=30, is_live=True)
            record, after = await scene.finished(count=2, timeout_s=5)
    assert (record.finish_reason, record.failure) == ("error", "engine")
    assert "2147483648" in record.error
    assert unpack_ids(after.output) == [5, 7]


async def test_a_negative_wait_in_the_engine_counts_as_none(base: Path) -> None:
    engine = MistakenEngine({"/generate": meta(queue_time=-5.0)})
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, max_tokens=30)
            (record,) = await scene.finished(count=1, timeout_s=5)
    assert record.finish_reason == "stop"
    assert 0 <= record.queued_s < 5
    assert 0 <= record.engine_s < 5


def load(**fields: object) -> Change:
    return lambda answer: answer["loads"][0].update(fields)


def two_schedulers(answer: dict[str, Any]) -> None:
    answer["loads"].append({"decode_moments": [1.0]})


LOADS: dict[str, Change] = {
    "negative_tokens": load(num_used_tokens=-1),
    "tokens_beyond_all_numbers": load(max_total_num_tokens=10**30),
    "negative_time": load(decode_moments=[2.0, 3.0, -10.0, 5.0, 16.0, 3.0]),
    "steps_without_requests": load(decode_moments=[2.0, 0.0, 10.0, 5.0, 16.0, 3.0]),
    "moments_of_two_lengths": two_schedulers,
}


@pytest.mark.parametrize("name", LOADS)
async def test_a_nonsensical_load_is_no_load_and_the_lane_serves(base: Path, name: str) -> None:
    engine = MistakenEngine({"/v1/loads": LOADS[name]})
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            while engine.loads_told < 4:
                await scene.report(is_serving=True)
                await asyncio.sleep(0.02)
            engine.changes.clear()
            measured = await scene.until_measured(timeout_s=5)
            lane = await scene.read("reported-engines-v1", 0)
    reports = [topics.decode(topics.REPORTED_ENGINES, record.value) for record in lane]
    loads = {report.load for report in reports}  # type: ignore[attr-defined]  # of reports
    assert {load.step_s for load in loads - {None, measured}} <= {0}


async def test_an_engine_without_room_for_a_token_is_refused_with_the_field(base: Path) -> None:
    engine = MistakenEngine({"/server_info": lambda answer: answer.update(tp_size=0)})
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        with pytest.raises(ExceptionGroup) as raised:
            async with scene.serving():
                await scene.report(is_serving=True, timeout_s=5)
    assert "`$.tp_size`" in str(causes(raised.value))


class DeafEngine(StandInEngine):
    """Answers health checks, and hangs up on everything else."""

    def __init__(self) -> None:
        super().__init__(Speed())
        self.calls = 0

    async def _end(self, http: web.Request) -> web.Response:
        self.calls += 1
        assert http.transport is not None
        http.transport.close()
        return web.Response()


async def test_an_engine_that_answers_health_checks_alone_is_not_asked_without_a_pause(
    base: Path,
) -> None:
    engine = DeafEngine()
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await asyncio.sleep(2.0)
            assert not (await scene.report(is_serving=False)).is_serving
    assert 1 <= engine.calls <= 6
