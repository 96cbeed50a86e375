"""Runs an agent's commands one after another in one sandbox, whose files stay between them.

    async with Shell(Sandbox(SandboxLimits(time_s=10))) as shell:
        await shell.run("echo hello > out.txt")
        execution = await shell.run("cat out.txt")

A command has what `Sandbox` gives a program, and leaves nothing but its files in /tmp, where all of
them start: its processes are killed when it ends. Limits are those of one command; only
`folder_bytes` and `files` are of all together. One that reaches a limit is killed alone, and the
next one runs. What began the commands is out of their reach: its environment, its memory, its open
files and its network.
"""

import asyncio
import json
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, NoReturn, Self

from forgemq_graders.answers import text_of
from forgemq_graders.jail import MESSAGE_BYTES_MAX
from forgemq_graders.jail_pipes import JailPipes
from forgemq_graders.probe import ENVIRON
from forgemq_graders.sandbox import (
    JAIL,
    MARGIN_S,
    Execution,
    IsolationRefusedError,
    Sandbox,
    execution_of,
    read_up_to,
)

_TOO_LONG = Execution(ended="exit", status=126, stdout=b"", stderr=b"the command is too long\n")
_NO_TEXT = Execution(ended="exit", status=126, stdout=b"", stderr=b"the command has a null byte\n")
_REPORT_BYTES_MAX = 4096
_SAID_BYTES_MAX = 1000


class Shell:
    """Commands of one agent; an async context, whose end kills what is left and removes all files.

    Args:
        sandbox: Gives limits and folders; its `at_once` counts commands that run.
        files: In /program, executable and read-only, by name.
        environ: All that commands see, by default as a program of the sandbox.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        files: Mapping[str, str] | None = None,
        environ: Mapping[str, str] = ENVIRON,
    ) -> None:
        self._sandbox = sandbox
        configuration = sandbox.configuration(sandbox.limits, files=files or {}, environ=environ)
        self._configuration = json.dumps(configuration).encode()
        self._running = asyncio.Lock()
        self._open = ExitStack()
        self._pipes: JailPipes
        self._commands: socket.socket
        self._process: Process

    async def __aenter__(self) -> Self:
        """Start without a command.

        Raises:
            IsolationRefusedError: the machine cannot isolate commands.
        """
        await self._sandbox.check()
        self._pipes = JailPipes(self._open, self._configuration)
        self._commands, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._open.enter_context(self._commands)
        self._commands.setblocking(False)
        with theirs:
            passed = (*self._pipes.passed(), theirs.fileno())
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", str(JAIL), *map(str, passed)),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                pass_fds=passed,
                env={},
                cwd="/",
                process_group=0,  # As in `Sandbox`.
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill what runs."""
        self._pipes.cut_lifeline()
        await self._process.wait()
        self._open.close()

    async def run(self, command: str) -> Execution:
        """Run a command of /bin/sh; others wait for its end.

        Raises:
            IsolationRefusedError: the sandbox has ended.
        """
        message = json.dumps(["/bin/sh", "-c", text_of(command)]).encode()
        if "\0" in command:
            return _NO_TEXT
        if len(message) > MESSAGE_BYTES_MAX:
            return _TOO_LONG
        limits = self._sandbox.limits
        async with self._running, self._sandbox.at_once:
            is_known = False  # How it ended; else what the next command would read is unknown.
            try:
                async with asyncio.timeout(limits.time_s + MARGIN_S):
                    execution = await self._execute(message, bytes_max=limits.output_bytes)
                is_known = True
            except TimeoutError:
                raise IsolationRefusedError(f"no end {MARGIN_S:g} s after its limit") from None
            finally:
                if not is_known:
                    self._end()
        return execution

    async def _execute(self, message: bytes, *, bytes_max: int) -> Execution:
        with ExitStack() as files:
            nothing = os.open(os.devnull, os.O_RDONLY)
            streams, theirs = [], [files.enter_context(os.fdopen(nothing, "rb", buffering=0))]
            for _ in range(2):
                reading, writing = os.pipe()
                theirs.append(files.enter_context(os.fdopen(writing, "wb", buffering=0)))
                streams.append(await _stream(files, reading))
            await self._send(message, [file.fileno() for file in theirs])
            for file in theirs:
                file.close()
            async with asyncio.TaskGroup() as tasks:
                reads = [
                    tasks.create_task(read_up_to(stream, bytes_max, self._stop))
                    for stream in streams
                ]
        outputs = [read.result() for read in reads]
        return execution_of(await self._report(), outputs, bytes_max=bytes_max)

    async def _send(self, message: bytes, files: list[int]) -> None:
        try:
            socket.send_fds(self._commands, [message], files)
        except ConnectionError:
            await self._refuse()

    def _end(self) -> None:
        """Have all killed and refuse commands at once, before what kills has noticed."""
        self._commands.shutdown(socket.SHUT_RDWR)
        self._pipes.cut_lifeline()

    def _stop(self) -> None:
        """Have the command killed; if it has ended meanwhile, nothing comes of it."""
        with suppress(ConnectionError, BlockingIOError):
            self._commands.send(b"!")

    async def _report(self) -> dict[str, Any]:
        said = b""
        with suppress(ConnectionError):
            said = await asyncio.get_running_loop().sock_recv(self._commands, _REPORT_BYTES_MAX)
        if not said:
            await self._refuse()
        report: dict[str, Any] = json.loads(said)
        return report

    async def _refuse(self) -> NoReturn:
        """Say why there is no sandbox any more.

        Raises:
            IsolationRefusedError: always.
        """
        _, stderr = await self._process.communicate()
        detail = self._pipes.report().get("detail", "it has ended")
        said = stderr[-_SAID_BYTES_MAX:].decode(errors="replace")
        raise IsolationRefusedError(f"the sandbox cannot isolate a command: {detail} {said}")


async def _stream(files: ExitStack, reading: int) -> asyncio.StreamReader:
    """Reads this end of a pipe until `files` are closed."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", buffering=0)
    )
    files.callback(transport.close)
    return stream
