"""An outcome grader that runs the policy's program against the task's tests, in a sandbox.

Expected values never enter the sandbox, and what a program says of itself counts for nothing: each
test compares, outside, what the program wrote. A program that ends early, or prints "passed", wins
nothing by it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from forgemq_contracts.grading import GradingEpisode
from forgemq_graders.answers import AsyncOutcome, answer_code, text_of
from forgemq_graders.sandbox import Execution, Sandbox, SandboxLimits

TESTS_MAX = 256
"""Of one task: each is one program, of about 0.2 s on a busy core."""

_TOLERANCE = 1e-9
"""Relative, and absolute around 0, between a float that is expected and one that is returned."""

_CALL = """
import json as _json, sys as _sys
_call = _json.load(_sys.stdin)
_result = globals()[_call["function"]](*_call["arguments"])
_sys.stdout.write({mark!r} + _json.dumps(_result))
"""


class InputTest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The program reads `stdin` and must write `stdout`; blanks at line ends do not count."""

    stdin: str
    stdout: str


class CallTest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of a function that the program defines must return this value, as JSON has it."""

    function: str
    arguments: list[Any]
    returns: Any


def code_tests(
    *,
    limits: SandboxLimits | None = None,
    folders: Sequence[str] = (),
    at_once: int = 2,
    is_share: bool = False,
    program: Callable[[GradingEpisode], str] = answer_code,
) -> AsyncOutcome:
    """An outcome: 1 if the policy's program passes all of `task["tests"]`, else 0.

    A test has the fields `stdin` and `stdout`, or `function`, `arguments` and `returns`. Answers
    without code, with errors, or beyond the limits fail. The function raises, so that the episode
    is masked, if the task's tests are not of that form or this machine cannot isolate programs.

    Args:
        limits: Of each test's program.
        folders: That programs may read: libraries, named in `sys.path` by the program itself.
        at_once: Programs at the same time, in each grader process.
        is_share: Whether the outcome is the share of the tests that pass.
        program: The program of an episode, "" if it has none; by default the last code block of the
            answer.
    """
    sandbox = Sandbox(limits, folders=folders, at_once=at_once)

    async def outcome(episode: GradingEpisode) -> float:
        tests = _tests(episode)
        code = text_of(program(episode))
        if not code.strip():
            return 0.0
        passed = 0
        for test in tests:
            is_passed = await _passes(sandbox, code, test, mark=_mark(episode))
            if not (is_passed or is_share):
                return 0.0
            passed += is_passed
        return passed / len(tests)

    return outcome


def _tests(episode: GradingEpisode) -> list[InputTest | CallTest]:
    tests = episode.task["tests"]
    if not 1 <= len(tests) <= TESTS_MAX:
        raise ValueError(f"tests of a task must be 1 to {TESTS_MAX}, got {len(tests)}")
    return [
        msgspec.convert(one, CallTest) if "function" in one else msgspec.convert(one, InputTest)
        for one in tests
    ]


def _mark(episode: GradingEpisode) -> str:
    """Stands before a returned value, so that what the code prints is no part of it."""
    return f"\n-- returned to {episode.episode_id} --\n"


async def _passes(sandbox: Sandbox, code: str, test: InputTest | CallTest, *, mark: str) -> bool:
    if isinstance(test, InputTest):
        execution = await sandbox.run_python(code, stdin=test.stdin.encode())
        written = execution.stdout.decode(errors="replace")
        return _is_done(execution) and _lines(written) == _lines(test.stdout)
    call = msgspec.json.encode({"function": test.function, "arguments": test.arguments})
    program = code + "\n" + _CALL.format(mark=mark)
    execution = await sandbox.run_python(program, stdin=call)
    returned = execution.stdout.decode(errors="replace").rpartition(mark)[2]
    try:
        return _is_done(execution) and _equal(msgspec.json.decode(returned), test.returns)
    except (msgspec.DecodeError, RecursionError):
        return False


def _is_done(execution: Execution) -> bool:
    return execution.ended == "exit" and execution.status == 0


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _equal(left: Any, right: Any) -> bool:  # noqa: ANN401 - any JSON value
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, float) or isinstance(right, float):
        return _is_number(left, right) and _is_close(left, right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return bool(left == right)


def _is_close(left: float, right: float) -> bool:
    try:
        return math.isclose(left, right, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:  # An integer beyond all floats.
        return False


def _is_number(*values: object) -> bool:
    return all(isinstance(value, int | float) for value in values)
