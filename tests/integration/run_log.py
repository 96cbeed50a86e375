"""The accounting of one run, read from its log record by record, without the product's reports."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Place, Record
from forgemq_contracts import topics
from forgemq_contracts.audit import AuditedGroup
from forgemq_contracts.groups import AdmittedGroup, MergedGroup, RetiredGroup, ScoredGroup
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.trees import MergedTree
from tests.small_run import small_run

GROUP_PARTITIONS = 2
READ_S = 0.25
RECORDS_MAX = 2000

Struct = TypeVar("Struct", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """All committed accounting records of a run, in the order of the log."""

    admitted: Sequence[AdmittedGroup]
    scored: Sequence[ScoredGroup]
    merged: Sequence[MergedGroup]
    trees: Sequence[MergedTree]
    scheduled: Sequence[ScheduledStep]
    trained: Sequence[TrainedStep]
    retired: Sequence[RetiredGroup]
    audited: Sequence[AuditedGroup]

    def sample_ids(self) -> dict[str, tuple[str, ...]]:
        """Samples in the tree of each group; if the tree is trimmed, those that its audit found."""
        found = {
            group.group_id: facts.completion_ids for group in self.audited for facts in group.trees
        }
        return found | {tree.group_id: tree.sample_ids for tree in self.trees}

    def surviving_steps(self) -> dict[int, TrainedStep]:
        """Steps that made the final weights: for each number the one of the newest lineage."""
        steps: dict[int, TrainedStep] = {}
        for step in sorted(self.trained, key=lambda each: each.lineage):
            steps[step.step] = step
        return dict(sorted(steps.items()))

    def open_group_ids(self) -> frozenset[str]:
        """Ids of the groups that are admitted and not retired."""
        retired = {group.group_id for group in self.retired}
        return frozenset(group.group_id for group in self.admitted) - retired

    def assert_exactly_once(self) -> None:
        """Assert G1 and G2: each group retired once, each scheduled one in exactly one step."""
        admitted = Counter(group.group_id for group in self.admitted)
        assert set(admitted.values()) == {1}, [g for g, n in admitted.items() if n > 1]
        retired = Counter(group.group_id for group in self.retired)
        assert retired == admitted, (retired - admitted, admitted - retired)
        once = (("scored", self.scored), ("merged", self.merged), ("audited", self.audited))
        for name, records in once:
            twice = [g for g, n in Counter(r.group_id for r in records).items() if n > 1]
            assert not twice, f"{name} twice: {twice}"

        steps = self.surviving_steps()
        assert list(steps) == list(range(len(steps))), list(steps)
        assert [step.step for step in self.scheduled] == list(steps)
        for scheduled in self.scheduled:
            planned = [group.group_id for group in scheduled.groups]
            for trained in self.trained:  # of any lineage: a step is immutable
                if trained.step == scheduled.step:
                    assert [*trained.group_ids, *trained.failed_group_ids] == planned

        trained_in = {g: step.step for step in steps.values() for g in step.group_ids}
        assert len(trained_in) == sum(len(step.group_ids) for step in steps.values())
        said = {group.group_id: group.step for group in self.retired if group.reason == "trained"}
        assert said == trained_in

        samples = Counter(
            sample
            for group_id, samples in self.sample_ids().items()
            if group_id in trained_in
            for sample in samples
        )
        wanted = Counter(
            completion.completion_id
            for group in self.scored
            if group.group_id in trained_in
            for completion in group.completions
        )
        assert samples == wanted, (samples - wanted, wanted - samples)


def accounts(
    bootstrap: str,
    *,
    run: str,
    blobs: str,
    bad: frozenset[tuple[Place, int]] = frozenset(),
    layout: RunConfiguration | None = None,
) -> Accounts:
    """Read the log of a run.

    Args:
        bootstrap: Address of the broker.
        run: Id of the run.
        blobs: Address of the run's blob store.
        bad: Partition and offset of the bad records; all others must decode.
        layout: Says how many partitions each topic has; None: one queue, one lane and
            GROUP_PARTITIONS.
    """
    made = layout or small_run(group_partitions=GROUP_PARTITIONS)

    async def read() -> Accounts:
        connection = KafkaConnection(bootstrap=bootstrap)
        log = KafkaLog(connection, run=run, blobs=BlobStore(blobs, run=run))

        async def every(topic: topics.Topic, kind: type[Struct]) -> list[Struct]:
            count = topics.partition_count(topic, made)
            records = await records_of(log, topic.name, partitions=count)
            good = [record for record in records if (record.place, record.offset) not in bad]
            decoded = [topics.decode(topic, record.value) for record in good]
            return [record for record in decoded if isinstance(record, kind)]

        try:
            return Accounts(
                admitted=await every(topics.ADMITTED_GROUPS, AdmittedGroup),
                scored=await every(topics.SCORED_GROUPS, ScoredGroup),
                merged=await every(topics.MERGED_GROUPS, MergedGroup),
                trees=await every(topics.MERGED_TREES, MergedTree),
                scheduled=await every(topics.SCHEDULED_STEPS, ScheduledStep),
                trained=await every(topics.TRAINED_STEPS, TrainedStep),
                retired=await every(topics.RETIRED_GROUPS, RetiredGroup),
                audited=await every(topics.AUDITED_GROUPS, AuditedGroup),
            )
        finally:
            await log.close()

    return asyncio.run(read())


def records_in(
    bootstrap: str,
    topic: topics.Topic,
    *,
    run: str,
    blobs: str,
    layout: RunConfiguration | None = None,
) -> list[msgspec.Struct]:
    """Every record of a topic of a run, decoded, one partition after another.

    Args:
        bootstrap: Address of the broker.
        topic: Which one.
        run: Id of the run.
        blobs: Address of the run's blob store.
        layout: As in `accounts`.
    """
    made = layout or small_run(group_partitions=GROUP_PARTITIONS)

    async def read() -> list[Record]:
        log = KafkaLog(
            KafkaConnection(bootstrap=bootstrap), run=run, blobs=BlobStore(blobs, run=run)
        )
        try:
            count = topics.partition_count(topic, made)
            return await records_of(log, topic.name, partitions=count)
        finally:
            await log.close()

    return [topics.decode(topic, record.value) for record in asyncio.run(read())]


async def records_of(log: KafkaLog, name: str, *, partitions: int) -> list[Record]:
    """Every record of a topic up to its present end."""
    places = [Place(name, number) for number in range(partitions)]
    reader = await log.reader(await log.first_positions(places))
    ends = await log.end_positions(places)
    found: list[Record] = []
    try:
        async with asyncio.timeout(60):
            while any(reader.position(place) < ends[place] for place in places):
                found += await reader.read(timeout_s=READ_S, records_max=RECORDS_MAX)
    finally:
        await reader.close()
    return found


def first_offsets(bootstrap: str, *, run: str) -> dict[Place, int]:
    """First offset of each partition of the topics that are trimmed."""
    places = [
        Place(topic.name, number)
        for topic in topics.OF_RUN
        if topic.needed_by
        for number in range(
            topics.partition_count(topic, small_run(group_partitions=GROUP_PARTITIONS))
        )
    ]

    async def read() -> dict[Place, int]:
        log = KafkaLog(KafkaConnection(bootstrap=bootstrap), run=run)
        try:
            return await log.first_positions(places)
        finally:
            await log.close()

    return asyncio.run(read())
