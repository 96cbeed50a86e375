"""The trainer as a service, on a log in memory: steps in, trained steps and weights out."""

import asyncio
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stand_in_lane import heartbeat
from transformers import AutoModelForCausalLM

from forgemq_bus.log import Emit, Place, Record
from forgemq_bus.memory_reader import MemoryReader
from forgemq_bus.partitions import dead_letters_of
from forgemq_contracts import topics
from forgemq_contracts.steps import ScheduledStep
from forgemq_contracts.trees import MergedTree
from forgemq_contracts.weights import PublishedWeights, RelayedLane
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.previous_lives import FencedTrainerError, LostCheckpointError
from tests.unit.trainer.bench import memory_bench
from tests.unit.trainer.scene import (
    agent_samples,
    make_model,
    merge,
    scheduled_step,
)


def _trees(count: int, seed: int = 0) -> list[MergedTree]:
    generator = np.random.default_rng(seed)
    return [merge(agent_samples(generator), f"g-{seed}-{number}") for number in range(count)]


def _weights(published: PublishedWeights) -> Mapping[str, torch.Tensor]:
    return load_file(Path(published.uri) / "model.safetensors")


async def test_a_run_publishes_the_base_then_one_version_for_each_step(tmp_path: Path) -> None:
    bench = await memory_bench(tmp_path)
    trees = _trees(4)
    await bench.put_trees(trees)
    await bench.put_steps(
        [scheduled_step(0, trees[:2]), scheduled_step(1, trees[2:], is_last=True)]
    )
    await bench.train(until=1)

    trained = await bench.trained()
    published = await bench.published()
    assert [(step.step, step.lineage, step.checkpoint_step) for step in trained] == [
        (0, 1, 0),
        (1, 1, 1),
    ]
    assert trained[0].group_ids == ("g-0-0", "g-0-1")
    assert trained[1].is_last
    assert [(weights.lineage, weights.version) for weights in published] == [(1, 0), (1, 1), (1, 2)]
    assert published[0].uri == str((tmp_path / "base").resolve())
    for weights in published:
        data = (Path(weights.uri) / "model.safetensors").read_bytes()
        assert hashlib.sha256(data).hexdigest() == weights.sha256
        assert len(data) == weights.size_bytes
    assert len({weights.sha256 for weights in published}) == 3


async def test_the_first_version_is_offered_to_a_lane_heard_of_before_the_trainer_began(
    tmp_path: Path,
) -> None:
    environ = {"FORGEMQ_TRAINER_FAST_PATH": "relay"}
    bench = replace(await memory_bench(tmp_path), environ=environ)
    await bench.write(topics.REPORTED_ENGINES, heartbeat(weights_address="127.0.0.1:1"))
    trees = _trees(2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)
    offers = [(each.version, each.relayed_to) for each in await bench.published()]
    lanes = (RelayedLane(lane=0, epoch=1),)
    assert offers == [(0, ()), (1, lanes)]


async def test_a_restarted_trainer_relays_its_first_version_to_lanes_that_it_hears_of_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is loaded long before its log gives it the heartbeats from before its start."""
    environ = {"FORGEMQ_TRAINER_FAST_PATH": "relay"}
    bench = replace(await memory_bench(tmp_path), environ=environ)
    await bench.write(topics.REPORTED_ENGINES, heartbeat(weights_address="127.0.0.1:1"))
    trees = _trees(4)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees[:2])])
    await bench.train(until=0)
    read = MemoryReader.read

    async def late(self: MemoryReader, **limits: Any) -> list[Record]:
        if any(place.topic == topics.REPORTED_ENGINES.name for place in self._positions):
            await asyncio.sleep(5)
        return await read(self, **limits)

    monkeypatch.setattr(MemoryReader, "read", late)
    await bench.put_steps([scheduled_step(1, trees[2:])])
    await bench.train(until=1, lineage=2)
    restored = next(each for each in await bench.published() if each.lineage == 2)
    assert (restored.version, restored.relayed_to) == (1, (RelayedLane(lane=0, epoch=1),))


async def test_metrics_are_numbers_of_the_step_that_was_trained(tmp_path: Path) -> None:
    bench = await memory_bench(tmp_path)
    trees = _trees(2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)

    metrics = (await bench.trained())[0].metrics
    groups = scheduled_step(0, trees).groups
    assert metrics.loss_tokens == sum(group.loss_tokens for group in groups)
    assert metrics.tree_tokens == sum(group.tree_tokens for group in groups)
    assert metrics.request_tokens == 3 * metrics.tree_tokens
    assert metrics.lr == 1e-2
    assert metrics.grad_norm > 0
    assert 0 < metrics.entropy < np.log(64)
    assert metrics.kl_k3 > 0
    assert 0 < metrics.gap_entries < metrics.loss_tokens
    assert 0 < metrics.logprob_gap_mean <= metrics.logprob_gap_max
    assert metrics.ratio_p99 >= metrics.ratio_mean > 0
    assert metrics.flop_ratio > 1
    assert metrics.branch_loss >= 1


async def test_a_metric_above_its_threshold_is_an_event(tmp_path: Path) -> None:
    stream = io.StringIO()
    bench = replace(
        await memory_bench(tmp_path), telemetry=Telemetry(service="trainer", stream=stream)
    )
    trees = _trees(2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)

    (trained,) = await bench.trained()
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    raised = {event["metric"]: event for event in events if event.get("event") == "alarm"}
    gap = raised["logprob_gap_mean"]
    assert gap["step"] == 0
    assert gap["value"] == pytest.approx(trained.metrics.logprob_gap_mean)
    assert gap["value"] > gap["threshold"] == 0.05


async def test_published_weights_load_in_stock_transformers(tmp_path: Path) -> None:
    bench = await memory_bench(tmp_path)
    trees = _trees(2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)

    newest = (await bench.published())[-1]
    model = AutoModelForCausalLM.from_pretrained(newest.uri, local_files_only=True)
    saved = _weights(newest)
    names = dict(model.named_parameters())
    assert set(saved) == set(names)
    assert all(torch.equal(saved[name], names[name]) for name in saved)
    assert (Path(newest.uri) / "tokenizer_config.json").read_text() == '{"model_max_length": 512}'
    base = make_model("qwen3", torch.float32)
    assert not torch.equal(saved["model.norm.weight"], base.model.norm.weight)


async def test_a_crash_after_the_checkpoint_trains_nothing_twice(tmp_path: Path) -> None:
    """The log lacks the TrainedStep of the checkpoint's step, as after a kill between the two."""
    first = await memory_bench(tmp_path)
    trees = _trees(4)
    await first.put_trees(trees)
    await first.put_steps([scheduled_step(0, trees[:2])])
    await first.train(until=0)
    (before,) = await first.trained()

    second = await memory_bench(tmp_path)
    await second.put_trees(trees)
    await second.put_steps([scheduled_step(0, trees[:2]), scheduled_step(1, trees[2:])])
    await second.train(until=1)
    trained = await second.trained()
    assert trained[0] == before
    assert [step.step for step in trained] == [0, 1]
    assert trained[1].lineage == 2
    assert [(w.lineage, w.version) for w in await second.published()] == [(2, 1), (2, 2)]


