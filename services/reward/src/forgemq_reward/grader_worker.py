"""The process that runs a user's reward functions; the grading loop ends it when they hang.

Started as `python -m forgemq_reward.grader_worker`. It reads frames on stdin and answers on the
stdout it was born with; what the user's code prints goes to stderr.
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
from forgemq_reward.grader_wire import (
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


class LoadError(Exception):
    """A reward function cannot be imported; says which and why."""


class Graders(msgspec.Struct, frozen=True, kw_only=True):
    """The functions of one queue; None where the run names none."""

    outcome: Grader | None
    process: Grader | None
    speed: Grader | None


def main() -> None:
    """Serve until stdin ends."""
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
                _answer(answers, _load(load, graders))
            case Grade(episode=episode):
                verdict = verdict_of(graders[episode.domain], episode)
                _answer(answers, Graded(verdict=verdict))


def verdict_of(graders: Graders, episode: GradingEpisode) -> Verdict:
    """What the user's functions say; their exceptions become the verdict's error."""
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
            values[name] = convert(grader(episode))
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            return Verdict(error=f"{name} raised {type(error).__name__}: {error}")
    return Verdict(**values)


def load_function(name: str) -> Grader:
    """The function `module:function`.

    Raises:
        LoadError: there is no such module or function, or it cannot be called.
    """
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        raise LoadError(f"reward function {name}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise LoadError(f"reward function {name}: {type(function).__name__} cannot be called")
    grader: Grader = function
    return grader


def code_version(names: Sequence[str]) -> str:
    """Hash of the source files of the modules that these functions are in."""
    digest = hashlib.blake2b()
    for module_name in sorted({name.partition(":")[0] for name in names}):
        file = importlib.import_module(module_name).__file__
        digest.update(module_name.encode() + b"\0")
        digest.update(Path(file).read_bytes() if file else b"")
    return digest.hexdigest()[:_VERSION_CHARACTERS]


def _load(load: Load, graders: dict[str, Graders]) -> Loaded:
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
