"""Ready reward functions: outcomes, and functions for the `process` of a queue."""

from forgemq_graders.answers import AsyncOutcome, answer_code, answer_text
from forgemq_graders.code import code_tests
from forgemq_graders.judge import Judge, JudgeError, judged, judged_turns
from forgemq_graders.languages import language_mixing
from forgemq_graders.mathematics import GoldAnswerError, math_outcome
from forgemq_graders.process import (
    AsyncProcessReward,
    ProcessReward,
    malformed_calls,
    overlong,
    repetition,
    weighted,
    weighted_async,
)
from forgemq_graders.sandbox import Execution, IsolationRefusedError, Sandbox, SandboxLimits
from forgemq_graders.shell import Shell

math_answer = math_outcome()
"""`task["answer"]` is the right answer."""

code_passes = code_tests()
"""`task["tests"]` are the tests."""

__all__ = [
    "AsyncOutcome",
    "AsyncProcessReward",
    "Execution",
    "GoldAnswerError",
    "IsolationRefusedError",
    "Judge",
    "JudgeError",
    "ProcessReward",
    "Sandbox",
    "SandboxLimits",
    "Shell",
    "answer_code",
    "answer_text",
    "code_passes",
    "code_tests",
    "judged",
    "judged_turns",
    "language_mixing",
    "malformed_calls",
    "math_answer",
    "math_outcome",
    "overlong",
    "repetition",
    "weighted",
    "weighted_async",
]
