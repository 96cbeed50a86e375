"""What KEDA sees of the groups that the production overlay scales by, on the real broker."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError
from aiokafka.structs import OffsetAndMetadata

from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_contracts.partitions import group_partition
from forgemq_shell.records import emit_of
from tests.integration.scored_run import PARTITIONS, Run, scored_run

SCALING = Path(__file__).parents[2] / "deploy/kubernetes/overlays/production/scaling.yaml"
RUN = "production."
SETTLED = range(1, PARTITIONS + 1)
"""Lag of a group that has read all: a marker in each partition that has a transaction."""


class Scaled(NamedTuple):
    """One ScaledObject with a Kafka trigger; its group and topic as in the run `production`."""

    group: str
    topic: str
    lag_threshold: int
    replicas_min: int
    replicas_max: int
    offset_reset_policy: str

    def replicas(self, lag: int) -> int:
        """How many pods the autoscaler wants: a pod for each lagThreshold, within the bounds."""
        wanted = math.ceil(lag / self.lag_threshold)
        return min(max(wanted, self.replicas_min), self.replicas_max)


def scaled(name: str) -> Scaled:
    """The object of this name in the overlay."""
    every = yaml.safe_load_all(SCALING.read_text(encoding="utf-8"))
    (spec,) = (each["spec"] for each in every if each["metadata"]["name"] == name)
    metadata = spec["triggers"][0]["metadata"]
    return Scaled(
        group=metadata["consumerGroup"],
        topic=metadata["topic"],
        lag_threshold=int(metadata["lagThreshold"]),
        replicas_min=spec["minReplicaCount"],
        replicas_max=spec["maxReplicaCount"],
        offset_reset_policy=metadata["offsetResetPolicy"],
    )


class Lag:
    """Asks a broker what KEDA's Kafka scaler asks, and adds it up as that does.

    See `getLagForPartition` and `getTotalLag` in pkg/scalers/kafka_scaler.go of KEDA 2.17.
    """

    def __init__(self, admin: AIOKafkaAdminClient, consumer: AIOKafkaConsumer, *, run: str) -> None:
        self._admin = admin
        self._consumer = consumer
        self._run = run

    async def of(self, each: Scaled) -> int:
        """End minus committed position, summed over the partitions of the topic."""
        group, topic = (name.replace(RUN, f"{self._run}.", 1) for name in (each.group, each.topic))
        (described,) = await self._admin.describe_topics([topic])
        partitions = [TopicPartition(topic, p["partition"]) for p in described["partitions"]]
        committed = await self._committed(group, partitions)
        ends = await self._consumer.end_offsets(partitions)
        assert each.offset_reset_policy == "earliest"
        # Without a committed position, which is -1, the whole partition is its lag.
        total = sum(ends[each] - max(0, committed[each].offset) for each in partitions)
        return min(total, len(partitions) * each.lag_threshold)

    async def _committed(
        self, group: str, partitions: list[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Positions of a group; a broker that has just started makes their topic first."""
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self._admin.list_consumer_group_offsets(
                        group, partitions=partitions
                    )
                except GroupCoordinatorNotAvailableError:
                    await asyncio.sleep(0.1)

    async def until(self, each: Scaled, is_reached: Callable[[int], bool]) -> int:
        """The lag as soon as it is one that is waited for."""
        async with asyncio.timeout(60):
            while True:
                lag = await self.of(each)
                if is_reached(lag):
                    return lag
                await asyncio.sleep(0.1)


@pytest.fixture
async def run(
    new_run_id: Callable[[], str], kafka_bootstrap: str, tmp_path: Path
) -> AsyncIterator[Run]:
    async with scored_run(new_run_id(), kafka_bootstrap, tmp_path) as opened:
        yield opened


@pytest.fixture
async def lag(run: Run, kafka_bootstrap: str) -> AsyncIterator[Lag]:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka_bootstrap)
    await admin.start()
    await consumer.start()
    yield Lag(admin, consumer, run=run.configuration.run)
    await consumer.stop()
    await admin.close()


async def finish(run: Run, *groups: str) -> None:
    """Write the ends of these groups' episodes as a gateway does: each in a transaction."""
    writer = await run.log.transaction_writer("gateway-test")
    for group in groups:
        partition = group_partition(group, partitions=PARTITIONS)
        for index in (0, 1):
            episode = await run.played(group, index)
            output = Output(
                topic=topics.FINISHED_EPISODES.name, partition=partition, record=episode
            )
            await writer.commit(outputs=[emit_of(output)], group="gateway-test", positions={})
    await writer.close()


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.timeout(180)
async def test_the_lag_that_pods_follow_grows_while_a_service_is_away_and_ends_with_one_pod(
    run: Run, lag: Lag
) -> None:
    reward, merger = scaled("reward"), scaled("merger")
    await finish(run, *"ab")
    assert (await lag.of(reward), await lag.of(merger)) == (8, 0), "with markers, from the start"
    await run.start("reward", "merger")
    for each in (reward, merger):
        settled = await lag.until(each, SETTLED.__contains__)
        assert each.replicas(settled) == 1
    assert await run.stop() == [0, 0]

    await finish(run, *"cdefghijklmnopqrstuvw")
    behind = await lag.of(reward)
    assert (behind >= 84, reward.replicas(behind)) == (True, 2)
    await run.start("reward")
    settled = await lag.until(reward, SETTLED.__contains__)
    assert reward.replicas(settled) == 1
    behind = await lag.until(merger, lambda found: found >= 21)
    assert merger.replicas(behind) == 2
    await run.start("merger")
    settled = await lag.until(merger, SETTLED.__contains__)
    assert merger.replicas(settled) == 1
    assert await run.stop() == [0, 0]
