"""The committed base model plays the demo's agent as well as was measured."""

import pytest
from shop_desk import rewards
from shop_desk.environment import TURNS_MAX, ShopDesk
from shop_desk.shop import order_of
from shop_desk.tasks import HELD_OUT, task

from forgemq_agents.tool_loop import run_tool_loop
from forgemq_contracts.grading import GradingEpisode
from tests.unit.demo.grading import graded

torch = pytest.importorskip("torch")

TASKS = 128


@pytest.fixture
def greedy(rendering, token_policy, base_model):
    stop = rendering.stop_token_ids[0]

    @torch.no_grad()
    async def sample(context: list[int], room: int) -> list[int]:
        output: list[int] = []
        ids, cache = torch.tensor([context]), None
        while len(output) < room and (not output or output[-1] != stop):
            step = base_model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            output.append(int(step.logits[0, -1].argmax()))
            ids = torch.tensor([[output[-1]]])
        return output

    return lambda: token_policy(rendering, sample)


async def episode_of(policy, k: int) -> GradingEpisode:
    order = order_of(task(0, "shop_desk", HELD_OUT + k))
    desk = ShopDesk(order)
    await run_tool_loop(policy, desk, turns_max=TURNS_MAX)
    return graded(policy, desk, order)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_base_model_solves_about_two_thirds_of_the_held_out_tasks_greedily(greedy):
    """docs/learning.md: greedy success before training is 0.69."""
    episodes = [await episode_of(greedy(), k) for k in range(TASKS)]
    success = sum(rewards.outcome(episode) for episode in episodes) / TASKS
    assert success == pytest.approx(0.69, abs=0.04)