async def test_a_restart_continues_to_the_same_bytes(tmp_path: Path) -> None:
    trees = _trees(6)
    steps = [scheduled_step(k, trees[2 * k : 2 * k + 2], is_last=k == 2) for k in range(3)]
    digests = []
    for name, lives in (("whole", [2]), ("broken", [0, 1, 2])):
        (tmp_path / name).mkdir()
        bench = await memory_bench(tmp_path / name, steps=3)
        await bench.put_trees(trees)
        await bench.put_steps(steps)
        for until in lives:
            await bench.train(until=until)
        digests.append((await bench.published())[-1].sha256)
        assert [step.step for step in await bench.trained()] == [0, 1, 2]
    assert digests[0] == digests[1]


@pytest.mark.slow
async def test_only_trees_after_the_newest_checkpoint_are_needed(
    tmp_path: Path,
) -> None:
    """A checkpoint every second step; trees that a restart does not need are deleted."""
    trees = _trees(8)
    steps = [scheduled_step(k, trees[2 * k : 2 * k + 2], is_last=k == 3) for k in range(4)]
    places = [Place(topics.MERGED_TREES.name, number) for number in range(2)]
    digests = []
    for is_trimmed in (False, True):
        (tmp_path / str(is_trimmed)).mkdir()
        bench = await memory_bench(tmp_path / str(is_trimmed), steps=4, checkpoint_every_steps=2)
        await bench.put_trees(trees)
        needed_sums = []
        # Step 0 alone is in no checkpoint, so the second life trains it again.
        for lineage, fresh in enumerate((steps[:1], steps[1:3], steps[3:]), start=1):
            await bench.put_steps(fresh)
            await bench.train(until=fresh[-1].step, lineage=lineage)
            needed = await bench.log.committed(group=topics.needed_group("trainer"), places=places)
            if is_trimmed:
                await bench.log.trim(needed)
            needed_sums.append(sum(needed.values()))
        digests.append((await bench.published())[-1].sha256)
        assert needed_sums[0] == 0
        assert needed_sums[0] < needed_sums[1] < needed_sums[2]
    assert digests[0] == digests[1]


async def test_steps_after_the_checkpoint_are_trained_again_in_a_new_lineage(
    tmp_path: Path,
) -> None:
    trees = _trees(6)
    bench = await memory_bench(tmp_path, checkpoint_every_steps=2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(k, trees[2 * k : 2 * k + 2]) for k in range(3)])
    await bench.train(until=2)
    await bench.train(until=2, lineage=2)

    trained = await bench.trained()
    assert [(step.lineage, step.step, step.checkpoint_step) for step in trained] == [
        (1, 0, -1),
        (1, 1, 1),
        (1, 2, 1),
        (2, 2, 1),
    ]
    published = await bench.published()
    assert [(w.lineage, w.version) for w in published] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
        (2, 2),
        (2, 3),
    ]
    assert published[4].sha256 == published[2].sha256
    assert published[5].sha256 == published[3].sha256


