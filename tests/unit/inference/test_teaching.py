"""What a teacher is asked, what of its answer is taken, and a teacher that does not answer."""

import asyncio
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stand_in_answers import Speed
from stand_in_engine import StandInEngine, serving

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import pack_ids, unpack_floats
from forgemq_contracts.distillation import Distillation
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.lane_plan import RequestedLane
from forgemq_inference.core.engine_answer import EngineAnswer, InvalidAnswerError
from forgemq_inference.core.generation import finished_completion
from forgemq_inference.core.reading import read_logprobs
from forgemq_inference.core.teaching import is_taught, teaching_body
from forgemq_inference.engine import Engine
from forgemq_inference.teacher import Teacher
from forgemq_telemetry import Telemetry
from tests.lane_scene import LaneScene, create_topics
from tests.unit.inference.test_core import LIMITS, TIMING, answer, context_of, requested


def _read(*entries: tuple[float | None, int]) -> EngineAnswer:
    meta = {
        "finish_reason": {"type": "length"},
        "input_token_logprobs": [[value, token, None] for value, token in entries],
    }
    return msgspec.convert({"output_ids": [], "meta_info": meta}, EngineAnswer)


def test_a_teacher_reads_context_and_output_and_samples_nothing() -> None:
    body = teaching_body(context_of([4, 5, 6]), pack_ids([7, 9]))
    assert bytes(body["input_ids"]) == b"[4,5,6,7,9]"
    assert (body["logprob_start_len"], body["return_logprob"]) == (2, True)
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}


def test_the_last_entries_are_those_of_the_output() -> None:
    read = _read((None, 6), (-0.5, 7), (-2.0, 9))
    assert unpack_floats(read_logprobs(read, pack_ids([7, 9]))) == [-0.5, -2.0]


@pytest.mark.parametrize(
    "entries",
    [[], [(-0.5, 7)], [(-0.5, 7), (-1.0, 8)], [(None, 7), (-1.0, 9)]],
    ids=["none", "too few", "another token", "no value"],
)
def test_an_answer_about_something_else_is_not_taken(entries: list[Any]) -> None:
    with pytest.raises(InvalidAnswerError, match=r"^the engine "):
        read_logprobs(_read(*entries), pack_ids([7, 9]))


async def test_a_teacher_that_does_not_answer_leaves_the_record_as_it_is_and_says_so() -> None:
    record = finished_completion(
        requested(), answer(), limits=LIMITS, timing=TIMING, is_cancelled=False
    )
    assert is_taught(record)
    events = io.StringIO()
    settings = Distillation(url="http://127.0.0.1:9", timeout_s=1.0)
    async with Engine(settings.url) as engine:
        teacher = Teacher(engine, settings, telemetry=Telemetry(service="inference", stream=events))
        assert await teacher.taught(record, context_of([1])) == record
    assert '"teacher_failed"' in events.getvalue()


def test_a_teacher_is_not_asked_about_what_does_not_train() -> None:
    greedy = finished_completion(
        requested(sampling=Sampling(temperature=0.0)),
        answer(),
        limits=LIMITS,
        timing=TIMING,
        is_cancelled=False,
    )
    assert not is_taught(greedy)


async def test_a_lane_that_ends_while_the_teacher_reads_hands_the_request_over(base: Path) -> None:
    reading = StandInEngine(Speed(tokens=1))
    async with (
        serving(StandInEngine(Speed(tokens=3))) as url,
        serving(reading) as teacher_url,
        Engine(teacher_url) as teacher,
    ):
        await teacher.pause(timeout_s=5)
        log = MemoryLog(run="r")
        await create_topics(log)
        scene = LaneScene(log, model=base, engine_url=url, teacher_url=teacher_url)
        async with scene.serving(drain_s=0.2):
            await scene.report(is_serving=True)
            await scene.request(1, [5, 6, 7])
            while not reading.open_count:  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.01)
            removed = RequestedLane(lane=0, change="remove", change_id="0" * 32, requested_ms=0)
            await scene.write(topics.REQUESTED_LANES, 0, removed)
            (record,) = await scene.finished(count=1)
    assert (record.finish_reason, record.error) == ("error", "engine: the lane is leaving")


def test_a_teacher_is_not_asked_about_what_was_sampled_at_another_temperature() -> None:
    record = finished_completion(
        requested(), answer(), limits=LIMITS, timing=TIMING, is_cancelled=False
    )
    assert is_taught(record)
    assert not is_taught(msgspec.structs.replace(record, temperature=0.7))
