"""Partitions that topics of a run gain on a real broker, by its own command or behind its back."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from forgemq_bus.errors import PartitionCountError
from forgemq_bus.kafka import KafkaLog
from forgemq_contracts import topics
from forgemq_contracts.task_files import FoundTasks
from forgemq_launcher.commands.creation import TasksOfFiles, create_run
from tests.integration.scored_run import PARTITIONS, Run, scored_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

JOURNAL = topics.MERGER_JOURNAL.name
LANES = topics.REPORTED_ENGINES.name


@pytest.fixture
async def run(
    new_run_id: Callable[[], str], kafka_bootstrap: str, tmp_path: Path
) -> AsyncIterator[Run]:
    async with scored_run(new_run_id(), kafka_bootstrap, tmp_path) as opened:
        opened.environ["FORGEMQ_SERVICE_PARTITIONS_CHECKED_EVERY_S"] = "0.5"
        yield opened


@pytest.fixture
async def admin(kafka_bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await admin.start()
    yield admin
    await admin.close()


async def merger_of(run: Run) -> Process:
    merger = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forgemq_merger", env=run.environ, stderr=PIPE
    )
    run.processes[f"merger-{merger.pid}"] = merger
    return merger


async def event(process: Process, *names: str) -> dict:
    """The next event of one of these names, or what the process ended with."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        async for line in process.stderr:
            if line.startswith(b"{") and json.loads(line)["event"] in names:
                return json.loads(line)
    pytest.fail(f"the process ended with {await process.wait()} and without {names}")


async def test_a_service_ends_and_names_the_topic_that_somebody_gave_more_partitions(
    run: Run, admin: AIOKafkaAdminClient
) -> None:
    topic = f"{run.configuration.run}.{JOURNAL}"
    words = f"topic {topic} has 3 partitions, and its run counts on {PARTITIONS}"
    working = await merger_of(run)
    assert (await event(working, "assigned"))["partitions"] == [0, 1]
    await admin.create_partitions({topic: NewPartitions(3)})
    assert words in (await event(working, "refused", "failed"))["error"]
    assert await working.wait() == 2, "a restart cannot help"


async def test_a_member_of_a_group_takes_no_partition_that_was_not_there_when_it_joined(
    kafka_log: KafkaLog, admin: AIOKafkaAdminClient, new_run_id: Callable[[], str]
) -> None:
    """A broker tells its clients of new partitions within 5 minutes; here they ask at once."""
    await kafka_log.create_topics({"a": 2, "b": 2})
    taken: list[frozenset[int]] = []

    async def take(numbers: frozenset[int]) -> None:
        taken.append(numbers)

    async def give(numbers: frozenset[int]) -> None:
        del numbers

    member = await kafka_log.member(
        group="g", topics=["a", "b"], on_assigned=take, on_revoked=give, has_records=False
    )
    await admin.create_partitions({f"{kafka_log._run}.b": NewPartitions(3)})

    async def read() -> None:
        while True:
            await member._consumer._client.force_metadata_update()
            await member.read(timeout_s=0.2, records_max=1)

    with pytest.raises(PartitionCountError, match=r"group .*\.g: its topics had 2 partitions"):
        await asyncio.wait_for(read(), 60)
    assert taken == [{0, 1}]


@pytest.mark.long
async def test_a_run_is_given_room_for_more_lanes_and_a_service_that_is_up_asks_to_be_started_again(
    run: Run, admin: AIOKafkaAdminClient, kafka_bootstrap: str, tmp_path: Path
) -> None:
    working = await merger_of(run)
    await event(working, "assigned")
    layout = msgspec.structs.replace(run.configuration.log, lanes_max=3)
    wider = msgspec.structs.replace(run.configuration, log=layout)
    blobs = (tmp_path / "blobs").as_uri()
    started = await create_run(
        wider,
        {"FORGEMQ_KAFKA": kafka_bootstrap},
        blobs=blobs,
        tasks=TasksOfFiles(FoundTasks(), lambda *, known: FoundTasks()),
        say=lambda line: None,
    )
    assert started.changes == ("log.lanes_max: None -> 3",)
    topic = f"{run.configuration.run}.{LANES}"
    (described,) = await admin.describe_topics([topic])
    assert len(described["partitions"]) == 3
    words = "has more partitions since its newest start"
    assert words in (await event(working, "failed", "refused"))["error"]
    assert await working.wait() == 1
    again = await merger_of(run)
    assert (await event(again, "assigned", "refused", "failed"))["event"] == "assigned"

    await admin.create_partitions({topic: NewPartitions(4)})
    assert await again.wait() == 2
    found = await event(await merger_of(run), "assigned", "refused", "failed")
    assert (found["event"], "4 partitions, and its run counts on 3" in found["error"]) == (
        "refused",
        True,
    )
