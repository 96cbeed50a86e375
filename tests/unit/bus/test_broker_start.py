"""A start that is abandoned ends at once."""

import time
from pathlib import Path

import pytest

from forgemq_bus.broker import BrokerError, LocalBroker


def test_a_first_start_is_given_up_while_it_fetches_the_jars(tmp_path: Path) -> None:
    lines: list[str] = []

    def abandon(line: str) -> None:
        lines.append(line)
        broker.abandon()

    broker = LocalBroker(tmp_path / "kafka", cache=tmp_path / "cache", progress=abandon)
    started_s = time.monotonic()
    with pytest.raises(BrokerError, match="fetching the Kafka jars was abandoned"):
        broker.start()
    assert time.monotonic() - started_s < 5
    assert [line.split(" (")[0] for line in lines] == ["fetching Apache Kafka 4.2.0"]
    assert list((tmp_path / "cache").iterdir()) == []
    assert not broker.is_running()
