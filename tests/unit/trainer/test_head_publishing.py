"""Which versions name a draft head, and where it lies."""

import dataclasses
import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

from forgemq_contracts.speculation import Speculation
from forgemq_contracts.trees import MergedTree
from forgemq_contracts.weights import PublishedWeights
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.storage.folders import file_sha256
from tests.unit.trainer.bench import Bench, memory_bench
from tests.unit.trainer.head_scene import save_head
from tests.unit.trainer.scene import agent_samples, merge, scheduled_step


def _trees(count: int) -> list[MergedTree]:
    generator = np.random.default_rng(0)
    return [merge(agent_samples(generator), f"g-{number}") for number in range(count)]


async def _bench(folder: Path, *, push_every_steps: int, **trainer: object) -> Bench:
    bench = await memory_bench(folder, **trainer)
    speculation = Speculation(
        head=str(save_head(folder / "head")), push_every_steps=push_every_steps
    )
    configuration = msgspec.structs.replace(bench.configuration, speculation=speculation)
    return dataclasses.replace(bench, configuration=configuration)


async def _put(bench: Bench, steps: int) -> None:
    trees = _trees(steps)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(step, [tree]) for step, tree in enumerate(trees)])


def _heads(published: list[PublishedWeights]) -> list[tuple[int, int, str]]:
    """(lineage, version, name of the head's folder or "") of each record."""
    return [
        (each.lineage, each.version, "" if each.head is None else Path(each.head.uri).name)
        for each in published
    ]


async def test_every_so_many_versions_name_a_head_that_lies_beside_the_weights(
    tmp_path: Path,
) -> None:
    """Version 0 names none: engines start with that head."""
    bench = await _bench(tmp_path, push_every_steps=2)
    await _put(bench, 4)
    await bench.train(until=3)
    published = await bench.published()
    assert _heads(published) == [(1, 0, ""), (1, 1, ""), (1, 2, "1.2"), (1, 3, ""), (1, 4, "1.4")]
    for record in (published[2], published[4]):
        assert record.head is not None
        folder = Path(record.head.uri)
        assert folder.parent == Path(record.uri).parent / "heads"
        file = folder / "model.safetensors"
        assert (file_sha256(file), file.stat().st_size) == (
            record.head.sha256,
            record.head.size_bytes,
        )
        assert load_file(file).keys() == load_file(tmp_path / "head/model.safetensors").keys()
    assert published[2].head != published[4].head


async def test_the_deadline_of_a_push_counts_both_files(tmp_path: Path) -> None:
    bench = await _bench(tmp_path, push_every_steps=2)
    await _put(bench, 2)
    await bench.train(until=1)
    _, alone, push = await bench.published()
    assert push.head is not None
    assert push.size_bytes == alone.size_bytes
    more_s = push.deadline_s - alone.deadline_s
    assert more_s == pytest.approx(push.head.size_bytes / 200e6, rel=1e-6)


@pytest.mark.slow
async def test_a_restarted_trainer_names_its_head_first_and_goes_on_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    once = await _bench(tmp_path / "once", push_every_steps=2, checkpoint_every_steps=1)
    await _put(once, 4)
    await once.train(until=3)
    twice = await _bench(tmp_path / "twice", push_every_steps=2, checkpoint_every_steps=1)
    trees = _trees(4)
    await twice.put_trees(trees)
    steps = [scheduled_step(step, [tree]) for step, tree in enumerate(trees)]
    await twice.put_steps(steps[:3])
    await twice.train(until=2)
    await twice.put_steps(steps[3:])
    await twice.train(until=3, lineage=2)
    expected, published = await once.published(), await twice.published()
    resumed = [each for each in published if each.lineage == 2]
    assert _heads(resumed) == [(2, 3, "2.3"), (2, 4, "2.4")]
    last = expected[-1].head, resumed[-1].head
    assert last[0] is not None
    assert last[1] is not None
    assert last[0].sha256 == last[1].sha256


@pytest.mark.slow
async def test_old_heads_are_removed_as_old_weights_are(tmp_path: Path) -> None:
    bench = await _bench(tmp_path, push_every_steps=1, checkpoints_kept=1, steps=6)
    await _put(bench, 6)
    await bench.train(until=5)
    folder = Path((await bench.published())[-1].uri).parent / "heads"
    assert {path.name for path in folder.iterdir()} == {"1.3", "1.4", "1.5", "1.6"}


async def test_a_run_without_speculation_names_no_head(tmp_path: Path) -> None:
    bench = await memory_bench(tmp_path)
    await _put(bench, 1)
    await bench.train(until=0)
    published = await bench.published()
    assert [each.head for each in published] == [None, None]
    assert not (Path(published[-1].uri).parent / "heads").exists()


@pytest.mark.parametrize("steps", [1, 2])
async def test_a_head_that_no_version_of_the_run_names_is_told_by_the_field(
    tmp_path: Path, steps: int
) -> None:
    events = io.StringIO()
    bench = dataclasses.replace(
        await _bench(tmp_path, push_every_steps=2, steps=steps),
        telemetry=Telemetry(service="trainer", stream=events),
    )
    await _put(bench, steps)
    await bench.train(until=steps - 1)
    pushed = [head for _, version, head in _heads(await bench.published()) if version]
    told = [
        event["detail"]
        for event in map(json.loads, events.getvalue().splitlines())
        if event["event"] == "head_unpublished"
    ]
    if steps == 2:
        assert (pushed, told) == (["", "1.2"], [])
        return
    assert pushed == [""]
    assert told == [
        "speculation.push_every_steps is 2, above trainer.steps, which is 1: the head is trained, "
        "and engines draft with the one they start with until the trainer is started again; "
        "lower it for engines to get the trained one"
    ]
