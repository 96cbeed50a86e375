"""The command of the manifests' probes fails for a process that hangs, and for no other."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from forgemq_settings.ports import free_port
from forgemq_shell.loop_watch import LoopWatch, keep_alive_file
from forgemq_telemetry.telemetry import Telemetry

ROOT = Path(__file__).parents[3]
AGE_S = 1
"""Allowed to the file here; the manifests allow a minute."""

PROCESS = """
import asyncio, sys, time
from pathlib import Path
from forgemq_shell.loop_watch import LoopWatch, keep_alive_file
from forgemq_telemetry.telemetry import Telemetry

async def main(path, mode):
    loop_watch = LoopWatch()
    touching = asyncio.create_task(keep_alive_file(
        Path(path), loop_watch, Telemetry(service="merger"), silent_s_max=0.5, every_s=0.1))
    while True:
        loop_watch.beat("task-0")
        if mode == "busy":
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                pass
        if mode == "awaits":
            await asyncio.Event().wait()
        if mode == "blocks":
            await asyncio.sleep(0.3)
            time.sleep(60)
        await asyncio.sleep(0.05)

asyncio.run(main(*sys.argv[1:]))
"""


def probe_command(path: Path) -> list[str]:
    """That of the manifests, about this file and with a shorter time."""
    patch = yaml.safe_load((ROOT / "deploy/kubernetes/base/alive.yaml").read_text())
    commands = [each["value"]["exec"]["command"] for each in patch]
    assert commands[0] == commands[1]
    shell, option, text = commands[0]
    assert "/tmp/alive" in text
    assert "60 seconds" in text
    text = text.replace("/tmp/alive", str(path)).replace("60 seconds", f"{AGE_S} seconds")
    return [shell, option, text]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen, Callable[[], bool]]]]:
    started = []

    def run(mode: str) -> tuple[subprocess.Popen, Callable[[], bool]]:
        path = tmp_path / "alive"
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(path), mode],
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(process)

        def is_alive() -> bool:
            found = subprocess.run(probe_command(path), capture_output=True, check=False)
            return found.returncode == 0

        assert not is_alive(), "there is no file yet"
        assert comes_true(is_alive)
        return process, is_alive

    yield run
    for process in started:
        process.kill()
        process.wait()


def comes_true(condition: Callable[[], bool], *, within_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_an_idle_or_busy_process_stays_alive(start, mode: str):
    _, is_alive = start(mode)
    assert not comes_true(lambda: not is_alive(), within_s=2.5 * AGE_S)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["awaits", "blocks"])
def test_a_loop_that_waits_for_ever_and_an_event_loop_that_is_blocked_fail_the_probe(
    start, mode: str
):
    process, is_alive = start(mode)
    assert comes_true(lambda: not is_alive())
    assert process.poll() is None


@pytest.mark.slow
def test_a_process_that_was_stopped_is_alive_again_once_it_goes_on(start):
    process, is_alive = start("idle")
    process.send_signal(signal.SIGSTOP)
    assert comes_true(lambda: not is_alive())
    process.send_signal(signal.SIGCONT)
    assert comes_true(is_alive)


@pytest.mark.slow
def test_a_service_that_waits_for_its_broker_is_alive(tmp_path: Path):
    path = tmp_path / "alive"
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FORGEMQ_RUN": "r",
        "FORGEMQ_KAFKA": f"127.0.0.1:{free_port()}",
        "FORGEMQ_SERVICE_ALIVE_FILE": str(path),
    }
    command = [sys.executable, "-m", "forgemq_merger"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as process:
        try:
            assert comes_true(path.exists)
            assert process.poll() is None
        finally:
            process.terminate()
    assert process.returncode == 0


async def test_the_silent_loop_is_named_once_and_one_that_ended_is_not_missed(tmp_path: Path):
    now_s = [0.0]
    lines = io.StringIO()
    loop_watch = LoopWatch(clock_s=lambda: now_s[0])
    for loop in ("member", "task-1", "task-0"):
        loop_watch.beat(loop)
    loop_watch.end("task-1")
    now_s[0] = 10.0
    loop_watch.beat("member")
    assert loop_watch.silent(silent_s_max=10.0) == ()
    assert loop_watch.silent(silent_s_max=9.0) == ("task-0",)
    touching = asyncio.create_task(
        keep_alive_file(
            tmp_path / "alive",
            loop_watch,
            Telemetry(service="merger", stream=lines),
            silent_s_max=9.0,
            every_s=0.001,
        )
    )
    await asyncio.sleep(0.02)
    assert not (tmp_path / "alive").exists()
    loop_watch.beat("task-0")
    await asyncio.sleep(0.02)
    assert (tmp_path / "alive").exists()
    touching.cancel()
    (event,) = map(json.loads, lines.getvalue().splitlines())
    assert (event["event"], event["loops"]) == ("silent", ["task-0"])


async def test_a_file_that_cannot_be_touched_ends_no_service_and_is_said_once(tmp_path):
    lines, path = io.StringIO(), tmp_path / "gone" / "alive"
    telemetry = Telemetry(service="merger", stream=lines)
    touching = asyncio.create_task(
        keep_alive_file(path, LoopWatch(), telemetry, silent_s_max=9.0, every_s=0.001)
    )
    await asyncio.sleep(0.05)
    (event,) = map(json.loads, lines.getvalue().splitlines())
    assert event["event"] == "alive_file_refused"
    assert f"No such file or directory: '{path}'" in event["error"]
    path.parent.mkdir()
    await asyncio.sleep(0.05)
    assert path.exists()
    assert not touching.done()
    touching.cancel()
