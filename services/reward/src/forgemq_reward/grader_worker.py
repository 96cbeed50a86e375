"""The grader process itself: runs the user's reward functions; its parent kills it if they hang.

Started as `python -m forgemq_reward.grader_worker`. It reads messages on stdin and answers on its
original stdout; `sys.stdout` is moved to stderr, so prints of user code cannot break a message.
"""

import hashlib
import importlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import msgspec

from forgemq_contracts.grading import GradingEpisode
from forgemq_reward.core.verdict import Verdict
from forgemq_reward.grader_messages import (
    LENGTH_BYTES,
    FromWorker,
    Grade,
    Graded,
    Load,
    Loaded,
    QueueFunctions,
    ToWorker,
    frame_from_worker,
    to_worker,
)

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
    requests: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
    # The reader is a thread so that the process ends with its parent even while user code loops.
    reader = threading.Thread(target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True)
    reader.start()
    graders: dict[str, Graders] = {}
    while True:
        match requests.get():
            case Load() as load:
                _answer(answers, _import_all(load, graders))
            case Grade(episode=episode):
                verdict = verdict_of(graders[episode.domain], episode)
                _answer(answers, Graded(verdict=verdict))


def verdict_of(graders: Graders, episode: GradingEpisode) -> Verdict:
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
            values[name] = _call_user_code(_converted, grader, convert, episode)
        except _UserCodeError as error:
            return Verdict(error=f"{name} raised {error}")
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


def _converted(grader: Grader, convert: Callable[[Any], Any], episode: GradingEpisode) -> Any:  # noqa: ANN401
    return convert(grader(episode))


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
    sys.path.extend(path for path in load.code_paths if path not in sys.path)
    try:
        for functions in load.queues:
            graders[functions.domain] = _graders(functions)
    except LoadError as error:
        return Loaded(error=str(error))
    return Loaded(versions=tuple((q.domain, code_version(q.names)) for q in load.queues))


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


def _read_requests(stream: BinaryIO, requests: "queue.SimpleQueue[ToWorker]") -> None:
    while len(head := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
        length = int.from_bytes(head, "big")
        payload = stream.read(length)
        if len(payload) < length:
            break
        requests.put(to_worker(payload))
    os._exit(0)


def _answer(stream: BinaryIO, message: FromWorker) -> None:
    stream.write(frame_from_worker(message))
    stream.flush()


if __name__ == "__main__":
    main()
