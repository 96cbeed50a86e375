"""Groups of each domain are scored with that domain's settings."""

import msgspec

from forgemq_contracts import topics
from forgemq_contracts.domain_settings import DomainRewards
from forgemq_contracts.run import Queue, Rewards
from forgemq_reward.app import transform_of
from tests.unit.reward.records import finished_episode, graded_episode
from tests.unit.reward.scoring import advantages, feed
from tests.unit.reward.test_service import Desk, configuration_of


def test_each_domains_groups_have_its_own_weights(tmp_path):
    """Outcome 1 and speed 1 against nothing: 1 + beta; half of it on each side."""
    run = configuration_of(tmp_path)
    own = Queue(domain="own", task_source="", agent="", rewards=DomainRewards(beta=3.0))
    run = msgspec.structs.replace(run, queues=(*run.queues, own), rewards=Rewards(beta=1.0))
    core = transform_of(run, {}).make_core(3)
    scored = {}
    for domain in ("d", "own", "unknown"):
        group = f"g-{domain}"
        episodes = [finished_episode(i, group=group, domain=domain) for i in (0, 1)]
        grades = [
            graded_episode(0, group=group, outcome=1.0, speed=1.0),
            graded_episode(1, group=group),
        ]
        (scored[domain],) = feed(core, [*episodes, *grades])
    assert advantages(scored["d"]) == [(0, 0, 1.0), (1, 0, -1.0)]
    assert advantages(scored["own"]) == [(0, 0, 2.0), (1, 0, -2.0)]
    assert advantages(scored["unknown"]) == [(0, 0, 1.0), (1, 0, -1.0)]
    assert [episode.total for episode in scored["own"].episodes] == [4.0, 0.0]


async def test_a_domain_that_masks_truncated_episodes_asks_graders_about_evaluated_ones_alone(
    tmp_path,
):
    run = configuration_of(tmp_path, outcome="user_rewards:meant_to_raise")
    (queue,) = run.queues
    own = msgspec.structs.replace(queue, rewards=DomainRewards(truncated="mask"))
    desk = Desk(msgspec.structs.replace(run, queues=(own,)), tmp_path)
    await desk.open()
    code = tmp_path / "user_rewards.py"
    code.write_text("def meant_to_raise(episode):\n    raise AssertionError('asked')\n")
    async with desk.service():
        await desk.play(0, [[5]], truncated_by="context_full")
        await desk.play(0, [[5]], truncated_by="context_full", group="g-2", purpose="eval")
        trained, evaluated = await desk.records(topics.GRADED_EPISODES, count=2)
    await desk.log.close()
    assert (trained.group_id, trained.is_masked, trained.detail) == ("g-1", False, "")
    assert evaluated.is_masked
    assert "AssertionError: asked" in evaluated.detail
