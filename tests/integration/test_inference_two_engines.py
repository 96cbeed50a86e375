"""Two lanes with an engine each: weights reach both, and the death of one costs only its lane."""

import os
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from forgemq_bus.memory import MemoryLog
from forgemq_settings.ports import free_port
from forgemq_sglang_cpu.server import EngineServer, EngineServerError
from tests.engine_fixture import engine_options
from tests.lane_scene import LaneScene, create_topics

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]

CONTEXT = [10, 20, 30]
LOST = range(1, 7)


@pytest.mark.long
async def test_an_engines_death_stops_its_lane_alone_and_a_restarted_one_rejoins_on_new_weights(
    base_engine_url: str, engine_model: Path, tmp_path: Path
) -> None:
    trained = tmp_path / "trained"
    trained.mkdir()
    weights = load_file(engine_model / "model.safetensors")
    save_file(
        {name: value * 1.01 for name, value in weights.items()},
        trained / "model.safetensors",
        metadata={"format": "pt"},
    )
    (trained / "config.json").write_bytes((engine_model / "config.json").read_bytes())
    torch.set_num_threads(1)
    server = EngineServer(
        str(engine_model), tmp_path / "second", port=free_port(), options=engine_options()
    )
    with server:
        log = MemoryLog(run="r")
        await create_topics(log)
        first = LaneScene(log, model=engine_model, engine_url=base_engine_url, lane=0)
        second = LaneScene(log, model=engine_model, engine_url=server.url, lane=1)
        async with AsyncExitStack() as stack:
            for scene in (first, second):
                await stack.enter_async_context(scene.serving())
                await scene.report(is_serving=True)
            await first.publish(trained, version=1)
            for scene in (first, second):
                assert [record.version for record in await scene.loaded(count=2)] == [0, 1]
            # Any one of them may sample its end before the kill; all of them do not.
            for number in LOST:
                await second.request(number, CONTEXT, max_tokens=900, temperature=10.0)
            await second.until_running()
            group = server.pid
            assert group is not None
            os.killpg(group, signal.SIGKILL)
            killed_s = time.monotonic()
            await second.report(is_serving=False, timeout_s=30)
            assert time.monotonic() - killed_s < 10
            records = await second.finished(count=len(LOST))
            outcomes = {(record.finish_reason, record.failure) for record in records}
            assert ("error", "engine") in outcomes
            assert outcomes <= {("error", "engine"), ("stop", None)}
            await first.request(98, CONTEXT, max_tokens=4)
            *_, served = await first.finished(count=len(LOST) + 1)
            assert (served.lane, served.error, served.spans[0].version) == (0, "", 1)
            server.start()
            groups = {group, server.pid}
            report = await second.report(is_serving=True, timeout_s=600)
            assert (report.epoch, report.version) == (1, 1)
            await second.request(99, CONTEXT, max_tokens=4)
            *_, rejoined = await second.finished(count=len(LOST) + 2)
            assert (rejoined.lane, rejoined.error, rejoined.spans[0].version) == (1, "", 1)
    assert not [process.pid for process in psutil.process_iter() if _group(process) in groups]


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


def test_a_taken_port_and_a_missing_model_are_refused_in_one_line(
    base_engine_url: str, engine_model: Path, tmp_path: Path
) -> None:
    port = int(base_engine_url.rsplit(":", 1)[1])
    with pytest.raises(EngineServerError, match=rf"port {port} of"):
        EngineServer(str(engine_model), tmp_path, port=port).start()
    with pytest.raises(EngineServerError, match=rf"no model at {tmp_path}: config.json is missing"):
        EngineServer(str(tmp_path), tmp_path, port=free_port()).start()
