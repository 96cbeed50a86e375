"""Starts that fail before a broker runs."""

import time
from pathlib import Path

import pytest

from forgemq_bus.broker import BrokerError, LocalBroker
from forgemq_bus.broker.jars import KAFKA_VERSION, lock_digest, locked_jars


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


def test_a_format_that_takes_too_long_is_an_error_of_the_broker(tmp_path: Path) -> None:
    jars = tmp_path / "cache" / f"kafka-{KAFKA_VERSION}-{lock_digest()}"
    jars.mkdir(parents=True)
    for name in locked_jars():
        (jars / name).touch()
    broker = LocalBroker(tmp_path / "kafka", cache=tmp_path / "cache", start_timeout_s=0.0)
    with pytest.raises(BrokerError, match=r"formatting the broker's data took over 0 s: .*\.log"):
        broker.start()
    assert not broker.is_running()
