"""A teacher's log-probabilities from a real engine, against plain transformers, through a lane."""

import io
from pathlib import Path

import msgspec
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.arrays import pack_ids, unpack_floats, unpack_ids
from forgemq_contracts.distillation import Distillation
from forgemq_inference.core.context import TokenContext
from forgemq_inference.engine import Engine
from forgemq_inference.teacher import Teacher
from forgemq_telemetry import Telemetry
from tests.integration.test_inference_engine import (
    CONTEXT,
    LOGPROB_TOLERANCE,
    reference_logprobs,
)
from tests.lane_scene import LaneScene, create_topics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


async def test_every_output_that_may_train_has_the_teachers_word_on_each_of_its_tokens(
    base_engine_url: str, engine_model: Path
) -> None:
    """The engine is its own teacher: it says of its samples what it sampled them with."""
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(
        log, model=engine_model, engine_url=base_engine_url, teacher_url=base_engine_url
    )
    async with scene.serving():
        await scene.report(is_serving=True)
        for number in range(4):
            temperature = 0.0 if number == 3 else 1.0
            await scene.request(number, [*CONTEXT, number], temperature=temperature, max_tokens=24)
        records = sorted(
            await scene.finished(count=4, timeout_s=60), key=lambda record: record.request_id
        )
    for record in records[:3]:
        said = unpack_floats(record.teacher_logprobs)
        assert said == pytest.approx(unpack_floats(record.logprobs), abs=LOGPROB_TOLERANCE)
    assert records[3].teacher_logprobs == b"", "a greedy output does not train"


@pytest.mark.parametrize("length", [1, 30])
async def test_a_teacher_judges_tokens_that_it_would_not_have_sampled(
    base_engine_url: str, engine_model: Path, length: int
) -> None:
    """Twice: the second time the engine has the context in its cache."""
    output = [(37 * place) % 600 + 2 for place in range(length)]
    expected = reference_logprobs(engine_model, CONTEXT, output, temperature=1.0)
    assert min(expected) < -3.0
    events = io.StringIO()
    async with Engine(base_engine_url) as engine:
        teacher = Teacher(
            engine,
            Distillation(url=base_engine_url),
            telemetry=Telemetry(service="inference", stream=events),
        )
        log = MemoryLog(run="r")
        await create_topics(log)
        scene = LaneScene(log, model=engine_model, engine_url=base_engine_url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, max_tokens=2)
            (record,) = await scene.finished(count=1, timeout_s=60)
        judged = msgspec.structs.replace(
            record, output=pack_ids(output), logprobs=b"\0" * (4 * length), spans=()
        )
        context = TokenContext().extended(pack_ids(CONTEXT))
        for _ in range(2):
            taught = await teacher.taught(judged, context)
            said = unpack_floats(taught.teacher_logprobs)
            assert said == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
    assert unpack_ids(taught.output) == output
    assert events.getvalue() == ""
