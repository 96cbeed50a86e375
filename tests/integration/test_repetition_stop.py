"""An output that repeats itself ends in a real engine, where the setting says, and no other."""

import math
from pathlib import Path

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.accounting import end_of
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.repetition import RepetitionStop
from tests.lane_scene import LaneScene, create_topics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CONTEXT = [10, 20, 30, 40, 50, 60]
LAST = (3, 4, 25)
"""Last tokens of contexts after which the demo's model repeats itself: from the fifth token on with
p above 0.5, less surely, and with p near 1 from the first token on."""
TOKENS_MAX = 48
STOP = RepetitionStop(tokens=6, probability=0.5)
STREAMED_FIRST = 1000
"""SGLang aborts a streamed request by its name 2 s after its end, also if the name is another
request's by then: so no other test has these numbers on the session's engine."""


async def _completions(
    url: str, model: Path, stop: RepetitionStop, *, is_live: bool = False
) -> list[FinishedCompletion]:
    """Greedy outputs of three contexts at once: the same in every run of the engine."""
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(log, model=model, engine_url=url, repetition_stop=stop)
    async with scene.serving():
        await scene.report(is_serving=True)
        for number, last in enumerate(LAST, STREAMED_FIRST if is_live else 0):
            await scene.request(
                number,
                [*CONTEXT, last],
                temperature=0.0,
                max_tokens=TOKENS_MAX,
                is_live=is_live,
            )
        return sorted(
            await scene.finished(count=3, timeout_s=60), key=lambda record: record.request_id
        )


def _end(logprobs: list[float]) -> int | None:
    """Where the first run of certain tokens ends; None if there is none."""
    for end in range(STOP.tokens, len(logprobs) + 1):
        if min(logprobs[end - STOP.tokens : end]) > math.log(STOP.probability):
            return end
    return None


@pytest.mark.parametrize("is_live", [False, True], ids=["whole", "streamed"])
async def test_an_output_ends_with_the_token_that_makes_the_run_long_enough(
    base_engine_url: str, engine_model: Path, is_live: bool
) -> None:
    free = await _completions(base_engine_url, engine_model, RepetitionStop())
    stopped = await _completions(base_engine_url, engine_model, STOP, is_live=is_live)
    ends = [_end(list(unpack_floats(record.logprobs))) for record in free]
    assert ends == [10, None, 6]
    for whole, cut, end in zip(free, stopped, ends, strict=True):
        assert unpack_ids(cut.output) == unpack_ids(whole.output)[:end]
        assert unpack_floats(cut.logprobs) == pytest.approx(
            unpack_floats(whole.logprobs)[:end], abs=1e-4
        )
        assert (cut.spans[0].start, cut.spans[-1].end) == (0, len(unpack_ids(cut.output)))
        if end is None:
            assert (cut.repeated_tokens, cut.finish_reason) == (0, whole.finish_reason)
        else:
            assert (cut.repeated_tokens, cut.finish_reason) == (STOP.tokens, "length")
            assert end_of(cut) == "repetition"
