"""Runs any program as an agent: base URL and key of the model are in its environment.

    play = black_box(("python", "my_agent.py", "--task", "{task_file}"), timeout_s=600)

The program sees, and `{name}` in its arguments is replaced by:

    OPENAI_BASE_URL, OPENAI_API_KEY         base_url, key
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY   the same for clients of Anthropic's messages
    FORGEMQ_TASK_FILE                       task_file: the task, JSON
    FORGEMQ_RESULT_FILE                     result_file: where it may write its result, JSON

It runs in an empty folder, which is removed afterwards. Exit status 0 finishes the episode,
whatever the program achieved; any other status masks it, unless the program says that the policy
was why, or the gateway refused its newest request because the context is full: those truncate the
episode. It says so with an exit status of `policy_statuses`, or with the field `truncated_by` of
its result: the limit that ended the episode, or null for none.
"""

import asyncio
import contextlib
import os
import signal
import stat
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn, get_args

import msgspec
from msgspec import UNSET, UnsetType

from forgemq_agents.episode import Episode
from forgemq_agents.errors import (
    AgentFailedError,
    AgentStatusError,
    AgentTimeoutError,
    PolicyFailedError,
)
from forgemq_contracts.fields import TruncationCause
from forgemq_contracts.half_pairs import without_halves

# Enough of the last output to see why a program failed: the end of a traceback.
OUTPUT_BYTES_KEPT = 4000
RESULT_BYTES_MAX = 16 * 2**20
"""Of what the program wrote: it is read at once, by the process that plays all episodes."""
# For what is still in the pipe of a program that has ended: a process that left its group may hold
# the pipe open without end.
OUTPUT_END_S = 1.0
# Between SIGTERM and SIGKILL: time to close connections and files.
KILL_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlackBox:
    """An agent that runs a command; make it with `black_box`."""

    command: tuple[str, ...]
    timeout_s: float
    environ: Mapping[str, str]
    truncates_at_timeout: bool
    policy_statuses: frozenset[int]

    async def __call__(self, episode: Episode) -> None:
        """Run the command to its end.

        Raises:
            AgentFailedError: its exit status was not 0, it ran out of time, or its result is wrong.
            PolicyFailedError: its exit status was not 0, and it says that the policy was why.
        """
        with tempfile.TemporaryDirectory(prefix="episode-") as name:
            folder = Path(name)
            files = {"task_file": folder / "task.json", "result_file": folder / "result.json"}
            files["task_file"].write_bytes(msgspec.json.encode(episode.task))
            values = {
                "base_url": episode.base_url,
                "session_url": episode.session_url,
                "key": episode.key,
                **{key: str(path) for key, path in files.items()},
            }
            is_ended = True
            try:
                output = await self._run_to_end(
                    [_fill(part, values) for part in self.command],
                    environ={**_environ(episode, values), **self.environ},
                    folder=folder,
                )
            except AgentTimeoutError:
                if not self.truncates_at_timeout:
                    raise
                episode.truncate("out_of_time")
                is_ended, output = False, b""
            except AgentStatusError as error:
                self._raise_meaning(episode, error, files["result_file"])
            episode.result, cause = _said_limit(_result(files["result_file"], output))
            if is_ended and cause is not UNSET:
                episode.truncate(cause)

    def _raise_meaning(self, episode: Episode, error: AgentStatusError, result: Path) -> NoReturn:
        """Raise what the end of a program that failed means, as far as it says so.

        What it wrote before it failed may be no JSON; then it has said nothing.

        Raises:
            PolicyFailedError: it says that the policy was why.
            AgentStatusError: it does not.
        """
        said: TruncationCause | UnsetType | None = UNSET
        with contextlib.suppress(AgentFailedError):
            episode.result, said = _said_limit(_result(result, error.output))
        if said is UNSET and error.status in self.policy_statuses:
            said = "declared"
        if said is UNSET or said is None:
            raise error
        episode.truncate(said)
        raise PolicyFailedError(str(error)) from error

    async def _run_to_end(
        self, command: Sequence[str], *, environ: Mapping[str, str], folder: Path
    ) -> bytes:
        """Run the command; returns the end of its output."""
        async with _last_output() as (output, tail):
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=folder,
                env=environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
            output.close()  # So that the pipe ends with the program.
            try:
                status = await asyncio.wait_for(process.wait(), self.timeout_s)
            except TimeoutError as error:
                raise AgentTimeoutError(f"no end after {self.timeout_s:g} s") from error
            finally:
                await _stop(process)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(tail.ended.wait(), OUTPUT_END_S)
        if status != 0:
            raise AgentStatusError(status=status, output=tail.kept)
        return tail.kept


