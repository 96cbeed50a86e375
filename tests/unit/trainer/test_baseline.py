"""Version 1 is published once the round of the base model is over, and not before."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from forgemq_bus.log import Emit, Place
from forgemq_contracts import topics
from forgemq_contracts.groups import AdmittedGroup, RetiredGroup
from forgemq_contracts.rounds import start_round_groups
from forgemq_contracts.run import Evaluation, RunConfiguration
from tests.unit.trainer.bench import Bench, memory_bench
from tests.unit.trainer.scene import agent_samples, merge, scheduled_step

ROUND = ("e-0", "e-1", "e-2", "e-3")
"""Two tasks, sampled and greedy."""


async def _bench(folder: Path, **evaluation: object) -> Bench:
    """A run of one step with this evaluation."""
    bench = await memory_bench(folder)
    configuration = msgspec.structs.replace(
        bench.configuration, evaluation=Evaluation(**({"tasks": 2} | evaluation))
    )
    trees = [merge(agent_samples(np.random.default_rng(n)), f"g-{n}") for n in range(2)]
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees)])
    return dataclasses.replace(bench, configuration=configuration)


async def _put(bench: Bench, records: Sequence[AdmittedGroup | RetiredGroup]) -> None:
    writer = await bench.log.writer()
    for record in records:
        topic = topics.ADMITTED_GROUPS
        if isinstance(record, RetiredGroup):
            topic = topics.RETIRED_GROUPS
        await writer.write(
            Emit(topic=topic.name, partition=0, key=b"", value=topics.encode(record))
        )


def _admitted(*names: str, round_name: str = "start-greedy") -> list[AdmittedGroup]:
    return [
        AdmittedGroup(
            group_id=name,
            domain="demo",
            purpose="eval",
            group_size=1,
            task=b"{}",
            version_at_admission=0,
            round_name=round_name,
        )
        for name in names
    ]


def _retired(*names: str) -> list[RetiredGroup]:
    return [
        RetiredGroup(group_id=name, domain="demo", purpose="eval", reason="evaluated")
        for name in names
    ]


async def _versions_when_trained(bench: Bench) -> list[int]:
    """The published versions some time after step 0 is on the log."""
    reader = await bench.log.reader({Place(topics.TRAINED_STEPS.name, 0): 0})
    assert await reader.read(timeout_s=30, records_max=1)
    await reader.close()
    await asyncio.sleep(3.0)
    return [published.version for published in await bench.published()]


async def test_step_0_trains_beside_the_round_and_version_1_waits_for_its_last_group(
    tmp_path: Path,
) -> None:
    bench = await _bench(tmp_path)
    training = RetiredGroup(group_id="g-0", domain="demo", purpose="train", reason="trained")
    await _put(bench, [*_admitted(*ROUND), *_retired(*ROUND[:3]), training])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.train(until=0))
        assert await _versions_when_trained(bench) == [0]
        await _put(bench, _retired(ROUND[3]))
    assert [published.version for published in await bench.published()] == [0, 1]


@pytest.mark.parametrize("evaluation", [{"tasks": 0}, {"sampled": False, "greedy": False}, {}])
async def test_a_round_that_nobody_has_begun_holds_nothing(
    tmp_path: Path, evaluation: dict[str, object]
) -> None:
    """Agents of the user's own may play no round, or rounds of their own."""
    bench = await _bench(tmp_path, **evaluation)
    await _put(bench, _admitted("e-7", round_name="mine"))
    await bench.train(until=0)
    assert [published.version for published in await bench.published()] == [0, 1]


def _with_deadline(bench: Bench, deadline_s: float) -> Bench:
    queue = msgspec.structs.replace(bench.configuration.queues[0], group_deadline_s=deadline_s)
    configuration = msgspec.structs.replace(bench.configuration, queues=(queue,))
    return dataclasses.replace(bench, configuration=configuration)


@pytest.mark.slow
async def test_a_round_that_does_not_move_is_given_up_after_two_deadlines(tmp_path: Path) -> None:
    bench = _with_deadline(await _bench(tmp_path), 2.5)
    await _put(bench, [*_admitted(*ROUND), *_retired(ROUND[0])])
    await bench.train(until=0)
    assert [published.version for published in await bench.published()] == [0, 1]


@pytest.mark.slow
async def test_a_group_that_is_closed_at_its_deadline_and_then_scored_is_waited_for(
    tmp_path: Path,
) -> None:
    """Version 1 is held for 3 s and more, longer than the one deadline to be played."""
    bench = _with_deadline(await _bench(tmp_path), 2.0)
    await _put(bench, [*_admitted(*ROUND), *_retired(*ROUND[:3])])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.train(until=0))
        assert await _versions_when_trained(bench) == [0]
        await _put(bench, _retired(ROUND[3]))
    assert [published.version for published in await bench.published()] == [0, 1]


async def test_held_out_groups_of_others_do_not_count_for_the_round(tmp_path: Path) -> None:
    """They come from outside, at any time."""
    bench = await _bench(tmp_path)
    others = ("x-0", "x-1", "x-2")
    await _put(bench, [*_admitted(*ROUND), *_admitted(*others, round_name="mine")])
    await _put(bench, _retired(*others, *ROUND[:3]))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.train(until=0))
        assert await _versions_when_trained(bench) == [0]
        await _put(bench, _retired(ROUND[3]))
    assert [published.version for published in await bench.published()] == [0, 1]


def test_the_round_has_each_task_once_for_each_way_to_sample() -> None:
    def groups(configuration: RunConfiguration, **evaluation: object) -> int:
        return start_round_groups(
            msgspec.structs.replace(configuration, evaluation=Evaluation(**evaluation))
        )

    configuration = msgspec.json.decode(
        b'{"run": "r", "seed": 0, "model": {"path": "m"}, "trainer": {"steps": 1}, "queues": ['
        b'{"domain": "a", "task_source": "a:b", "agent": "a:c"},'
        b'{"domain": "b", "task_source": "a:b", "agent": "a:c"},'
        b'{"domain": "c", "task_source": "", "agent": ""}]}',
        type=RunConfiguration,
    )
    assert groups(configuration, tasks=5) == 20
    assert groups(configuration, tasks=5, greedy=False) == 10
    assert groups(configuration, tasks=0) == 0
