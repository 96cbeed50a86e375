"""An agent's commands in one sandbox: what stays, what ends, and what hostile ones get."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
import psutil
import pytest

from forgemq_graders import Execution, IsolationRefusedError, Sandbox, SandboxLimits, Shell

LIMITS = SandboxLimits(time_s=3, cpu_s=2, memory_bytes=2**27, processes=8, output_bytes=10_000)
# Of this process alone: tests beside it run commands too.
MARK = f"mark-{os.getpid()}"

Opened = Callable[..., AbstractAsyncContextManager[Shell]]


@asynccontextmanager
async def shell(**limits: float) -> AsyncIterator[Shell]:
    async with Shell(Sandbox(msgspec.structs.replace(LIMITS, **limits))) as opened:
        yield opened
    assert left() == []


def left() -> list[int]:
    """Processes of the machine that a command of these tests has started."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(MARK in argument for argument in process.info["cmdline"] or ())
    ]


async def has_begun() -> None:
    """Wait for a command of these tests."""
    async with asyncio.timeout(30):
        while not left():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


def words(execution: Execution) -> tuple[str, int, str]:
    return execution.ended, execution.status, execution.stdout.decode()


async def test_files_stay_between_commands_and_nothing_else_does() -> None:
    async with shell() as opened:
        assert words(await opened.run("echo hello > a; cd /; x=1; pwd")) == ("exit", 0, "/\n")
        assert words(await opened.run("cat a; pwd; echo $x")) == ("exit", 0, "hello\n/tmp\n\n")
    async with shell() as opened:
        assert words(await opened.run("ls")) == ("exit", 0, "")


async def test_status_output_and_errors_come_back() -> None:
    async with shell() as opened:
        execution = await opened.run("echo out; echo err >&2; exit 3")
        assert words(execution) == ("exit", 3, "out\n")
        assert execution.stderr == b"err\n"
        assert words(await opened.run("kill -9 $$"))[:2] == ("signal", -9)


async def test_given_files_are_commands_that_cannot_be_changed() -> None:
    tool = "#!/bin/sh\necho tool $1\n"
    sandbox = Sandbox(LIMITS)
    async with Shell(sandbox, files={"tool": tool}, environ={"PATH": "/program"}) as opened:
        assert words(await opened.run("tool 7")) == ("exit", 0, "tool 7\n")
        assert words(await opened.run("echo no > /program/tool"))[1] != 0
        assert words(await opened.run("ls"))[1] == 127
        assert words(await opened.run("tool 8")) == ("exit", 0, "tool 8\n")


async def test_what_a_command_leaves_running_is_killed_before_the_next_one() -> None:
    async with shell() as opened:
        leave = f"setsid sh -c 'sleep 60; : {MARK}' >/dev/null 2>&1 & echo left"
        assert words(await opened.run(leave)) == ("exit", 0, "left\n")
        assert left() == []
        assert words(await opened.run("echo next")) == ("exit", 0, "next\n")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("command", "ended"),
    [
        (f"sleep 60; : {MARK}", "time"),
        (f"while :; do :; done; : {MARK}", "cpu"),
        (f"yes; : {MARK}", "output"),
        (f"python3 -c 'b = [bytearray(2**24) for _ in range(99)]'; : {MARK}", "exit"),
    ],
    ids=["time", "cpu", "output", "memory"],
)
async def test_a_command_at_a_limit_ends_alone(command: str, ended: str) -> None:
    # On a busy machine a command waits long for its share of the processor.
    async with shell(time_s=120 if ended == "cpu" else 1) as opened:
        await opened.run("echo kept > a")
        execution = await opened.run(command)
        assert execution.ended == ended
        assert len(execution.stdout) <= LIMITS.output_bytes
        assert words(await opened.run("cat a")) == ("exit", 0, "kept\n")


@pytest.mark.slow
async def test_a_fork_bomb_ends_at_its_limits_and_the_next_command_runs() -> None:
    async with shell(time_s=1) as opened:
        bomb = f"b() {{ b | b & }}; b; : {MARK}; sleep 60"
        execution = await opened.run(bomb)
        assert execution.ended in ("time", "cpu", "exit")
        assert b"fork" in execution.stderr.lower() + execution.stdout.lower()
        assert left() == []
        assert words(await opened.run("echo alive")) == ("exit", 0, "alive\n")