async def test_a_tree_that_cannot_be_loaded_fails_its_group_only(tmp_path: Path) -> None:
    bench = await memory_bench(tmp_path)
    good, missing, changed = _trees(3)
    await bench.put_trees([good, changed])
    scheduled = scheduled_step(0, [good, missing, changed])
    damaged = scheduled.groups[2]
    other = ScheduledStep(
        step=0,
        groups=(
            *scheduled.groups[:2],
            type(damaged)(
                **{f: getattr(damaged, f) for f in damaged.__struct_fields__ if f != "tree_sha256"},
                tree_sha256="0" * 64,
            ),
        ),
        staleness_bound=9,
    )
    await bench.put_steps([other])
    await bench.train(until=0)
    (trained,) = await bench.trained()
    assert trained.group_ids == (good.group_id,)
    assert trained.failed_group_ids == (missing.group_id, changed.group_id)
    assert trained.metrics.loss_tokens == scheduled.groups[0].loss_tokens


async def test_a_step_without_any_tree_still_publishes_its_version(tmp_path: Path) -> None:
    bench = await memory_bench(tmp_path)
    await bench.put_steps([scheduled_step(0, _trees(2))])
    await bench.train(until=0)
    (trained,) = await bench.trained()
    assert trained.group_ids == ()
    assert (trained.metrics.loss, trained.metrics.grad_norm) == (0.0, 0.0)
    published = await bench.published()
    base, version_1 = _weights(published[0]), _weights(published[1])
    assert all(torch.equal(base[name], version_1[name]) for name in base)


async def test_a_record_that_does_not_decode_goes_to_the_dead_letters(tmp_path: Path) -> None:
    bench = await memory_bench(tmp_path)
    writer = await bench.log.transaction_writer("merger")
    place = Place(topics.MERGED_TREES.name, 1)
    bad = Emit(topic=place.topic, partition=1, key=b"g", value=b"\xc1not a tree")
    await writer.commit(outputs=[bad], group="merger", positions={})
    trees = _trees(2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)
    assert (await bench.trained())[0].group_ids == tuple(tree.group_id for tree in trees)
    reader = await bench.log.reader({dead_letters_of(topics.MERGED_TREES): 0})
    (dead,) = await reader.read(timeout_s=0, records_max=10)
    assert dead.value == b"\xc1not a tree"
    assert dict(dead.headers)["offset"] == b"0"


async def test_a_step_that_does_not_decode_is_skipped_and_becomes_one_dead_letter(
    tmp_path: Path,
) -> None:
    """Each life reads steps from the first, so each life reads the bad record."""
    bench = await memory_bench(tmp_path)
    writer = await bench.log.transaction_writer("scheduler")
    bad = Emit(topic=topics.SCHEDULED_STEPS.name, partition=0, key=b"0", value=b"\xc1no step")
    await writer.commit(outputs=[bad], group="scheduler", positions={})
    trees = _trees(2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees[:1]), scheduled_step(1, trees[1:])])
    await bench.train(until=0)
    await bench.train(until=1)
    reader = await bench.log.reader({dead_letters_of(topics.SCHEDULED_STEPS): 0})
    (dead,) = await reader.read(timeout_s=0, records_max=10)
    assert dead.value == b"\xc1no step"


async def test_a_newer_trainer_fences_this_one(tmp_path: Path) -> None:
    bench = await memory_bench(tmp_path)

    async def fence() -> None:
        reader = await bench.log.reader({Place(topics.PUBLISHED_WEIGHTS.name, 0): 0})
        (record,) = await reader.read(timeout_s=20, records_max=1)
        mine = topics.decode(topics.PUBLISHED_WEIGHTS, record.value)
        assert isinstance(mine, PublishedWeights)
        newer = PublishedWeights(
            lineage=mine.lineage + 1, version=0, sha256=mine.sha256, uri=mine.uri, size_bytes=1
        )
        await bench.write(topics.PUBLISHED_WEIGHTS, newer)

    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - both run at once
        async with asyncio.TaskGroup() as group:
            group.create_task(fence())
            group.create_task(bench.train(until=0))
    assert caught.group_contains(FencedTrainerError)


async def test_a_lost_folder_is_an_error_and_not_a_new_run(tmp_path: Path) -> None:
    bench = await memory_bench(tmp_path)
    trees = _trees(2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)
    elsewhere = replace(bench, folder=tmp_path / "empty")
    with pytest.raises(ExceptionGroup) as caught:
        await elsewhere.train(until=1)
    assert caught.group_contains(LostCheckpointError)


async def test_only_as_many_checkpoints_as_configured_are_kept(tmp_path: Path) -> None:
    trees = _trees(8)
    bench = await memory_bench(tmp_path, checkpoints_kept=2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(k, trees[2 * k : 2 * k + 2]) for k in range(4)])
    await bench.train(until=3)
    kept = sorted(path.name for path in (bench.folder / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000003"]
    weights = sorted(path.name for path in (tmp_path / "blobs/weights/r").iterdir())
    assert weights == ["1.1", "1.2", "1.3", "1.4"]
