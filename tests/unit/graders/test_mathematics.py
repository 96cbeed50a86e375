"""Answers of mathematics: what is equal, and what hostile ones cost."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from forgemq_graders.mathematics import GoldAnswerError, Mathematics, math_outcome
from tests.unit.graders.episodes import answered


@pytest.fixture
async def mathematics() -> AsyncIterator[Mathematics]:
    mathematics = Mathematics(timeout_s=3.0)
    yield mathematics
    await mathematics.close()


CASES = [
    ("so it is $\\frac{1}{2}$", "0.5", True),
    ("first $3$, but then \\boxed{4}", "4", True),
    ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", True),
    ("the answer is 42.", "$42$", True),
    ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}", True),
    ("\\boxed{5}", "4", False),
    ("I do not know", "4", False),
    ("", "4", False),
]


@pytest.mark.slow
async def test_answers_are_compared_by_what_they_mean_without_a_word_in_the_log(mathematics, capfd):
    found = [await mathematics.is_equal(answer, gold) for answer, gold, _ in CASES]
    assert found == [is_equal for *_, is_equal in CASES]
    # The service's log has a JSON object in each line, and nothing else.
    assert capfd.readouterr().err == ""


ORDER = [
    ("The final answer is 5. \\boxed{4}", "4"),
    ("\\boxed{4}. The final answer is 5", "5"),
    ("\\boxed{4}. The answer is 5, so $6$", "4"),
    ("$3$. The answer is 4. No, 5", "4"),
    ("$3$, 4, $5$, then 6", "6"),
    ("\\boxed{4}, or \\boxed{5}", "\\{4, 5\\}"),
    ("\\boxed{5\\text{ m}}", "5\\text{ cm}"),
    ("\\boxed{50\\%}", "50"),
    ("\\boxed{50\\%}", "0.5"),
]
"""Answers with several expressions, and what they say in the end."""


@pytest.mark.slow
async def test_of_several_expressions_the_readme_says_which_counts(mathematics):
    assert [await mathematics.is_equal(answer, gold) for answer, gold in ORDER] == [True] * len(
        ORDER
    )


@pytest.mark.slow
async def test_a_right_answer_that_cannot_be_read_is_an_error_and_not_a_wrong_answer(mathematics):
    with pytest.raises(GoldAnswerError, match="the right answer ''"):
        await mathematics.is_equal("\\boxed{4}", "")


HOSTILE = {
    "tower of powers": "\\boxed{9^{9^{9^{9^{9}}}}}",
    "large factorial": "\\boxed{(10^{9})!}",
    "deep nesting": "\\boxed{" + "(" * 1500 + "1" + ")" * 1500 + "}",
    "deep fractions": "$" + "\\frac{1}{" * 300 + "x" + "}" * 300 + "$",
    "long sum": "$" + "+".join(f"x_{{{i}}}" for i in range(600)) + "$",
    "large expansion": "$(a+b+c+d+e+f)^{3000}$",
    "long integral": "$\\int_0^1 \\sin(x^{x^{x^{x}}}) \\exp(\\cos(x^{x})) dx$",
    "many boxes": "\\boxed{1}" * 100_000,
    "python": "$\\text{__import__('os').system('touch /tmp/owned')}$",
    "nothing that is text": "\x00\ud800$\\boxed{",
}


@pytest.mark.slow
async def test_hostile_answers_are_wrong_within_the_time_limit_and_the_next_is_compared(
    mathematics,
):
    assert await mathematics.is_equal("\\boxed{4}", "4")
    for name, answer in HOSTILE.items():
        began_s = time.monotonic()
        assert not await mathematics.is_equal(answer, "4"), name
        assert time.monotonic() - began_s < 30, name
        assert await mathematics.is_equal("\\boxed{4}", "4"), name


@pytest.mark.slow
async def test_a_comparison_that_is_cancelled_leaves_its_answer_to_no_other():
    """At each of its first steps, of which the first ones begin the process that compares."""
    for steps in range(0, 12, 3):
        mathematics = Mathematics()
        cancelled = asyncio.create_task(mathematics.is_equal("\\boxed{1}", "1"))
        for _ in range(steps):
            await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        found = [await mathematics.is_equal("\\boxed{2}", gold) for gold in ("3", "2")]
        await mathematics.close()
        assert found == [False, True], steps


@pytest.mark.slow
async def test_an_outcome_is_of_the_last_completion_and_the_tasks_answer(mathematics):
    outcome = math_outcome(answer="gold", mathematics=mathematics)
    task = {"gold": "1/2"}
    assert await outcome(answered("$0.5$", task=task)) == 1.0
    assert await outcome(answered("$0.5$", "$0.6$", task=task)) == 0.0
    assert await outcome(answered(task=task)) == 0.0
    with pytest.raises(KeyError, match="gold"):
        await outcome(answered("$0.5$", task={}))
