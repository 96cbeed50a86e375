"""Environments of verifiers for the tests of agents."""

import time
from typing import Any

import verifiers as vf
from datasets import Dataset

ROW = {"prompt": [{"role": "user", "content": "Add 2 and 2."}], "answer": "4", "example_id": 0}


def wait(seconds: float) -> None:
    """By the machine's clock; the event loop of these tests leaps over sleeps."""
    time.sleep(seconds)


def data_set(*rows: dict[str, Any]) -> Any:
    return Dataset.from_list(list(rows or (ROW,)))


def right(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)


def length(completion) -> float:
    return float(len(completion[-1]["content"]))


def broken(completion) -> float:
    raise LookupError("no such table")


def not_finite(completion) -> float:
    return float("nan")


def together(completions, answers) -> list[float]:
    return [0.0 for _ in completions]


def single_turn(*functions, weights=None, **fields) -> Any:
    rubric = vf.Rubric(funcs=list(functions or (right,)), weights=weights)
    return vf.SingleTurnEnv(dataset=data_set(), rubric=rubric, **fields)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def tool_env(*, max_turns: int = 5, stop_errors=()) -> Any:
    return vf.ToolEnv(
        dataset=data_set(),
        tools=[add],
        max_turns=max_turns,
        rubric=vf.Rubric(funcs=[right]),
        stop_errors=list(stop_errors),
    )


class Guessing(vf.MultiTurnEnv):
    """The policy guesses until it is right; `fault` is raised after its first guess."""

    def __init__(self, *, fault: Exception | None = None, pause_s: float = 0) -> None:
        self.fault, self.pause_s = fault, pause_s
        super().__init__(max_turns=3, dataset=data_set(), rubric=vf.Rubric(funcs=[right]))

    @vf.stop
    async def is_right(self, state) -> bool:
        turns = state["trajectory"]
        return bool(turns) and turns[-1]["completion"][-1]["content"] == state["answer"]

    async def env_response(self, messages, state, **_):
        if self.fault is not None:
            raise self.fault
        wait(self.pause_s)
        return [{"role": "user", "content": "Wrong."}]
