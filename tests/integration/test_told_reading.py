"""What a command that reads a log for long says meanwhile, on a real broker."""

import asyncio
import re

import pytest

from forgemq_bus.kept_records import read_all
from forgemq_bus.partitions import partitions_of
from forgemq_contracts.topics import RETIRED_GROUPS
from forgemq_launcher.records.run_topics import create_topics
from forgemq_launcher.records.told_reading import told_reading
from tests.integration.synthetic_log import write
from tests.unit.run_view.synthetic import SyntheticRun, configuration

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


async def test_a_command_that_reads_for_long_says_how_far_it_is(kafka_log):
    made, run, said = configuration(), SyntheticRun().play(steps=3), asyncio.Queue()
    await create_topics(kafka_log, made)
    await write(kafka_log, run, first=0)
    places = partitions_of(RETIRED_GROUPS, made)
    async with told_reading(kafka_log, made, say=said.put_nowait, every_s=0.2, times=3):
        assert sum([len(records) async for records in read_all(kafka_log, places)]) == 6
        lines = [await said.get() for _ in range(3)]
    kept = re.fullmatch(
        r"run r: 6 records read in \d+ s; its log has about (\d+), "
        r"most of which are read 3 times",
        lines[-1],
    )
    assert kept, lines
    assert int(kept[1]) >= len(run.messages)
