"""`python -m forgemq_inference` on the real broker, beside the stand-in engine."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from stand_in_answers import Speed, sampled
from stand_in_engine import StandInEngine, serving

from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.run import StartedRun
from tests.lane_scene import LaneScene, configuration, create_topics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CONTEXT = [5, 6, 7]


async def test_the_process_serves_its_lane_from_the_environment_and_ends_on_a_signal(
    kafka_bootstrap: str,
    new_run_id: Callable[[], str],
    engine_model: Path,
    tmp_path: Path,
) -> None:
    speed, kafka_run = Speed(tokens=6), new_run_id()
    log = KafkaLog(KafkaConnection(bootstrap=kafka_bootstrap), run=kafka_run)
    started = StartedRun(
        run=kafka_run,
        configuration=msgspec.structs.replace(configuration(engine_model), run=kafka_run),
        blobs=str(tmp_path / "blobs"),
        started_ms=1,
    )
    try:
        await log.create_topics({topic.name: 1 for topic in topics.SHARED})
        await create_topics(log)
        async with serving(StandInEngine(speed)) as url:
            scene = LaneScene(log, model=engine_model, engine_url=url)
            await scene.write(topics.STARTED_RUNS, 0, started)
            variables = {
                "FORGEMQ_RUN": kafka_run,
                "FORGEMQ_KAFKA": kafka_bootstrap,
                "FORGEMQ_INFERENCE_LANE": "0",
                "FORGEMQ_INFERENCE_ENGINE_URL": url,
            }
            process = await asyncio.create_subprocess_exec(
                sys.executable, *("-m", "forgemq_inference"), env={**os.environ, **variables}
            )
            try:
                await scene.report(is_serving=True, timeout_s=60)
                await scene.request(1, CONTEXT, max_tokens=6)
                (record,) = await scene.finished(count=1)
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(30):
                    assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            report = await scene.report(is_serving=False)
    finally:
        await log.close()
    assert unpack_ids(record.output) == sampled(CONTEXT, count=6, speed=speed)[0]
    assert (report.epoch, report.is_serving) == (1, False)
