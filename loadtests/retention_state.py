"""What the cores remember: of open groups, of groups that are over, and of every key ever asked."""

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from retention_outside import WORKLOADS, Outside, Workload

from forgemq_contracts import topics
from forgemq_contracts.accounting import RETIRED_IDS_MAX
from forgemq_contracts.asked_keys import AskedKeys
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import FinishedEpisode, OpenedEpisode
from forgemq_contracts.groups import AdmittedGroup, MergedGroup, RequestedGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.run import LogLayout
from forgemq_gateway.composer import Composer
from forgemq_gateway.core.registry import Registry
from forgemq_merger.core.merger import MergerCore
from forgemq_rendering.rendering import Rendering
from forgemq_reward.core import RewardCore
from forgemq_scheduler.core import SchedulerCore

MODEL = Path(__file__).parents[1] / "deploy/demo/model"
MODEL_VOCABULARY = 704  # of the demo: the gateway decodes what was sampled
OPEN_GROUPS = 8
GROUPS_30_DAYS = 30 * 1_000_000 // 16
"""Single-turn groups of 16 at a million completions a day: no run has more of them."""

Report = Callable[[str, float, str], None]


def measure_state(report: Report) -> None:
    """Add the rows."""
    _measure_open(report)
    _measure_gateway(report)
    _measure_over(report)
    _measure_keys(report)
    for lanes, partitions in ((1, 16), (8, 16), (100, 64)):
        layout = LogLayout(lanes=lanes, group_partitions=partitions)
        report(f"partitions, {lanes} lanes and {partitions} for groups", _partitions(layout), "")


def _measure_open(report: Report) -> None:
    """Groups of 200k tokens an episode, before their first episode is scored."""
    workload = WORKLOADS["context_200k"]
    outside, merger = Outside(workload), MergerCore(0)
    reward = RewardCore(partition=0, rewards=workload.configuration.rewards)
    # Offsets are as large as after a million completions.
    offset = 10**6
    for number in range(OPEN_GROUPS):
        playing, _ = outside.opened(_admitted(workload, number))
        for _ in range(workload.turns):
            for one in playing:
                merger.handle(_message(_finished(outside.turn(one, offset)[1].value), offset))
                offset += 1
        # The last episode is still played: the group is not scored.
        for one in playing[:-1]:
            ended = topics.decode(topics.FINISHED_EPISODES, outside.ended(one)[0].value)
            assert isinstance(ended, FinishedEpisode), "the first of two records"
            reward.handle(_message(ended, 0, topic=topics.FINISHED_EPISODES.name))
    episodes = OPEN_GROUPS * workload.rollouts
    empty = len(MergerCore(0).snapshot())
    merged_bytes = len(merger.snapshot()) - empty
    report("merger_snapshot_per_open_episode", merged_bytes / episodes, "bytes")
    held_bytes = len(reward.snapshot())
    report("reward_snapshot_per_open_episode", held_bytes / episodes, "bytes")


def _measure_gateway(report: Report) -> None:
    """The history of an open episode of 200k tokens, and the time to take it back at a restart."""
    workload, rendering = WORKLOADS["context_200k"], Rendering.load(str(MODEL))
    composer = Composer({"append_only": rendering}, context_tokens_max=200_000)
    outside, registry = Outside(workload, vocabulary=MODEL_VOCABULARY), Registry()
    group = _admitted(workload, 0)
    registry.apply_admitted_group(group)
    playing, opened = outside.opened(group)
    for emit in opened:
        episode = topics.decode(topics.OPENED_EPISODES, emit.value)
        assert isinstance(episode, OpenedEpisode), "what the topic holds"
        registry.apply_opened_episode(episode, lease_until_s=1e9)
    values = [outside.turn(one, 0)[1].value for _ in range(workload.turns) for one in playing]
    began_s = time.process_time()
    for offset, value in enumerate(values):
        registry.apply_finished_completion(
            _finished(value), offset=offset, finished_ms=0, parse=composer.parse
        )
    taken_s = time.process_time() - began_s
    report("gateway_memory_per_open_episode", registry.size_bytes() / workload.rollouts, "bytes")
    report("gateway_restore_per_completion_ms", 1000 * taken_s / len(values), "ms")


def _measure_over(report: Report) -> None:
    """The scheduler once its memory of retired groups is full, and when it was filled twice."""
    core = SchedulerCore(_SINGLE.configuration)
    outside = Outside(_SINGLE)
    for emit in outside.engine_reports():
        record = topics.decode(topics.REPORTED_ENGINES, emit.value)
        core.handle(_message(record, 0, topic=topics.REPORTED_ENGINES.name))
    sizes, before = [], len(core.snapshot())
    for number in range(_SINGLE.slots):
        core.handle(_message(_zero_variance(outside, number)[0], 0))
    grown = len(core.snapshot()) - before
    report("scheduler_snapshot_per_open_group", grown / _SINGLE.slots, "bytes")
    for number in range(2 * RETIRED_IDS_MAX):
        for record in _zero_variance(outside, number):
            core.handle(_message(record, 0))
        if (number + 1) % RETIRED_IDS_MAX == 0:
            sizes.append(len(core.snapshot()))
    report("scheduler_snapshot_full", sizes[-1], "bytes")
    report("scheduler_snapshot_growth", sizes[1] / sizes[0], "x")
    fresh, snapshot = SchedulerCore(_SINGLE.configuration), core.snapshot()
    began_s = time.process_time()
    fresh.restore(snapshot)
    report("scheduler_restore_ms", 1000 * (time.process_time() - began_s), "ms")


_SINGLE = WORKLOADS["single_turn"]


def _zero_variance(outside: Outside, number: int) -> tuple[RequestedGroup, MergedGroup]:
    """A group that is requested, and retires when it is merged."""
    requested = topics.decode(topics.REQUESTED_GROUPS, outside.requested(number).value)
    assert isinstance(requested, RequestedGroup), "what the topic holds"
    merged = MergedGroup(
        group_id=requested.group_id,
        domain="d",
        purpose="train",
        partition=0,
        not_trainable="zero_variance",
    )
    return requested, merged


def _measure_keys(report: Report) -> None:
    """Every key of 30 days, from a source that counts up."""
    keys = AskedKeys()
    for number in range(GROUPS_30_DAYS):
        keys.add(f"d/{number}", domain="d")
    report("keys_of_30_days", len(keys.to_bytes()), "bytes")


def _admitted(workload: Workload, number: int) -> AdmittedGroup:
    return AdmittedGroup(
        group_id=f"g-{number:016x}",
        domain="d",
        purpose="train",
        group_size=workload.rollouts,
        task=b"{}",
        version_at_admission=0,
        queue_index=number,
    )


def _finished(value: bytes) -> FinishedCompletion:
    record = topics.decode(topics.FINISHED_COMPLETIONS, value)
    assert isinstance(record, FinishedCompletion), "what the topic holds"
    return record


def _message(record: Struct, offset: int, *, topic: str = "any") -> Message:
    return Message(topic=topic, partition=0, offset=offset, timestamp_ms=0, record=record)


def _partitions(layout: LogLayout) -> int:
    counts = {"run": 1, "queue": 1, "group": layout.group_partitions, "lane": layout.lanes}
    return sum(counts[topic.partitioned_by] + topic.has_dlq for topic in topics.OF_RUN)
