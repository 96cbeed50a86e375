"""A life of the trainer after previous lives, and beside another one."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import FencedError
from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.optimizer import learning_rate
from forgemq_trainer.loop import LostTreeError
from forgemq_trainer.previous_lives import LostCheckpointError
from forgemq_trainer.storage.checkpoint import OtherConfigurationError
from forgemq_trainer.storage.folders import FolderInUseError
from tests.unit.trainer.bench import Bench, create_topics, memory_bench
from tests.unit.trainer.scene import (
    agent_samples,
    configuration_of,
    merge,
    save_base,
    scheduled_step,
)


def _trees(count: int) -> list[MergedTree]:
    generator = np.random.default_rng(0)
    return [merge(agent_samples(generator), f"g-{number}") for number in range(count)]


def _tree_emit(tree: MergedTree) -> Emit:
    (group,) = scheduled_step(0, [tree]).groups
    return Emit(
        topic=topics.MERGED_TREES.name,
        partition=group.partition,
        key=tree.group_id.encode(),
        value=topics.encode(tree),
    )


def _hidden(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob(".*")}


async def test_a_tree_that_comes_late_is_waited_for_and_not_failed(tmp_path: Path) -> None:
    """Its transaction is written, its commit markers are not yet, as on a slow broker."""
    bench = await memory_bench(tmp_path)
    assert isinstance(bench.log, MemoryLog)
    trees = _trees(2)
    await bench.put_trees(trees[:1])
    merger = await bench.log.transaction_writer("merger-0")
    committing = await merger._begin([_tree_emit(trees[1])])
    await bench.put_steps([scheduled_step(0, trees)])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.train(until=0))
        await asyncio.sleep(1.0)
        assert await bench.trained() == []
        bench.log._store.end(committing, state="committed")
    (trained,) = await bench.trained()
    assert trained.group_ids == ("g-0", "g-1")
    assert trained.failed_group_ids == ()


async def test_a_step_trained_again_trains_the_groups_it_was_accounted_with(
    tmp_path: Path,
) -> None:
    """The first life lost a tree that a later one could read."""
    bench = await memory_bench(tmp_path, checkpoint_every_steps=4)
    trees = _trees(2)
    await bench.put_trees(trees[:1])
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)
    await bench.put_trees(trees[1:])
    await bench.train(until=0, lineage=2)
    first, second = await bench.trained()
    assert (second.lineage, second.group_ids) == (2, ("g-0",))
    assert second.failed_group_ids == ("g-1",)
    assert second.metrics.loss_tokens == first.metrics.loss_tokens
    published = await bench.published()
    assert published[-1].sha256 == published[1].sha256


async def test_a_life_between_two_checkpoints_costs_the_steps_since_the_older_and_no_more(
    tmp_path: Path,
) -> None:
    """Checkpoints cost more than their share, so each life has one after its first step only."""
    bench = await memory_bench(tmp_path, checkpoint_share_max=1e-9)
    trees = _trees(4)
    await bench.put_trees(trees)
    steps = [scheduled_step(n, [tree], is_last=n == 3) for n, tree in enumerate(trees)]
    await bench.put_steps(steps[:3])
    await bench.train(until=2)
    await bench.put_steps(steps[3:])
    await bench.train(until=3, lineage=2)
    trained = await bench.trained()
    assert [(each.lineage, each.step, each.checkpoint_step) for each in trained] == [
        *((1, 0, 0), (1, 1, 0), (1, 2, 0)),
        *((2, 1, 1), (2, 2, 1), (2, 3, 3)),
    ]
    sha256 = {(each.lineage, each.version): each.sha256 for each in await bench.published()}
    assert [sha256[1, version] for version in (1, 2, 3)] == [
        sha256[2, version] for version in (1, 2, 3)
    ]


async def test_tokens_of_a_version_that_was_made_anew_measure_no_gap(tmp_path: Path) -> None:
    """Resumed with another rate: the engine sampled with a version 1 that no longer exists."""
    bench = await memory_bench(tmp_path, checkpoint_every_steps=4)
    samples = agent_samples(np.random.default_rng(0))
    trees = [
        merge([replace(sample, version=version) for sample in samples], f"g-{version}")
        for version in range(3)
    ]
    await bench.put_trees(trees)
    steps = [scheduled_step(step, [tree]) for step, tree in enumerate(trees)]
    await bench.put_steps(steps[:2])
    await bench.train(until=1)
    await bench.put_steps(steps[2:])
    optimizer = msgspec.structs.replace(bench.configuration.optimizer, lr=0.5)
    configuration = msgspec.structs.replace(bench.configuration, optimizer=optimizer)
    await replace(bench, configuration=configuration).train(until=2, lineage=2)
    lives = [(step.lineage, step.step) for step in await bench.trained()]
    assert lives == [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    counts = [step.metrics.gap_entries for step in await bench.trained()]
    entries = sum(len(sample.behaviour) for sample in samples)
    assert counts == [entries, entries, entries, 0, 0]


async def test_a_step_that_cannot_be_trained_again_as_it_was_ends_the_trainer(
    tmp_path: Path,
) -> None:
    bench = await memory_bench(tmp_path, checkpoint_every_steps=4)
    trees = _trees(2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)
    places = [Place(topics.MERGED_TREES.name, number) for number in range(2)]
    await bench.log.trim(await bench.log.end_positions(places))
    with pytest.raises(ExceptionGroup) as caught:
        await bench.train(until=0, lineage=2)
    assert caught.group_contains(LostTreeError, match="step 0 trained group g-0 in lineage 1")
    assert len(await bench.trained()) == 1


async def test_only_a_lost_blob_fails_its_group(tmp_path: Path) -> None:
    blobs = BlobStore(str(tmp_path / "tree-blobs"), run="r")
    log = MemoryLog(run="r", blobs=blobs, inline_bytes_max=64)
    await create_topics(log)
    configuration = configuration_of(save_base(tmp_path / "base"))
    bench = Bench(log, log.open, configuration, tmp_path / "trainer")
    trees = _trees(2)
    await bench.put_trees(trees[:1])
    (lost,) = (tmp_path / "tree-blobs").glob("values/r/*/*")
    await bench.put_trees(trees[1:])
    (away,) = {*(tmp_path / "tree-blobs").glob("values/r/*/*")} - {lost}
    lost.unlink()
    data = away.read_bytes()
    away.unlink()
    away.mkdir()  # Reading it fails, but not as a missing file.
    await bench.put_steps([scheduled_step(0, trees)])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.train(until=0))
        await asyncio.sleep(1.5)
        away.rmdir()
        away.write_bytes(data)
    (trained,) = await bench.trained()
    assert (trained.group_ids, trained.failed_group_ids) == (("g-1",), ("g-0",))


async def test_a_damaged_checkpoint_that_the_log_names_stops_the_trainer_with_a_remedy(
    tmp_path: Path,
) -> None:
    bench = await memory_bench(tmp_path)
    trees = _trees(4)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(k, trees[2 * k : 2 * k + 2]) for k in range(2)])
    await bench.train(until=1)
    record = bench.folder / "checkpoints/step-00000001/trainer.json"
    text = record.read_text()
    record.write_text(text.replace('"duration_s": ', '"duration_s": 9'))
    with pytest.raises(ExceptionGroup) as caught:
        await bench.train(until=1, lineage=2)
    assert caught.group_contains(
        LostCheckpointError, match="of step 0: put back a copy of checkpoints/step-00000001"
    )


@pytest.mark.slow
async def test_a_damaged_checkpoint_ahead_of_training_costs_no_later_one(tmp_path: Path) -> None:
    """A life wrote it before it could record the step, and the disk holds other bytes since."""
    bench = await memory_bench(tmp_path, checkpoints_kept=1)
    trees = _trees(3)
    await bench.put_trees(trees)
    steps = [scheduled_step(number, [tree]) for number, tree in enumerate(trees)]
    await bench.put_steps(steps[:1])
    await bench.train(until=0)
    folder = bench.folder / "checkpoints"
    shutil.copytree(folder / "step-00000000", folder / "step-00000009")
    (folder / "step-00000009" / "trainer.json").write_text("{")
    for number in (1, 2):
        await bench.put_steps(steps[number : number + 1])
        await bench.train(until=number, lineage=number + 1)
        kept = sorted(path.name for path in folder.iterdir())
        assert kept == ["damaged-step-00000009", f"step-0000000{number}"]
    assert [each.checkpoint_step for each in await bench.trained()] == [0, 1, 2]


async def test_what_a_killed_life_was_writing_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """Its drafts are as large as the model, and no later life writes under their names."""
    bench = await memory_bench(tmp_path)
    trees = _trees(1)
    await bench.put_trees(trees)

    weights = tmp_path / "blobs/weights/r"
    for folder in (weights, weights / "heads", bench.folder / "checkpoints"):
        draft = folder / ".step-9.draft"
        draft.mkdir(parents=True)
        (draft / "model.safetensors").write_bytes(b"half of it")
    (bench.folder / ".whole.gone").mkdir()
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)
    assert _hidden(tmp_path) == {".lock"}


async def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    bench = await memory_bench(tmp_path)
    trees = _trees(2)
    await bench.put_trees(trees)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.train(until=0))
        await bench.wait_for_start()
        with pytest.raises(ExceptionGroup) as caught:
            await bench.train(until=0)
        assert caught.group_contains(FolderInUseError, match="another process holds")
        await bench.put_steps([scheduled_step(0, trees)])
    assert [step.lineage for step in await bench.trained()] == [1]


async def test_an_older_trainer_writes_no_step_once_a_newer_one_has_started(
    tmp_path: Path,
) -> None:
    """On two machines each has its own folder, so only the log can refuse the older one."""
    older = await memory_bench(tmp_path)
    newer = replace(older, folder=tmp_path / "other" / "trainer")
    trees = _trees(2)
    await older.put_trees(trees)
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - both run at once
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(older.train(until=0))
            await older.wait_for_start()
            # The newer one has claimed the run and hangs before it publishes anything.
            await newer.log.transaction_writer("trainer")
            await older.put_steps([scheduled_step(0, trees)])
    assert caught.group_contains(FencedError)
    assert await older.trained() == []


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("rewards", "alpha"), 0.5, "rewards.alpha was 1.0 when this run was trained, and is 0.5"),
        (("seed",), 8, "seed was 7 when this run was trained, and is 8"),
    ],
)
async def test_another_configuration_is_refused_by_its_first_field(
    tmp_path: Path, path: tuple[str, ...], value: object, line: str
) -> None:
    bench = await memory_bench(tmp_path)
    trees = _trees(2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)
    inner = value
    if len(path) == 2:
        part = getattr(bench.configuration, path[0])
        inner = msgspec.structs.replace(part, **{path[1]: value})
    changed = msgspec.structs.replace(bench.configuration, **{path[0]: inner})
    with pytest.raises(ExceptionGroup) as caught:
        await replace(bench, configuration=changed).train(until=0, lineage=2)
    assert caught.group_contains(OtherConfigurationError, match=line)


async def test_resources_and_the_learning_rate_may_change_between_two_lives(tmp_path: Path) -> None:
    bench = await memory_bench(tmp_path)
    trees = _trees(4)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees[:2])])
    await bench.train(until=0)
    await bench.put_steps([scheduled_step(1, trees[2:])])
    trainer = msgspec.structs.replace(
        bench.configuration.trainer, checkpoints_kept=7, memory_budget_bytes=2_000_000_000
    )
    optimizer = msgspec.structs.replace(bench.configuration.optimizer, lr=0.5)
    changed = msgspec.structs.replace(
        bench.configuration, trainer=trainer, optimizer=optimizer, code_paths=("elsewhere",)
    )
    await replace(bench, configuration=changed).train(until=1)
    before = bench.configuration
    lrs = [
        learning_rate(settings, step=step, steps=before.trainer.steps)
        for step, settings in enumerate((before.optimizer, optimizer))
    ]
    trained = await bench.trained()
    assert [(step.step, step.metrics.lr) for step in trained] == [(0, lrs[0]), (1, lrs[1])]
