"""Service processes are kept up, given up and stopped; with real processes."""

import asyncio
import contextlib
import os
import pty
import signal
import sys
import venv
from pathlib import Path

import msgspec
import psutil
import pytest

from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.upkeep import child
from forgemq_launcher.upkeep.machine import listening_socket
from forgemq_launcher.upkeep.supervisor import ProcessFailedError, ServiceSpec, Supervisor

QUICK = RestartPolicy(restarts_max=2, delay_first_s=0.01, delay_max_s=0.02)


def spec(folder: Path, code: str, *, name: str = "one", stop_stage: int = 0) -> ServiceSpec:
    (folder / f"{name}_module.py").write_text(code)
    return ServiceSpec(
        name=name,
        module=f"{name}_module",
        environ={**os.environ, "PYTHONPATH": str(folder)},
        log_path=folder / f"{name}.log",
        stop_stage=stop_stage,
    )


def supervisor(notes: list[str], *, grace_s: float = 5.0) -> Supervisor:
    return Supervisor(policy=QUICK, grace_s=grace_s, note=notes.append)


async def until_written(path: Path, text: str) -> None:
    async with asyncio.timeout(20):
        while text not in await asyncio.to_thread(_text, path):  # noqa: ASYNC110 - polls a file
            await asyncio.sleep(0.05)


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


SLEEPS = "import time; print('up', flush=True); time.sleep(60)"


async def test_a_service_that_keeps_dying_fails_the_run_with_its_last_lines(tmp_path):
    notes: list[str] = []
    dying = spec(tmp_path, "import sys; print('the reason'); sys.exit(3)")
    with pytest.raises(ProcessFailedError, match=r"one ended with status 3 for the 3th time") as e:
        await supervisor(notes).keep(dying, may_end=lambda: False)
    assert "the reason" in str(e.value)
    assert len(notes) == 2


async def test_refused_settings_fail_the_run_at_once(tmp_path):
    notes: list[str] = []
    refusing = spec(tmp_path, "import sys; sys.exit(2)")
    with pytest.raises(ProcessFailedError, match="status 2"):
        await supervisor(notes).keep(refusing, may_end=lambda: False)
    assert notes == []


