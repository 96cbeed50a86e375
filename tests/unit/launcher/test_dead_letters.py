"""Dead letters, of which there may be very many: the newest in a table, all of them as lines."""

import base64
import io
import json

import pytest
from rich.console import Console

from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import partition_counts
from forgemq_contracts import topics
from forgemq_launcher.commands.dead_letters import (
    LETTERS_SHOWN_MAX,
    print_letter_lines,
    print_letters,
)
from tests.small_run import small_run

MORE = 5
TOPIC = topics.SCORED_GROUPS


@pytest.fixture
async def log() -> MemoryLog:
    """Has more dead letters of one topic than a table shows."""
    made = MemoryLog(run="r")
    await made.create_topics(partition_counts(small_run(group_partitions=2)))
    letters = [
        Emit(
            topic=TOPIC.dlq_name,
            partition=0,
            key=b"g",
            value=b"\xff%d" % number,
            headers=(("reason", b"no record"), ("partition", b"1"), ("offset", b"%d" % number)),
        )
        for number in range(LETTERS_SHOWN_MAX + MORE)
    ]
    await (await made.writer()).write_all(letters)
    return made


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


async def test_the_newest_dead_letters_of_a_topic_are_listed_and_the_others_counted(log):
    out = console()
    assert await print_letters(log, out) == LETTERS_SHOWN_MAX + MORE
    printed = out.file.getvalue()
    rows = [line for line in printed.splitlines() if "no record" in line]
    assert (len(rows), "offset=4 " in printed, "offset=5 " in rows[0]) == (100, False, True)
    assert printed.endswith(
        f"of {TOPIC.name} the newest 100 of 105 are listed; --json prints all\n"
    )


async def test_every_dead_letter_is_printed_whole_as_a_line_of_json(log):
    out = console()
    assert await print_letter_lines(log, out) == LETTERS_SHOWN_MAX + MORE
    lines = [json.loads(line) for line in out.file.getvalue().splitlines()]
    assert [line["offset"] for line in lines] == list(range(LETTERS_SHOWN_MAX + MORE))
    assert lines[7] == {
        "topic": TOPIC.name,
        "partition": 1,
        "offset": 7,
        "reason": "no record",
        "group": "",
        "producer": "reward",
        "blob": "",
        "value": base64.b64encode(b"\xff7").decode(),
    }


async def test_a_row_names_the_producer_and_the_batch_of_the_bad_record_and_not_of_its_letter():
    log = MemoryLog(run="r")
    await log.create_topics(partition_counts(small_run(group_partitions=2)))
    batches = (("batch", b"reward-1/33"), ("batch", b"merger-1/40"))
    await (await log.writer()).write(
        Emit(topic=TOPIC.dlq_name, partition=0, key=b"g", value=b"x", headers=batches)
    )
    out = console()
    await print_letters(log, out)
    [row] = [line for line in out.file.getvalue().splitlines() if TOPIC.name in line]
    assert "producer=reward batch=reward-1/33" in row
    assert "merger" not in row
