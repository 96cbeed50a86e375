"""The four domains in token space: what is drawn, who succeeds, what is rewarded and taught."""

import json
import random
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from four_domains import bookings, demonstrator, programs, rewards
from four_domains.agents import ask, book
from four_domains.demonstrator import FLAWLESS, Habits
from four_domains.documents import NAMES
from four_domains.tasks import DRAWS, HELD_OUT, fold_of, task
from four_domains.warm_start import EPISODES_PER_STEP, episode_example
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forgemq_contracts.domains import context_tokens_max_of, sampling_of
from forgemq_contracts.grading import GradingEpisode
from forgemq_contracts.mixture import mixture_of, staleness_bounds
from forgemq_contracts.run import RunConfiguration
from forgemq_graders.mathematics import Mathematics, math_outcome
from forgemq_launcher.core.configuration import configuration, document
from forgemq_rendering import Rendering
from tests.unit.demo.conftest import TokenPolicy
from tests.unit.demo.grading import graded_as

ROOT = Path(__file__).parents[3]
RUN_FILE = ROOT / "deploy/four_domains/run.toml"
DOMAINS = tuple(DRAWS)
TASKS = 8

Make = Callable[..., TokenPolicy]
Earn = Callable[..., Awaitable[float]]


class Player(TokenPolicy):
    """A policy that an agent plays an episode with, as it does with the run's."""

    task: dict[str, Any]
    result: object = None


def run_of(*overrides: str) -> RunConfiguration:
    values = document(RUN_FILE.read_text(), overrides=overrides)
    return configuration(values, run="test", folder=ROOT)


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering.load(run_of().model.path)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(run_of().model.path)


@pytest.fixture
def scripted(rendering, tokenizer) -> Make:
    """A policy that writes these texts, one a turn, about this task."""

    def make(drawn: dict[str, Any], *texts: str) -> TokenPolicy:
        left = iter(texts)

        async def sample(context: list[int], room: int) -> list[int]:
            return [*tokenizer.encode(next(left)), rendering.stop_token_ids[0]][:room]

        policy = Player(rendering, sample)
        policy.context_tokens_max = run_of().model.context_tokens_max
        policy.task = drawn
        return policy

    return make


async def played(scripted: Make, domain: str, drawn: dict[str, Any], *texts: str) -> TokenPolicy:
    policy = scripted(drawn, *texts)
    await (book if domain == "bookings" else ask)(policy)
    return policy


def graded(policy: TokenPolicy, domain: str, **changes: object) -> GradingEpisode:
    fields = {"domain": domain, "task": policy.task, "result": policy.result, **changes}
    return graded_as(policy, **fields)


@pytest.fixture
async def earned(scripted) -> AsyncIterator[Earn]:
    """What the outcome of the run file gives to an episode with these turns."""
    mathematics = Mathematics()
    outcomes = {
        "reasoning": math_outcome(mathematics=mathematics),
        "documents": rewards.listed,
        "programs": rewards.program,
        "bookings": rewards.booked,
    }

    async def earn(domain: str, drawn: dict[str, Any], *texts: str) -> float:
        found = outcomes[domain](graded(await played(scripted, domain, drawn, *texts), domain))
        return found if isinstance(found, float) else await found

    yield earn
    await mathematics.close()


def texts_of(domain: str, drawn: dict[str, Any], *, habits: Habits = FLAWLESS) -> list[str]:
    turns = demonstrator.turns(domain, drawn, random.Random(0), habits)
    return [text for text, _ in turns]


@pytest.mark.parametrize("domain", DOMAINS)
def test_tasks_are_pure_and_survive_json(domain):
    for k in (0, 1, 77, HELD_OUT, HELD_OUT + 47):
        one = task(5, domain, k)
        assert task(5, domain, k) == one
        assert json.loads(json.dumps(one)) == one
        assert (fold_of(one) == 0) == (k >= HELD_OUT)


