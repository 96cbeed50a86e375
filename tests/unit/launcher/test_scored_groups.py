"""The scored groups of a run, put together from its log while little of it is held."""

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.groups import RetiredGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.topics import FINISHED_COMPLETIONS, RETIRED_GROUPS
from forgemq_launcher.records.run_topics import create_topics
from forgemq_launcher.records.scored_groups import PartitionGroups, scored_groups
from forgemq_shell.records import emit_of
from tests.unit.run_view.synthetic import GROUP_SIZE, SyntheticRun, configuration

TURNS = 2
COMPLETIONS = GROUP_SIZE * TURNS


async def log_of(run: SyntheticRun) -> MemoryLog:
    log = MemoryLog(run="r")
    await create_topics(log, configuration())
    outputs = [Output(topic=m.topic, partition=m.partition, record=m.record) for m in run.messages]
    await (await log.writer()).write_all([emit_of(output) for output in outputs])
    return log


async def test_every_scored_group_comes_once_with_its_episodes_and_completions():
    log = await log_of(SyntheticRun().play(steps=3))
    found = [records async for records in scored_groups(log, configuration())]
    assert sorted(records.scored.group_id for records in found) == [f"g-{n}" for n in range(6)]
    for records in found:
        group_id = records.scored.group_id
        assert sorted(records.episodes) == [f"{group_id}.{n}.0" for n in range(GROUP_SIZE)]
        assert len(records.completions) == COMPLETIONS
        assert {each.group_id for each in records.completions.values()} == {group_id}


async def test_what_is_held_is_of_groups_that_are_open_beside_the_one_given_out():
    run = SyntheticRun()
    for index in range(40):
        run.generate(index, version=0)
    log = await log_of(run)
    joined = PartitionGroups(log, 0)
    held = [joined.held async for _ in joined.groups()]
    assert len(held) >= 10
    assert max(held) == 0


async def test_a_group_that_expires_without_a_score_is_not_held_to_the_end():
    run = SyntheticRun()
    lost = next(f"g-{n}" for n in range(1000, 2000) if run.partition(f"g-{n}") == 0)
    run.episode(lost, 0, version=0)
    run.put(RETIRED_GROUPS, RetiredGroup(
        group_id=lost, domain="shop_desk", purpose="train", reason="expired"
    ), partition=0)  # fmt: skip
    for index in range(20):
        run.generate(index, version=0)
    joined = PartitionGroups(await log_of(run), 0)
    held = [(records.scored.group_id, joined.held) async for records in joined.groups()]
    assert lost not in {group_id for group_id, _ in held}
    assert held[-1][1] == 0


async def test_groups_that_are_cancelled_after_their_scores_are_given_out_whole():
    run = SyntheticRun()
    cancelled = [f"g-{n}" for n in range(6)]
    for index in range(6):
        run.generate(index, version=0)
    for group_id in cancelled:
        run.put(RETIRED_GROUPS, RetiredGroup(
            group_id=group_id, domain="shop_desk", purpose="train", reason="cancelled"
        ), partition=run.partition(group_id))  # fmt: skip
    found = [records async for records in scored_groups(await log_of(run), configuration())]
    assert sorted(records.scored.group_id for records in found) == cancelled
    assert {(len(r.episodes), len(r.completions)) for r in found} == {(GROUP_SIZE, COMPLETIONS)}


async def test_a_group_whose_completions_were_trimmed_comes_without_them():
    run = SyntheticRun().play(steps=1)
    kept = SyntheticRun()
    kept.messages = [m for m in run.messages if m.topic != FINISHED_COMPLETIONS.name]
    found = [r async for r in scored_groups(await log_of(kept), configuration())]
    assert [(len(r.episodes), len(r.completions)) for r in found] == [(GROUP_SIZE, 0)] * 2