async def test_a_service_runs_in_the_python_that_it_names_and_imports_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    python = str(tmp_path / "other" / "bin" / "python")
    (tmp_path / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    code = "import sys, beside; print(sys.executable, sys.argv); sys.exit(2)"
    there = msgspec.structs.replace(spec(tmp_path, code), python=python, arguments=("a",))
    with pytest.raises(ProcessFailedError, match="status 2"):
        await supervisor([]).keep(there, may_end=lambda: False)
    # `runpy` puts the file of the module in the place of its name.
    assert _text(there.log_path) == f"{python} ['{tmp_path}/one_module.py', 'a']\n"


async def test_a_killed_service_is_restarted(tmp_path):
    notes: list[str] = []
    kept = supervisor(notes)
    sleeping = spec(tmp_path, SLEEPS)
    async with asyncio.TaskGroup() as group:
        group.create_task(kept.keep(sleeping, may_end=lambda: False))
        await until_written(sleeping.log_path, "up")
        (first,) = kept.statuses()
        assert first.pid is not None
        os.kill(first.pid, 9)
        await until_written(sleeping.log_path, "up\nup")
        (second,) = kept.statuses()
        assert second.restarts == 1
        assert second.pid not in (None, first.pid)
        assert notes[0].startswith("one was killed by SIGKILL; restarting in 0.0 s")
        await kept.stop()
    assert not psutil.pid_exists(second.pid)


STARTS_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


async def test_children_that_a_killed_service_left_behind_are_killed(tmp_path):
    """User code that hangs in one of them would hold its memory and cores."""
    kept = supervisor([])
    parent = spec(tmp_path, STARTS_A_CHILD)
    async with asyncio.TaskGroup() as group:
        group.create_task(kept.keep(parent, may_end=lambda: False))
        await until_written(parent.log_path, "\n")
        left_behind = int(parent.log_path.read_text())
        (first,) = kept.statuses()
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        await until_gone(left_behind)
        await kept.stop()


async def test_no_group_is_signalled_whose_service_has_ended_and_whose_number_is_free(tmp_path):
    """An agents process may end hours before its run; its number may be another's by then."""
    signalled: list[tuple[object, ...]] = []
    sys.addaudithook(
        lambda event, details: signalled.append(details) if event == "os.killpg" else None
    )
    kept = supervisor([])
    await kept.keep(spec(tmp_path, "print('done')"), may_end=lambda: True)
    while_it_ended = list(signalled)
    await kept.stop()
    kept.kill()
    assert len(while_it_ended) == 1
    assert signalled == while_it_ended


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(10):
        while is_alive(pid):  # noqa: ASYNC110 - a process has no event
            await asyncio.sleep(0.05)


ANSWERS = """
import os, socket
listener = socket.socket(fileno=int(os.environ["LISTENER_FD"]))
print("up", flush=True)
while True:
    connection, _ = listener.accept()
    asked = connection.recv(100)
    connection.sendall(b"heard " + asked)
    connection.close()
"""


async def ask(address: tuple[str, int], text: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(text)
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_a_client_that_connects_while_its_service_is_down_is_answered_by_the_next_start(
    tmp_path,
):
    listener = listening_socket("127.0.0.1", wanted=0)
    address = listener.getsockname()
    slow = RestartPolicy(restarts_max=2, delay_first_s=0.2)
    kept = Supervisor(policy=slow, grace_s=5.0, note=lambda _: None)
    answering = spec(tmp_path, ANSWERS)
    answering = msgspec.structs.replace(
        answering,
        environ={**answering.environ, "LISTENER_FD": str(listener.fileno())},
        inherited_fds=(listener.fileno(),),
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(kept.keep(answering, may_end=lambda: False))
        assert await ask(address, b"first") == b"heard first"
        (up,) = kept.statuses()
        assert up.pid is not None
        os.kill(up.pid, signal.SIGKILL)
        while kept.statuses()[0].pid is not None:  # noqa: ASYNC110 - a process has no event
            await asyncio.sleep(0.01)
        assert await ask(address, b"second") == b"heard second"
        assert kept.statuses()[0].restarts == 1
        await kept.stop()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        await ask(address, b"third")


async def test_an_exit_with_status_0_ends_a_service_only_when_it_may_end(tmp_path):
    kept = supervisor([])
    done = spec(tmp_path, "pass")
    await kept.keep(done, may_end=lambda: True)
    with pytest.raises(ProcessFailedError):
        await kept.keep(done, may_end=lambda: False)


async def test_lower_stages_are_stopped_first(tmp_path):
    order = tmp_path / "order"
    code = f"""
import pathlib, signal, sys, time
def end(*_):
    with open({str(order)!r}, "a") as file: file.write(__name__[0] + NAME + " ")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""
    kept = supervisor([])
    specs = [
        spec(tmp_path, f"NAME = {name!r}\n{code}", name=name, stop_stage=stage)
        for name, stage in (("late", 2), ("early", 0), ("middle", 1))
    ]
    async with asyncio.TaskGroup() as group:
        for each in specs:
            group.create_task(kept.keep(each, may_end=lambda: False))
        for each in specs:
            await until_written(each.log_path, "up")
        await kept.stop()
    assert order.read_text().split() == ["_early", "_middle", "_late"]


async def test_a_service_that_ignores_the_signal_is_killed_with_its_children(tmp_path):
    code = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, "up", flush=True)
time.sleep(60)
"""
    kept = supervisor([], grace_s=0.2)
    stubborn = spec(tmp_path, code)
    async with asyncio.TaskGroup() as group:
        group.create_task(kept.keep(stubborn, may_end=lambda: False))
        await until_written(stubborn.log_path, "up")
        child_pid = int(stubborn.log_path.read_text().split()[0])
        await kept.stop()
    await until_gone(child_pid)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_service_leads_a_group_in_the_session_of_its_launcher(tmp_path):
    """In a session of its own engines would starve it; without a group, Ctrl-C would hit it."""
    tells = "import os; print(os.getsid(0), os.getpgid(0) == os.getpid()); raise SystemExit(2)"
    told = spec(tmp_path, tells)
    with pytest.raises(ProcessFailedError, match="status 2"):
        await supervisor([]).keep(told, may_end=lambda: False)
    assert _text(told.log_path) == f"{os.getsid(0)} True\n"


def test_a_service_of_a_launcher_in_a_terminal_has_none(tmp_path):
    """What asks for a password at /dev/tty gets an error; in the background it would be stopped."""
    inner = spec(tmp_path, "open('/dev/tty')")
    launcher = f"""
import os, subprocess, sys
os.close(os.open("/dev/tty", os.O_RDWR))
command = [sys.executable, "-P", {child.__file__!r}, str(os.getpid()), {inner.module!r}]
sys.exit(subprocess.run(command, stdin=subprocess.DEVNULL, process_group=0, timeout=20).returncode)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", launcher], dict(inner.environ))
    printed = b""
    with contextlib.suppress(OSError):  # Linux's end of a terminal nobody writes to.
        while read := os.read(terminal, 1024):
            printed += read
    os.close(terminal)
    assert b"No such device or address: '/dev/tty'" in printed
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


async def test_a_service_ends_when_its_launcher_is_killed(tmp_path):
    log = tmp_path / "log"
    inner = spec(tmp_path, SLEEPS)
    launcher = f"""
import os, subprocess, sys, time
command = [sys.executable, "-m", {child.__name__!r}, str(os.getpid()), {inner.module!r}]
child = subprocess.Popen(command, stdout=open({str(log)!r}, "w"), process_group=0)
print(child.pid, flush=True)
time.sleep(60)
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", launcher, stdout=asyncio.subprocess.PIPE, env=dict(inner.environ)
    )
    assert process.stdout is not None
    service_pid = int(await process.stdout.readline())
    await until_written(log, "up")
    process.kill()
    await process.communicate()  # Also to the end of its pipe, which a closed loop would miss.
    async with asyncio.timeout(10):
        while is_alive(service_pid):  # noqa: ASYNC110 - a process has no event
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_one_service_ends_for_good_while_the_others_stay(tmp_path):
    """Also one that waits for its restart: it is not started again."""
    notes: list[str] = []
    slow = RestartPolicy(restarts_max=9, delay_first_s=0.5, delay_max_s=0.5)
    kept = Supervisor(policy=slow, grace_s=5.0, note=notes.append)
    services = [
        spec(tmp_path, SLEEPS, name="first"),
        spec(tmp_path, SLEEPS, name="second"),
        spec(tmp_path, "print('up', flush=True); raise SystemExit(3)", name="dying"),
    ]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(kept.keep(each, may_end=lambda: False)) for each in services]
        for each in services:
            await until_written(each.log_path, "up")
        async with asyncio.timeout(20):
            while not notes:  # noqa: ASYNC110 - the restart is announced by a line
                await asyncio.sleep(0.01)
        await kept.end("first")
        await kept.end("dying")
        await kept.end("nobody")
        async with asyncio.timeout(10):
            await asyncio.gather(tasks[0], tasks[2])
        assert [status.name for status in kept.statuses()] == ["second"]
        assert not tasks[1].done()
        assert (tmp_path / "dying.log").read_text().count("up") == 1
        again = group.create_task(kept.keep(services[0], may_end=lambda: False))
        await until_written(services[0].log_path, "up\nup")
        await kept.stop()
    assert again.done()
