"""The process that runs the user's functions: real processes, real hangs."""

import os
from pathlib import Path

import pytest

from forgemq_contracts.grading import GradingEpisode
from forgemq_reward.core.verdict import Verdict
from forgemq_reward.grader_messages import Load, QueueFunctions
from forgemq_reward.grader_process import (
    GraderHungError,
    GraderLostError,
    GraderProcess,
    GraderRefusedError,
)

ENVIRON = {**os.environ, "FORGEMQ_KAFKA_SASL_PASSWORD": "secret"}
CODE = """
import json, os, time

def outcome(episode):
    print("user code may print")
    match episode.task["say"]:
        case "raise":
            raise KeyError("total")
        case "quote":
            raise ValueError("no city " + json.loads(episode.result))
        case "hang":
            while True:
                pass
        case "die":
            os._exit(3)
        case "environ":
            return float(sum(name.startswith("FORGEMQ_") for name in os.environ))
        case "text":
            return "1.0"
        case "nan":
            return float("nan")
    return episode.task["say"] == episode.result

def process(episode):
    return [0.5 for _ in episode.rewards]

def speed(episode):
    return 1 - episode.tool_s / 10
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "user_rewards.py").write_text(CODE)
    return tmp_path


def process_of(code: Path, *, timeout_s: float = 20.0, **names: str) -> GraderProcess:
    functions = {"outcome": "user_rewards:outcome", "process": "", "speed": "", **names}
    queues = (QueueFunctions(domain="d", **functions),)
    return GraderProcess(
        Load(code_paths=(str(code),), queues=queues), timeout_s=timeout_s, environ=ENVIRON
    )


def episode(say: object, *, result: object = None) -> GradingEpisode:
    return GradingEpisode(
        episode_id="g-1.0.0",
        domain="d",
        task={"say": say},
        result=result,
        completions=(),
        rewards=(),
        engine_s=0.0,
        tool_s=2.0,
        virtual_s=None,
        duration_s=0.0,
    )


async def test_the_functions_that_are_named_are_called(code):
    process = process_of(code, process="user_rewards:process", speed="user_rewards:speed")
    try:
        verdict = await process.grade(episode(2**80, result=2**80))
        assert verdict == Verdict(outcome=1.0, process=(), speed=0.8)
        assert len(process.version("d")) == 16
    finally:
        await process.close()


@pytest.mark.slow
async def test_what_user_code_does_wrong_is_an_error_and_the_next_episode_is_graded(code):
    process = process_of(code, timeout_s=1.0)
    try:
        raised = await process.grade(episode("raise"))
        text = await process.grade(episode("text"))
        nan = await process.grade(episode("nan"))
        with pytest.raises(GraderLostError, match=r"^the grader process ended with status 3$"):
            await process.grade(episode("die"))
        with pytest.raises(GraderHungError, match=r"^the graders took more than 1 s$"):
            await process.grade(episode("hang"))
        after = await process.grade(episode("well", result="well"))
    finally:
        await process.close()
    assert raised.error == "outcome raised KeyError: 'total'"
    assert text.error == "outcome raised TypeError: a reward must be a number, got a str"
    assert nan.outcome is not None
    assert nan.outcome != nan.outcome
    assert after == Verdict(outcome=1.0)


async def test_an_error_that_quotes_half_of_a_surrogate_pair_ends_no_process(code):
    process = process_of(code)
    try:
        quoted = await process.grade(episode("quote", result='"\\ud800"'))
    finally:
        await process.close()
    assert quoted.error == "outcome raised ValueError: no city ?"


async def test_user_code_sees_none_of_our_own_variables(code):
    process = process_of(code)
    try:
        verdict = await process.grade(episode("environ"))
    finally:
        await process.close()
    assert verdict == Verdict(outcome=0.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:outcome", "no_such_module:outcome: ModuleNotFoundError"),
        ("user_rewards:missing", "user_rewards:missing: AttributeError"),
        ("user_rewards:CODE", "user_rewards:CODE: str cannot be called"),
    ],
)
async def test_a_function_that_is_not_there_is_refused_by_name(code, name, message):
    (code / "user_rewards.py").write_text(CODE + '\nCODE = "text"\n')
    process = process_of(code, outcome=name)
    with pytest.raises(GraderRefusedError, match=message):
        await process.start()


async def test_the_version_changes_with_the_code(code):
    versions = set()
    for extra in ("", "# another comment\n"):
        (code / "user_rewards.py").write_text(CODE + extra)
        process = process_of(code)
        await process.start()
        versions.add(process.version("d"))
        await process.close()
    assert len(versions) == 2
