"""Runs programs that nobody trusts, without the machine's network, files, processes, environment.

    sandbox = Sandbox(SandboxLimits(time_s=5))
    execution = await sandbox.run_python("print(input())", stdin=b"hello")

The mechanism is the kernel's: namespaces for users, processes, mounts, network and messages between
processes (`jail.py`), a filter of system calls (`system_calls.py`), and resource limits. It needs
Linux 5.14 or later on x86_64 and the right to make namespaces; before the first program a probe
tries out what is claimed. What is not possible is refused by name, and nothing runs.
"""

import asyncio
import base64
import contextlib
import json
import os
import platform
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from forgemq_graders.jail_pipes import JailPipes
from forgemq_graders.probe import ENVIRON, PROBE, faults
from forgemq_graders.system_calls import call_filter
from forgemq_graders.turns import in_turn

Ended: TypeAlias = Literal["exit", "signal", "time", "cpu", "memory", "output", "stopped"]
JAIL = Path(__file__).with_name("jail.py")
_READ_BYTES = 65_536
_SAID_CHARACTERS_MAX = 1000
ROOT_NAMES = frozenset({"bin", "sbin", "lib", "lib32", "lib64", "dev", "program", "tmp"})
"""What a program sees in "/", besides the folders that it may read."""

MARGIN_S = 10.0
"""Beyond a program's time: for the namespaces to begin and end on a busy machine."""


class IsolationRefusedError(Exception):
    """This machine cannot isolate a program as asked; the message says what is missing."""


class SandboxLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one program with all its processes together, unless named otherwise."""

    time_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    cpu_s: Annotated[int, Meta(ge=1, le=3600, description="Of all processes and cores.")] = 10
    memory_bytes: Annotated[
        int,
        Meta(
            ge=2**25,
            description="Resident, where pages that processes share count for each, and what its "
            "local sockets may hold; also the address space of one process. Beside it a pipe "
            "holds up to 64 KiB.",
        ),
    ] = 2**29
    processes: Annotated[int, Meta(ge=1, le=1024, description="Threads count too.")] = 16
    output_bytes: Annotated[int, Meta(ge=0, description="Of stdout, and of stderr.")] = 2**20
    file_bytes: Annotated[int, Meta(ge=0, description="Of one file.")] = 2**24
    folder_bytes: Annotated[
        int, Meta(ge=4096, description="Of all files; they are in memory, beside `memory_bytes`.")
    ] = 2**26
    files: Annotated[int, Meta(ge=2, description="Files and folders.")] = 1024
    open_files: Annotated[int, Meta(ge=8, le=4096, description="Of one process.")] = 64


class Execution(Struct, frozen=True, kw_only=True):
    """How a program ended.

    Attributes:
        ended: exit: by itself. signal: by a signal. time, cpu, memory, output: at that limit.
        status: Exit status; minus the signal's number; 0 if neither.
        stdout: What it wrote, up to the limit.
        stderr: As stdout.
    """

    ended: Ended
    status: int
    stdout: bytes
    stderr: bytes


def execution_of(said: Mapping[str, Any], outputs: Sequence[bytes], *, bytes_max: int) -> Execution:
    """What `jail.py` said of a program, and what the program wrote, which may be cut."""
    is_cut = any(len(output) > bytes_max for output in outputs)
    stdout, stderr = (output[:bytes_max] for output in outputs)
    return Execution(
        ended="output" if is_cut else said["ended"],
        status=said.get("status", 0),
        stdout=stdout,
        stderr=stderr,
    )


class Sandbox:
    """Runs programs, at most `at_once` at the same time.

    Args:
        limits: Of each program.
        folders: That programs may read, besides /usr and the interpreter's.
        at_once: The others wait.
    """

    def __init__(
        self, limits: SandboxLimits | None = None, *, folders: Sequence[str] = (), at_once: int = 4
    ) -> None:
        self.limits = msgspec.convert(msgspec.to_builtins(limits or SandboxLimits()), SandboxLimits)
        for folder in folders:
            if not Path(folder).is_dir():
                raise ValueError(f"folders must be folders of this machine, got {folder}")
        prefixes = (os.path.realpath(sys.base_prefix), *map(os.path.realpath, folders))
        self._folders = tuple(dict.fromkeys(("/usr", *prefixes)))
        self._python = os.path.realpath(sys.executable)
        self.at_once = asyncio.Semaphore(at_once)
        self._checking = asyncio.Lock()
        self._is_checked = False

    async def run_python(self, program: str, *, stdin: bytes = b"") -> Execution:
        """Run a Python program with this interpreter and its standard library.

        Raises:
            IsolationRefusedError: the machine cannot isolate it; it did not run.
        """
        command = (self._python, "-I", "-B", "-X", "utf8", "/program/main.py")
        return await self.run(command, files={"main.py": program}, stdin=stdin)

    async def run(
        self, command: Sequence[str], *, files: Mapping[str, str] | None = None, stdin: bytes = b""
    ) -> Execution:
        """Run a command in an empty folder that is gone afterwards.

        Args:
            command: Program, by its path, and arguments.
            files: In /program, by name.
            stdin: The command may leave it unread.

        Raises:
            IsolationRefusedError: the machine cannot isolate it; it did not run.
        """
        await self.check()
        async with in_turn(self.at_once):
            return await self._execute(command, self.limits, files=files or {}, stdin=stdin)

    async def check(self) -> None:
        """Run the probe, once: a program that tries what it must not be able to do.

        Raises:
            IsolationRefusedError: it names what is missing.
        """
        async with self._checking:
            if self._is_checked:
                return
            if platform.machine() != "x86_64" or sys.platform != "linux":
                raise IsolationRefusedError("the sandbox needs Linux on x86_64")
            limits = SandboxLimits(processes=4)
            command = (self._python, "-I", "-B", "/program/main.py")
            probe = await self._execute(command, limits, files={"main.py": PROBE}, stdin=b"")
            root = {Path(folder).parts[1] for folder in self._folders} | ROOT_NAMES
            if missing := faults(probe.stdout, processes_max=limits.processes, root=root):
                said = probe.stderr.decode(errors="replace")[-_SAID_CHARACTERS_MAX:]
                raise IsolationRefusedError(f"the probe of the sandbox failed: {missing} {said}")
            self._is_checked = True

    def configuration(
        self,
        limits: SandboxLimits,
        *,
        files: Mapping[str, str],
        environ: Mapping[str, str] = ENVIRON,
    ) -> dict[str, Any]:
        """What `jail.py` reads, without a command."""
        return {
            "environ": dict(environ),
            "folders": self._folders,
            "files": dict(files),
            "limits": msgspec.to_builtins(limits),
            "filter": base64.b64encode(call_filter()).decode(),
        }

    async def _execute(
        self,
        command: Sequence[str],
        limits: SandboxLimits,
        *,
        files: Mapping[str, str],
        stdin: bytes,
    ) -> Execution:
        configuration = {"command": list(command), **self.configuration(limits, files=files)}
        with ExitStack() as files_open:
            pipes = JailPipes(files_open, json.dumps(configuration).encode())
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", str(JAIL), *map(str, pipes.passed())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=pipes.passed(),
                env={},
                cwd="/",
                # Not a session: beside engines on a CPU Linux would let it wait for seconds
                # (autogroup). The jail's /dev has no terminal.
                process_group=0,
            )
            outputs = await _talk(process, pipes, limits, stdin=stdin)
            said = pipes.report()
        if said["ended"] == "refused":
            detail = said["detail"] + " " + outputs[1].decode(errors="replace")
            detail = detail[:_SAID_CHARACTERS_MAX]
            raise IsolationRefusedError(f"the sandbox cannot isolate a program: {detail}")
        return execution_of(said, outputs, bytes_max=limits.output_bytes)


async def _talk(
    process: Process, pipes: JailPipes, limits: SandboxLimits, *, stdin: bytes
) -> tuple[bytes, bytes]:
    """Feed the program and read what it writes, until all its processes are gone.

    Raises:
        IsolationRefusedError: nothing has ended it.
    """
    assert process.stdin is not None, "opened with PIPE"
    assert process.stdout is not None, "opened with PIPE"
    assert process.stderr is not None, "opened with PIPE"
    try:
        async with asyncio.timeout(limits.time_s + MARGIN_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(_feed(process.stdin, stdin))
            bounds = (limits.output_bytes, pipes.cut_lifeline)
            stdout = tasks.create_task(read_up_to(process.stdout, *bounds))
            stderr = tasks.create_task(read_up_to(process.stderr, *bounds))
        return stdout.result(), stderr.result()
    except TimeoutError:
        raise IsolationRefusedError(f"no end {MARGIN_S:g} s after its limit") from None
    finally:
        pipes.cut_lifeline()
        await process.wait()


async def _feed(stream: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # The program need not read it.
        stream.write(content)
        await stream.drain()
    stream.close()


async def read_up_to(
    stream: asyncio.StreamReader, bytes_max: int, stop: Callable[[], None]
) -> bytes:
    """Read to the end, and keep up to one byte more than `bytes_max`, at which it is stopped."""
    kept = b""
    while chunk := await stream.read(_READ_BYTES):
        kept = (kept + chunk)[: bytes_max + 1]
        if len(kept) > bytes_max:
            stop()
    return kept