@pytest.mark.slow
async def test_a_command_that_kills_whatever_it_can_ends_alone() -> None:
    async with shell() as opened:
        for name in ("INT", "TERM", "STOP", "KILL", "HUP", "USR1"):
            await opened.run(f"kill -{name} 1; kill -{name} -1; sleep 0.2")
        assert words(await opened.run("echo alive")) == ("exit", 0, "alive\n")


async def test_no_network_not_even_that_of_this_machine_is_in_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        async with shell() as opened:
            execution = await opened.run(f'python3 -c "{connect}"')
        assert execution.status == 1
        assert b"Address family not supported" in execution.stderr
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


async def test_neither_environment_nor_processes_of_what_began_the_command_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORGEMQ_GATEWAY_ADMIN_KEY", "the-secret")
    async with shell() as opened:
        execution = await opened.run("env; cat /proc/*/environ; ls /proc /etc /home /root; ls /")
        for descriptor in range(3, 20):
            await opened.run(f"cat <&{descriptor}; echo x >&{descriptor}")
        assert words(await opened.run("echo alive")) == ("exit", 0, "alive\n")
    assert b"the-secret" not in execution.stdout + execution.stderr
    variables = {line.split("=")[0] for line in execution.stdout.decode().splitlines()[:5]}
    assert {"PATH", "HOME", "LANG"} <= variables
    assert "FORGEMQ" not in execution.stdout.decode()
    assert execution.stdout.split()[-1] == b"usr"
    assert b"proc" not in execution.stdout.split()


async def test_a_command_that_is_too_long_is_said_to_be_and_the_next_one_runs() -> None:
    async with shell() as opened:
        assert words(await opened.run(f"exit 3 # {'x' * 131_072}")) == ("exit", 126, "")
        assert words(await opened.run(f"exit 3 # {'x' * 130_000}")) == ("exit", 3, "")
        assert words(await opened.run("echo alive")) == ("exit", 0, "alive\n")


async def test_a_command_that_is_no_text_is_said_to_be_or_read_as_text_and_the_next_one_runs() -> (
    None
):
    """A policy can write both escapes in the arguments of a call, which are JSON."""
    async with shell() as opened:
        null = await opened.run("echo a\0b")
        assert (words(null), null.stderr) == (("exit", 126, ""), b"the command has a null byte\n")
        assert words(await opened.run("echo a\ud800b")) == ("exit", 0, "a?b\n")
        assert words(await opened.run("echo alive")) == ("exit", 0, "alive\n")


async def test_commands_of_one_shell_wait_for_one_another_and_those_of_two_do_not() -> None:
    async with shell(time_s=60) as one, shell(time_s=60) as other:
        first = asyncio.ensure_future(one.run(f"sleep 60; : {MARK}"))
        second = asyncio.ensure_future(one.run("echo second"))
        await has_begun()
        assert words(await other.run("echo other")) == ("exit", 0, "other\n")
        assert not first.done()
        assert not second.done()
        for pid in left():
            os.kill(pid, signal.SIGKILL)
        assert (await first).ended == "signal"
        assert words(await second) == ("exit", 0, "second\n")


async def test_a_cancelled_command_leaves_no_process_and_ends_its_shell() -> None:
    async with shell(time_s=60) as opened:
        running = asyncio.ensure_future(opened.run(f"sleep 60; : {MARK}"))
        await has_begun()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(IsolationRefusedError):
            await opened.run("echo again")


async def test_no_command_follows_a_cancelled_one_even_if_what_kills_it_is_slow() -> None:
    async with shell(time_s=60) as opened:
        running = asyncio.ensure_future(opened.run(f"sleep 60; : {MARK}"))
        await has_begun()
        kills = psutil.Process(left()[0]).parents()[1]  # Behind process 1 of the namespace.
        kills.suspend()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        again = asyncio.ensure_future(opened.run("echo again"))
        await asyncio.sleep(0.1)
        kills.resume()
        with pytest.raises(IsolationRefusedError):
            await again
