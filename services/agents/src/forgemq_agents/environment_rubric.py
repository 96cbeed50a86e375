"""Scores a rollout with an environment's own rubric, and notices what the rubric would hide.

A rubric of `verifiers` counts a reward function that raises as 0 and logs it. Here a failure of the
machinery is never a reward of zero, so the functions that weigh are wrapped, and what they raised
is returned. A function with weight 0 is a metric: it moves no reward, and may fail. No function may
return NaN or an infinity: even with weight 0 it would be the sum.
"""

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

_failures: ContextVar[list[str] | None] = ContextVar("failures", default=None)
"""What reward functions raised in the scoring of this context; None outside of one."""


async def score(rubric: Any, state: Any) -> list[str]:  # noqa: ANN401 - verifiers has no types here
    """Let the rubric score a rollout; afterwards `state` has `reward` and `metrics`.

    Returns:
        What the functions that weigh have raised; each of these counts as 0 in the reward.
    """
    failures: list[str] = []
    token = _failures.set(failures)
    try:
        await rubric.score_rollout(state)
    finally:
        _failures.reset(token)
    return failures


def note_failures(rubric: Any) -> None:  # noqa: ANN401 - as above
    """Wrap the functions of a rubric, so that `score` returns what those that weigh raise."""
    for each in rubrics_in(rubric):
        each.funcs = [
            _noted(function, weighs=bool(weight))
            for function, weight in zip(each.funcs, each.weights, strict=True)
        ]


def unscorable(rubric: Any) -> str:  # noqa: ANN401 - as above
    """Why the rubric cannot score one rollout alone; "" if it can."""
    from verifiers import Rubric

    for each in rubrics_in(rubric):
        if type(each).score_rollout is not Rubric.score_rollout:
            continue
        if not each.funcs:
            return f"its {type(each).__name__} has no reward function"
        for function in each.funcs:
            if each._is_group_func(function):
                return (
                    f"its reward function {_name(function)} scores a group of rollouts together, "
                    "and episodes are scored one by one"
                )
    return ""


def rubrics_in(rubric: Any) -> Iterator[Any]:  # noqa: ANN401 - as above
    """The rubrics that have functions: a group's own, or those of grouped environments."""
    from verifiers import RubricGroup
    from verifiers.envs.env_group import EnvGroupRubric

    inner: list[Any] = []
    if isinstance(rubric, RubricGroup):
        inner = rubric.rubrics
    elif isinstance(rubric, EnvGroupRubric):
        inner = [environment.rubric for environment in rubric.env_map.values()]
    else:
        yield rubric
    for each in inner:
        yield from rubrics_in(each)


def _noted(function: Callable[..., Any], *, weighs: bool) -> Callable[..., Awaitable[float]]:
    # `wraps` keeps name and signature: a rubric calls a function with what its parameters name.
    @functools.wraps(function)
    async def noted(*arguments: object, **named: object) -> float:
        try:
            value = function(*arguments, **named)
            return _finite(float(await value if inspect.isawaitable(value) else value))
        except Exception as error:  # A user's function may raise anything; the rubric catches it.
            failures = _failures.get()
            if weighs and failures is not None:
                failures.append(f"{_name(function)} raised {type(error).__name__}: {error}")
            raise

    return noted


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"must return a finite number, got {number}")
    return number


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