@pytest.mark.parametrize("domain", DOMAINS)
def test_training_tasks_differ_by_seed_and_held_out_tasks_are_apart_from_them(domain):
    training = {seed: [json.dumps(task(seed, domain, k)) for k in range(200)] for seed in (0, 1)}
    held_out = [
        [json.dumps(task(seed, domain, HELD_OUT + k)) for k in range(48)] for seed in (0, 1)
    ]
    assert training[0] != training[1]
    assert held_out[0] == held_out[1]
    assert len(set(held_out[0])) > 30
    assert not set(held_out[0]) & {*training[0], *training[1]}


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
async def test_a_flawless_episode_earns_one(earned, domain):
    for k in range(TASKS):
        drawn = task(0, domain, HELD_OUT + k)
        assert await earned(domain, drawn, *texts_of(domain, drawn)) == 1.0


@pytest.mark.parametrize("domain", DOMAINS)
async def test_the_answer_to_another_task_earns_less_than_a_success(earned, domain):
    drawn, other = task(0, domain, 1), task(0, domain, 4)
    assert await earned(domain, drawn, *texts_of(domain, other)) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("domain", "text"),
    [
        ("reasoning", "3+5=8, 8+8=16. The total is 17."),
        ("reasoning", "The total is"),
        ("documents", "lamp 7, rope 8, soap 10"),
        ("documents", "lamp 7, rope 8"),
        ("documents", "lamp 7, rope 8, soap 9, drum 1"),
        ("documents", "lamp 7, rope 8, soap 9, soap 9"),
        ("programs", "def f(a): return sum(a)+15"),
        ("programs", "def f(a): return sum(a+14"),
        ("programs", "def g(a): return sum(a)+14"),
        ("programs", "sum add 14"),
    ],
)
async def test_a_wrong_answer_is_no_success(earned, domain, text):
    drawn = {
        "question": "Please add 3, 5, 8.",
        "answer": "16",
        "wanted": {"lamp": 7, "rope": 8, "soap": 9},
        "tests": [
            {
                "function": "table",
                "arguments": [[[1, 2], [5]]],
                "returns": [17, 19],
            }
        ],
    }
    assert await earned(domain, drawn, text) < 0.5


@pytest.mark.slow
async def test_an_empty_answer_is_no_success_and_no_failure_of_the_grader(earned):
    for domain in ("reasoning", "documents", "programs"):
        assert await earned(domain, task(0, domain, 0), "") == 0.0


def test_hidden_examples_tell_all_descriptions_apart():
    tables = [
        [change(reading(one), 14) for one in programs.EXAMPLES]
        for _, reading in programs.READINGS.values()
        for _, change in programs.CHANGES.values()
    ]
    assert all(one != other for one, other in combinations(tables, 2))


BOOKING = {"question": "Please book lamp, rope.", "codes": {"lamp": "31", "rope": "77"},
           "pages_seed": 5}  # fmt: skip


def calls(*pairs: tuple[str, str]) -> list[str]:
    return [bookings.call_text(name, argument) for name, argument in pairs]


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([*calls(("book", "31"), ("book", "77")), "all"], 1.0),
        ([*calls(("book", "77"), ("page", "rope"), ("book", "31")), "all"], 1.0),
        ([*calls(("book", "31")), "all"], 0.2),
        ([*calls(("book", "31"), ("book", "31")), "all"], 0.2),
        ([*calls(("book", "31"), ("book", "78")), "all"], 0.2),
        ([*calls(("book", "31"), ("book", "77"), ("book", "10")), "all"], 0.8 / 3),
        (["all"], 0.0),
        (["all 31, 77"], 0.0),
        (calls(*[("page", "lamp")] * 5, ("book", "31"), ("book", "77")), 0.4),
    ],
)
async def test_a_booking_is_judged_by_the_calls(earned, turns, reward):
    assert await earned("bookings", BOOKING, *turns) == pytest.approx(reward)


