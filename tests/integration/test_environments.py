"""Environments of verifiers through the real gateway: one with tools, and two published ones.

The log is in memory, and the test is scheduler and lane, as for the other agents that nobody wrote
for ForgeMQ. No environment needs a network: the demo's shop as a `StatefulToolEnv`;
`ReasoningGymEnv`, which is part of verifiers, over two tasks of the package reasoning-gym; and
sophistry-bench-sprint from the package index, which brings passages to argue about.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
from shop_desk.calls import TOOLS
from shop_desk.demonstrator import call_text
from shop_desk.shop import order_of

from forgemq_agents.environment_agent import EnvironmentAgent
from forgemq_agents.task_file import TaskFile
from forgemq_agents.user_code import load_domains
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.run import Evaluation, Model, Queue, RunConfiguration, Trainer
from tests.integration.test_black_box_agent import played, running, skilled

ENVIRONMENTS = Path(__file__).parents[2] / "deploy" / "environments"

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _imports() -> Iterator[None]:
    path = list(sys.path)
    yield
    sys.path[:] = path


def loaded(name: str, *, held_out: int = 64) -> tuple[EnvironmentAgent, TaskFile]:
    """The agent and the tasks of `verifiers:NAME`, as a queue has them."""
    run = RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m"),
        queues=(Queue(domain="shop_desk", task_source="", agent=f"verifiers:{name}"),),
        trainer=Trainer(steps=1),
        evaluation=Evaluation(tasks=held_out),
        code_paths=(str(ENVIRONMENTS),),
    )
    domain = load_domains(run)["shop_desk"]
    assert isinstance(domain.play, EnvironmentAgent)
    assert isinstance(domain.task_source, TaskFile)
    return domain.play, domain.task_source


def outcome(episode: FinishedEpisode) -> list[float]:
    return [reward.value for reward in episode.rewards if reward.name == "outcome"]


def adds(context: str) -> str:
    """A policy that reads the sum and answers in the form that is asked for."""
    terms = re.findall(r"([-+]?) ?(\d+)", context.rpartition("problem: ")[2].partition("=")[0])
    return f"<answer>{sum(int(sign + number) for sign, number in terms)}</answer>"


def divides(context: str) -> str:
    """A policy that reads the numbers and answers with their greatest common divisor."""
    numbers = re.findall(r"\d+", context.rpartition("numbers: ")[2].partition(".")[0])
    return f"<answer>{math.gcd(*map(int, numbers))}</answer>"


def quotes(context: str) -> str:
    """A policy that makes as many claims as the rubric likes, each with words of the passage."""
    passage = context.rpartition("PASSAGE:\n")[2].partition("\n\nQUESTION: ")[0]
    lines = [line.strip() for line in passage.splitlines() if len(line.strip()) > 20]
    return "\n".join(f"<claim>{n}.</claim>\n<cite>{lines[n]}</cite>" for n in range(8))


def claims(context: str) -> str:
    return "<claim>It is so.</claim>"


def gives_up(context: str) -> str:
    return "<answer>no idea</answer>"


async def test_an_environment_with_tools_serves_a_customer_unmodified():
    agent, tasks = loaded("shop_tools")
    row = next(
        row for n in count() if "Order: " in (row := tasks(0, "d", n))["prompt"][0]["content"]
    )
    async with running(skilled) as (url, world):
        episode = await played(agent, url, world, task=row)
    assert (episode.status, episode.detail, outcome(episode)) == ("completed", "", [1.0])
    lines = len(order_of(json.loads(row["info"])["order"]).lines)
    assert json.loads(episode.result) == {
        "reward": 1.0,
        "metrics": {
            "right_total": 1.0,
            "num_turns": 3.0,
            "total_tool_calls": lines + 1.0,
            "price_calls": float(lines),
            "total_calls": 1.0,
        },
        "stop_condition": "no_tools_called",
    }
    assert [entry.sequence for entry in episode.manifest] == [0, 1, 2]
    assert episode.forks == 0
    for (context, output), (following, _) in zip(world.served, world.served[1:], strict=False):
        assert following[: len(context + output)] == context + output
    first = world.rendering.decode(world.served[0][0])
    assert [tool["function"]["name"] in first for tool in TOOLS] == [True, True, False]


async def test_a_call_of_a_tool_that_is_not_there_is_answered_and_no_total_earns_nothing():
    def confused(context: str) -> str:
        return "No." if "bad call" in context else call_text("note", "lamp 4")

    agent, tasks = loaded("shop_tools")
    async with running(confused) as (url, world):
        episode = await played(agent, url, world, task=tasks(0, "d", 1_000_000))
    assert (episode.status, outcome(episode)) == ("completed", [0.0])
    assert len(episode.manifest) == 2


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # Of what reasoning-gym imports.
@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym")
@pytest.mark.parametrize(("name", "right"), [("chain_sums", adds), ("common_divisors", divides)])
@pytest.mark.parametrize("reward", [1.0, 0.0])
async def test_an_environment_of_reasoning_gym_scores_right_and_wrong_answers(name, right, reward):
    policy = right if reward else gives_up
    agent, tasks = loaded(name)
    async with running(policy) as (url, world):
        episode = await played(agent, url, world, task=tasks(0, "d", 1_000_000))
    assert (episode.status, outcome(episode)) == ("completed", [reward])
    assert json.loads(episode.result)["metrics"] == {
        "check_answer_reward_func": reward,
        "format_reward_func": 1.0,
    }


@pytest.mark.parametrize(
    ("policy", "reward", "counted"),
    [
        # Eight claims are the most that the rubric rewards; every quotation is in the passage.
        (quotes, 1.0, {"n_claims_metric": 8.0, "n_citations_metric": 8.0}),
        # One claim of eight earns 0.5625, none of it quoted 0; the reward is the mean.
        (claims, 0.28125, {"n_claims_metric": 1.0, "n_citations_metric": 0.0}),
    ],
)
async def test_a_published_environment_over_passages_scores_as_its_own_rubric_says(
    policy, reward, counted
):
    agent, tasks = loaded("sophistry_bench_sprint", held_out=0)
    async with running(policy, context_tokens_max=16_384) as (url, world):
        episode = await played(agent, url, world, task=tasks(0, "d", 0))
    assert (episode.status, episode.detail, outcome(episode)) == ("completed", "", [reward])
    metrics = json.loads(episode.result)["metrics"]
    assert {name: metrics[name] for name in counted} == counted
    assert metrics["aggregate_reward"] == reward
    assert metrics["starts_with_canary_reward"] == 1.0
