"""A new build of a core takes over the journal of a killed one, on a real broker."""

import signal
from pathlib import Path

import pytest

from forgemq_bus.kafka import KafkaLog
from tests.integration import test_shell
from tests.integration.test_shell import (
    PARTITIONS,
    Process,
    expected,
    killed_at_the_end,
    score,
    until_merged,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]
run = test_shell.run

NEWER = 1000
"""What the newer core adds to each number that it writes."""


async def test_a_newer_build_writes_new_outputs_only_and_an_older_one_is_refused(
    kafka_log: KafkaLog, run: dict, tmp_path: Path
):
    run |= {"FORGEMQ_SERVICE_INSTANCE": "merger-0"}
    old = Process(tmp_path / "lines", **run)
    with killed_at_the_end(old):
        await score(kafka_log, range(10))
        await until_merged(kafka_log, 10)
        old.process.send_signal(signal.SIGKILL)
        await old.ended()
    new = Process(tmp_path / "lines", "newer", **run)
    with killed_at_the_end(new):
        await score(kafka_log, range(10, 20))
        found = await until_merged(kafka_log, 20)
        new.process.send_signal(signal.SIGTERM)
        assert await new.ended() == 0
    assert found == {
        partition: [(group, n + NEWER * (index >= 5)) for index, (group, n) in enumerate(groups)]
        for partition, groups in expected(20).items()
    }
    taken = [event for event in new.events() if event["event"] == "taken_over"]
    assert sorted(event["partition"] for event in taken) == list(range(PARTITIONS))
    assert all(event["logic_version_before"] == 1 for event in taken)
    older = Process(tmp_path / "lines", **run)
    with killed_at_the_end(older):
        assert await older.ended() == 2
    (refused,) = [event for event in older.events() if event["event"] == "refused"]
    assert "written by logic version 2 of merger, this build has 1" in refused["error"]
