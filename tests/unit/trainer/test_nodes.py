"""Settings of a machine among several, and the file by whose age it is seen to work."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forgemq_settings.environment import SettingsError
from forgemq_trainer.ranks.alive import touching
from forgemq_trainer.ranks.nodes import nodes_of, wait_for_first

SECOND = {
    "FORGEMQ_NODES_COUNT": "2",
    "FORGEMQ_NODES_RENDEZVOUS": "trainer-0.trainer:29400",
    "FORGEMQ_NODES_ADDRESS": "trainer-1.trainer",
}


def test_the_machine_that_the_rendezvous_names_is_the_first_and_one_alone_is_too() -> None:
    assert not nodes_of(SECOND).is_first
    assert nodes_of(SECOND | {"FORGEMQ_NODES_ADDRESS": "trainer-0.trainer"}).is_first
    assert nodes_of({}).is_first


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        (
            {"FORGEMQ_NODES_RENDEZVOUS": ""},
            "FORGEMQ_NODES_RENDEZVOUS: must be set if FORGEMQ_NODES_COUNT",
        ),
        (
            {"FORGEMQ_NODES_ADDRESS": ""},
            "FORGEMQ_NODES_ADDRESS: must be set if FORGEMQ_NODES_COUNT",
        ),
        ({"FORGEMQ_NODES_RENDEZVOUS": "trainer-0"}, "FORGEMQ_NODES_RENDEZVOUS: "),
        ({"FORGEMQ_NODES_COUNT": "0"}, "FORGEMQ_NODES_COUNT: "),
        ({"FORGEMQ_NODES_PORT": "1"}, "FORGEMQ_NODES_PORT: no such setting"),
    ],
)
def test_a_setting_that_is_wrong_or_lacks_is_refused_by_name(
    changed: dict[str, str], refusal: str
) -> None:
    with pytest.raises(SettingsError, match=refusal):
        nodes_of(SECOND | changed)


def test_a_first_machine_that_is_not_there_is_named_at_the_deadline() -> None:
    # Port 1 of the loopback: nothing listens there.
    nodes = nodes_of(SECOND | {"FORGEMQ_NODES_RENDEZVOUS": "127.0.0.1:1"})
    with pytest.raises(TimeoutError, match=r"nothing listens on 127\.0\.0\.1:1 after 900 s"):
        wait_for_first(nodes, deadline_s=time.monotonic() - 1)


def until(look: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not look():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_machine_that_waits_touches_the_file_until_its_ranks_do(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    with touching(str(file), until_others_do=True, every_s=0.01):
        until(file.exists)
        began_ns = file.stat().st_mtime_ns
        until(lambda: file.stat().st_mtime_ns > began_ns)

        def stays() -> bool:
            os.utime(file, ns=(1, 1))  # As a rank's touch: it is not the thread's own.
            time.sleep(0.05)
            return file.stat().st_mtime_ns == 1

        until(stays)
    with touching(str(file), every_s=0.01):
        until(lambda: file.stat().st_mtime_ns > began_ns)
