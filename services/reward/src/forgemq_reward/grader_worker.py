"""The grader process itself: runs the user's reward functions; its parent kills it if they hang.

Each grading is a task of the process's event loop. Functions that are not `async` run on the loop
too, so they hold up whatever else is in the process: its parent gives an episode whose functions
are all of that kind a process of its own.

Started as `python -m forgemq_reward.grader_worker`. It reads messages on stdin and answers on its
original stdout; `sys.stdout` is moved to stderr, so prints of user code cannot break a message.
"""

import asyncio
import functools
import hashlib
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import msgspec

from forgemq_contracts.grading import GradingEpisode
from forgemq_contracts.grading_waits import heard_by
from forgemq_reward.core.verdict import Verdict
from forgemq_reward.grader_messages import (
    LENGTH_BYTES,
    Cancel,
    FromWorker,
    Grade,
    Graded,
    Load,
    Loaded,
    QueueFunctions,
    ToWorker,
    Waiting,
    frame_from_worker,
    to_worker,
)
from forgemq_settings.user_code import add_code_paths

Grader: TypeAlias = Callable[[GradingEpisode], Any]
_VERSION_CHARACTERS = 16
"""64 bits of the hash: enough to tell versions of one file apart."""


class LoadError(Exception):
    """A reward function cannot be imported; the message says which and why."""


class _UserCodeError(Exception):
    """User code raised; the message has type and text of its error."""


class Graders(msgspec.Struct, frozen=True, kw_only=True):
    """The functions of one queue; None if the queue names none."""

    outcome: Grader | None
    process: Grader | None
    speed: Grader | None


def main() -> None:
    """Answer messages until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asyncio.run(_serve(sys.stdin.buffer, answers))


async def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    received: asyncio.Queue[ToWorker] = asyncio.Queue()
    # The reader is a thread so that the process ends with its parent even while user code loops.
    reader = threading.Thread(
        target=_read_requests,
        args=(requests, asyncio.get_running_loop(), received),
        daemon=True,
    )
    reader.start()
    graders: dict[str, Graders] = {}
    grading: dict[int, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        while True:
            match await received.get():
                case Load() as load:
                    _answer(answers, _import_all(load, graders))
                case Grade(number=number, episode=episode):
                    work = _grade(answers, graders[episode.domain], episode, number=number)
                    grading[number] = tasks.create_task(work)
                    grading[number].add_done_callback(functools.partial(_forget, grading, number))
                case Cancel(number=number):
                    if number in grading:
                        grading[number].cancel()


def _forget(grading: dict[int, asyncio.Task[None]], number: int, over: object) -> None:
    del over
    grading.pop(number)


async def _grade(
    answers: BinaryIO, graders: Graders, episode: GradingEpisode, *, number: int
) -> None:
    def say(is_waiting: bool) -> None:
        _answer(answers, Waiting(number=number, is_waiting=is_waiting))

    try:
        with heard_by(say):
            verdict = await verdict_of(graders, episode)
    except asyncio.CancelledError:
        # By the parent, or by user code that cancelled its own task: either way it is answered.
        verdict = Verdict(error="the grading was cancelled")
    _answer(answers, Graded(number=number, verdict=verdict))


async def verdict_of(graders: Graders, episode: GradingEpisode) -> Verdict:
    """Call the user's functions; an exception of one becomes the verdict's error."""
    values: dict[str, Any] = {}
    parts: tuple[tuple[str, Grader | None, Callable[[Any], Any]], ...] = (
        ("outcome", graders.outcome, _number),
        ("process", graders.process, _numbers),
        ("speed", graders.speed, _number),
    )
    for name, grader, convert in parts:
        if grader is None:
            continue
        try:
            values[name] = convert(await _returned(grader, episode))
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it ends no process
            # Half of a surrogate pair, as JSON of the policy may have it, is in no message.
            said = f"{name} raised {type(error).__name__}: {error}".encode(errors="replace")
            return Verdict(error=said.decode())
    return Verdict(**values)


def load_function(name: str) -> Grader:
    """Import the function `module:function`.

    Raises:
        LoadError: the import fails, or the function is missing or cannot be called.
    """
    module_name, _, function_name = name.partition(":")
    try:
        function = _call_user_code(_imported, module_name, function_name)
    except _UserCodeError as error:
        raise LoadError(f"reward function {name}: {error}") from error
    if not callable(function):
        raise LoadError(f"reward function {name}: {type(function).__name__} cannot be called")
    grader: Grader = function
    return grader


def _call_user_code(function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    try:
        return function(*arguments)
    except Exception as error:
        # Broad, because user code may raise anything, and it must not end the process.
        raise _UserCodeError(f"{type(error).__name__}: {error}") from error


async def _returned(grader: Grader, episode: GradingEpisode) -> Any:  # noqa: ANN401
    value = grader(episode)
    return await value if inspect.isawaitable(value) else value


def _is_async(grader: Grader | None) -> bool:
    """Whether a call returns a coroutine; of an object, its `__call__` decides."""
    call = getattr(grader, "__call__", None)  # noqa: B004 - the method itself is asked
    return inspect.iscoroutinefunction(grader) or inspect.iscoroutinefunction(call)


def _imported(module_name: str, function_name: str) -> Any:  # noqa: ANN401
    return getattr(importlib.import_module(module_name), function_name)


def code_version(names: Sequence[str]) -> str:
    """Hash of the source files of these functions' modules."""
    digest = hashlib.blake2b()
    for module_name in sorted({name.partition(":")[0] for name in names}):
        file = importlib.import_module(module_name).__file__
        digest.update(module_name.encode() + b"\0")
        digest.update(Path(file).read_bytes() if file else b"")
    return digest.hexdigest()[:_VERSION_CHARACTERS]


def _import_all(load: Load, graders: dict[str, Graders]) -> Loaded:
    add_code_paths(load.code_paths)
    try:
        for functions in load.queues:
            graders[functions.domain] = _graders(functions)
    except LoadError as error:
        return Loaded(error=str(error))
    return Loaded(
        versions=tuple((q.domain, code_version(q.names)) for q in load.queues),
        async_domains=tuple(
            domain
            for domain, one in graders.items()
            if any(map(_is_async, (one.outcome, one.process, one.speed)))
        ),
    )


def _graders(functions: QueueFunctions) -> Graders:
    return Graders(
        outcome=load_function(functions.outcome) if functions.outcome else None,
        process=load_function(functions.process) if functions.process else None,
        speed=load_function(functions.speed) if functions.speed else None,
    )


def _number(value: Any) -> float:  # noqa: ANN401 - whatever the user's function returned
    if isinstance(value, str):
        raise TypeError("a reward must be a number, got a str")
    return float(value)


def _numbers(values: Any) -> tuple[float, ...]:  # noqa: ANN401 - as above
    return tuple(_number(value) for value in values)


def _read_requests(
    stream: BinaryIO, loop: asyncio.AbstractEventLoop, received: "asyncio.Queue[ToWorker]"
) -> None:
    while len(head := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
        length = int.from_bytes(head, "big")
        payload = stream.read(length)
        if len(payload) < length:
            break
        loop.call_soon_threadsafe(received.put_nowait, to_worker(payload))
    os._exit(0)


def _answer(stream: BinaryIO, message: FromWorker) -> None:
    stream.write(frame_from_worker(message))
    stream.flush()


if __name__ == "__main__":
    main()