def black_box(
    command: Sequence[str],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    truncates_at_timeout: bool = False,
    policy_statuses: Collection[int] = (),
) -> BlackBox:
    """Make an agent that runs this command for every episode.

    Args:
        command: Program and arguments.
        timeout_s: The program is stopped after this time.
        environ: Environment variables to add to the inherited ones.
        truncates_at_timeout: Whether `timeout_s` is the policy's limit and truncates the episode.
            By default it masks: a slow engine, too, lets time run out.
        policy_statuses: Exit statuses by which the program says that it failed on what the policy
            wrote; the episode is scored, as truncated by `declared`. Not 0.

    Raises:
        ValueError: `command` is empty, or `policy_statuses` has a 0.
    """
    if not command:
        raise ValueError("command must name a program, got none")
    if 0 in policy_statuses:
        raise ValueError("policy_statuses must not have 0: status 0 finishes an episode")
    return BlackBox(
        command=tuple(command),
        timeout_s=timeout_s,
        environ=dict(environ or {}),
        truncates_at_timeout=truncates_at_timeout,
        policy_statuses=frozenset(policy_statuses),
    )


class _Tail(asyncio.Protocol):
    """Keeps the last bytes of a pipe, however many come."""

    def __init__(self) -> None:
        self.kept = b""
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Add these bytes."""
        self.kept = (self.kept + data)[-OUTPUT_BYTES_KEPT:]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - of the protocol
        """Note the end: all who had the pipe are gone."""
        self.ended.set()


@asynccontextmanager
async def _last_output() -> AsyncIterator[tuple[IO[bytes], _Tail]]:
    """A file for a program to write to, and what stays of it."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb", buffering=0) as output:
        transport, tail = await asyncio.get_running_loop().connect_read_pipe(
            _Tail, os.fdopen(reading, "rb", buffering=0)
        )
        try:
            yield output, tail
        finally:
            transport.close()


def _fill(part: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        part = part.replace("{" + name + "}", value)
    return part


def _environ(episode: Episode, values: Mapping[str, str]) -> dict[str, str]:
    return {
        **episode.environ,
        "OPENAI_BASE_URL": values["base_url"],
        "OPENAI_API_KEY": values["key"],
        "ANTHROPIC_BASE_URL": values["base_url"].removesuffix("/v1"),
        "ANTHROPIC_API_KEY": values["key"],
        "FORGEMQ_TASK_FILE": values["task_file"],
        "FORGEMQ_RESULT_FILE": values["result_file"],
    }


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Kill the program and its children: nothing may sample for an episode that is over."""
    try:
        _signal_group(process.pid, signal.SIGTERM)
        await asyncio.wait_for(process.wait(), KILL_GRACE_S)
    except TimeoutError:
        pass
    finally:
        # Also if the wait is cancelled, and for children that a program left when it ended.
        _signal_group(process.pid, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _result(path: Path, output: bytes) -> object:
    written = _written(path)
    if written is None:
        return {"output": output.decode(errors="replace")}
    try:
        return msgspec.json.decode(without_halves(written))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AgentFailedError(f"its result is not JSON: {error}") from error


def _written(path: Path) -> bytes | None:
    """What is in a file that the policy may have made; None if it is not there.

    Raises:
        AgentFailedError: it is too long, or no file whose end comes by itself.
    """
    try:
        # A pipe without a writer would wait for one, with all other episodes of this process.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentFailedError(f"its result cannot be read: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise AgentFailedError("its result is no file but a folder, a pipe or a device")
        with os.fdopen(number, "rb", closefd=False) as file:
            written = file.read(RESULT_BYTES_MAX + 1)
    finally:
        os.close(number)
    if len(written) > RESULT_BYTES_MAX:
        raise AgentFailedError(f"its result must have at most {RESULT_BYTES_MAX} bytes")
    return written


def _said_limit(result: object) -> tuple[object, TruncationCause | UnsetType | None]:
    """The result without `truncated_by`, and what that field says; UNSET if it is not there."""
    if not isinstance(result, dict) or "truncated_by" not in result:
        return result, UNSET
    said = result.pop("truncated_by")
    try:
        return result, msgspec.convert(said, TruncationCause | None)
    except msgspec.ValidationError as error:
        causes = ", ".join(get_args(get_args(TruncationCause)[0]))
        raise AgentFailedError(
            f"truncated_by in its result: must be one of {causes}, or null; is {said!r}"
        ) from error