async def test_the_page_of_an_item_has_its_code_and_the_reply_reaches_the_policy(
    scripted, rendering
):
    turns = [*calls(("page", "lamp"), ("book", "31")), "all"]
    policy = await played(scripted, "bookings", BOOKING, *turns)
    assert "code 31" in rendering.decode(policy.contexts[1])
    assert policy.result == {"end": bookings.ANSWERED, "booked": ["31"]}


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (bookings.call_text("page", "lamp").replace("arguments", "args"), bookings.BAD_CALL),
        (bookings.call_text("page", "lamp").replace("item", "code"), bookings.BAD_CALL),
        (bookings.call_text("page", "cheese"), bookings.NO_ITEM),
    ],
)
async def test_a_call_that_cannot_be_answered_gets_an_error(scripted, rendering, text, reply):
    policy = await played(scripted, "bookings", BOOKING, text, "all")
    added = rendering.decode(policy.contexts[1][len(policy.contexts[0]) :])
    assert f"<tool_response>\n{reply}\n</tool_response>" in added


async def test_habits_of_the_desk_cost_and_fewer_turns_pay(scripted):
    quick = [*calls(("book", "31"), ("book", "77")), "all"]
    spoiled = [quick[0].replace("arguments", "args"), *quick]
    slow = graded(await played(scripted, "bookings", BOOKING, *spoiled), "bookings")
    fast = graded(await played(scripted, "bookings", BOOKING, *quick), "bookings")
    wrong = graded(await played(scripted, "bookings", BOOKING, "all"), "bookings")
    assert rewards.bad_calls(slow) == [-1.0, 0.0, 0.0, 0.0]
    assert rewards.bad_calls(fast) == [0.0, 0.0, 0.0]
    assert 1.0 > rewards.haste(fast) > rewards.haste(slow) > 0.0
    assert rewards.haste(wrong) == 0.0


async def test_what_the_agent_reports_counts_for_nothing(scripted):
    policy = await played(scripted, "bookings", BOOKING, "all")
    assert rewards.booked(graded(policy, "bookings", result={"booked": ["31", "77"]})) == 0.0
    assert rewards.booked(graded(policy, "bookings", completions=())) == 0.0


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("seed", range(4))
async def test_played_episodes_have_the_tokens_of_the_warm_start(scripted, tokenizer, domain, seed):
    """The gateway's rendering and the warm start's examples agree token for token."""
    drawn = task(seed, domain, seed)
    example = episode_example(tokenizer, domain, drawn, random.Random(seed), FLAWLESS)
    policy = await played(scripted, domain, drawn, *texts_of(domain, drawn))
    assert policy.contexts[-1] + policy.outputs[-1] == example.ids


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
async def test_the_demonstrator_fails_often_enough_to_leave_something_to_learn(earned, domain):
    choose, found = random.Random(1), []
    for k in range(40):
        drawn = task(0, domain, k)
        turns = demonstrator.turns(domain, drawn, choose, Habits())[: bookings.TURNS_MAX]
        found.append(await earned(domain, drawn, *(text for text, _ in turns)) >= 0.5)
    assert 0.3 < statistics.mean(found) < 0.75


def test_the_run_mixes_two_groups_of_each_domain_in_every_step():
    run = run_of()
    assert [queue.domain for queue in run.queues] == list(DOMAINS)
    assert mixture_of(run).groups(0) == (2, 2, 2, 2)
    assert staleness_bounds(run) == dict.fromkeys(DOMAINS, 2)
    named = {queue.domain: queue.outcome.partition(":")[2] for queue in run.queues}
    assert named == {"reasoning": "math_answer", "documents": "listed", "programs": "program",
                     "bookings": "booked"}  # fmt: skip


@pytest.mark.parametrize("domain", DOMAINS)
def test_flawless_episodes_fit_the_limits_of_the_run(tokenizer, domain):
    run = run_of()
    limit = context_tokens_max_of(run, domain=domain, stage=None)
    tokens = sampling_of(run, domain=domain, stage=None).max_tokens
    choose = random.Random(0)
    for k in range(60):
        drawn = task(0, domain, k)
        assert len(episode_example(tokenizer, domain, drawn, choose, FLAWLESS).ids) < limit
        longest = max(texts_of(domain, drawn), key=len)
        assert len(tokenizer.encode(longest)) < tokens


def test_every_domain_is_taught_and_every_name_is_one_token(tokenizer):
    assert tuple(EPISODES_PER_STEP) == DOMAINS
    assert {len(tokenizer.encode(name)) for name in NAMES} == {1}
