"""Real sockets and files: what a route of receivers gets, and what becomes of those that fail."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from forgemq_weight_relay import (
    Greeting,
    Hop,
    Receiver,
    Relayed,
    RelayedFile,
    StagedCopy,
    WeightsKey,
    send_along,
)
from forgemq_weight_relay.receiving import REJOIN_S
from forgemq_weight_relay.records import RelayAnswer, read_message, write_message

pytestmark = pytest.mark.wall_clock

SIZE = 24 << 20
KEY = WeightsKey(1, 7)


@pytest.fixture
def source(tmp_path: Path) -> StagedCopy:
    folder = tmp_path / "source"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "config.json").write_bytes(b"{}")
    (folder / "policy" / "model.safetensors").write_bytes(os.urandom(SIZE))
    (folder / "policy" / "empty.txt").write_bytes(b"")
    files = tuple(
        RelayedFile(
            f"policy/{path.name}",
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted((folder / "policy").iterdir())
    )
    return StagedCopy.of_files({file.name: folder / file.name for file in files}, files)


class Lanes:
    """Receivers in this process, and what they said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broken: list[str] = []
        self.relayed: list[Relayed] = []
        self.receivers: list[Receiver] = []

    def add(self, run: str = "r") -> Receiver:
        receiver = Receiver(
            self.folder / f"lane-{len(self.receivers)}",
            run=run,
            host="127.0.0.1",
            on_relayed=lambda _, relayed: self.relayed.append(relayed),
            on_broken=lambda _, reason: self.broken.append(reason),
        )
        self.receivers.append(receiver)
        return receiver


@pytest.fixture
def lanes(tmp_path: Path) -> Iterator[Lanes]:
    found = Lanes(tmp_path)
    yield found
    for receiver in found.receivers:
        receiver.close()


def greeting(source: StagedCopy, *addresses: str, seconds_left: float = 30.0) -> Greeting:
    return Greeting(
        run="r",
        lineage=KEY.lineage,
        version=KEY.version,
        files=source.files,
        route=tuple(Hop(lane, address) for lane, address in enumerate(addresses)),
        seconds_left=seconds_left,
    )


def send(source: StagedCopy, message: Greeting) -> Relayed:
    return send_along(source, message, stop=threading.Event())


def assert_same(found: StagedCopy | None, source: StagedCopy) -> None:
    assert found is not None
    for file in source.files:
        assert found.paths[file.name].read_bytes() == source.paths[file.name].read_bytes()


@pytest.mark.parametrize("count", [1, 3])
def test_every_lane_gets_the_bytes_and_the_sender_sends_them_once(
    source: StagedCopy, lanes: Lanes, count: int
) -> None:
    receivers = [lanes.add() for _ in range(count)]
    relayed = send(source, greeting(source, *(each.address for each in receivers)))
    assert relayed == Relayed(lane=0, sent_bytes=source.size_bytes, left_out={})
    for receiver in receivers:
        assert_same(receiver.wait(KEY, timeout_s=20), source)
    assert lanes.broken == []


def test_a_lane_passes_on_what_it_has_before_it_has_all(
    source: StagedCopy, lanes: Lanes, tmp_path: Path
) -> None:
    """The sender's copy holds only half: the second lane gets that half meanwhile."""
    growing = StagedCopy(source.paths, source.files)
    receivers = [lanes.add() for _ in range(2)]
    growing.grow(SIZE // 2)
    message = greeting(source, *(each.address for each in receivers))
    sender = threading.Thread(target=send, args=(growing, message))
    sender.start()
    end_s = time.monotonic() + 4
    while sum(f.stat().st_size for f in (tmp_path / "lane-1").rglob("*")) < SIZE // 2 - 4096:
        assert time.monotonic() < end_s, "the second lane waits for the whole of the first"
        time.sleep(0.02)
    assert receivers[0].wait(KEY, timeout_s=0) is None
    growing.grow(source.size_bytes - SIZE // 2)
    sender.join()
    assert_same(receivers[1].wait(KEY, timeout_s=20), source)


def test_a_lane_that_is_gone_or_refuses_is_left_out_and_the_next_gets_all(
    source: StagedCopy, lanes: Lanes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    other, last = lanes.add(run="another"), lanes.add()
    relayed = send(source, greeting(source, gone, other.address, last.address))
    assert (relayed.lane, relayed.sent_bytes) == (2, source.size_bytes)
    assert "refused" in relayed.left_out[0].lower()
    assert relayed.left_out[1].endswith("refused: this is run another")
    assert_same(last.wait(KEY, timeout_s=20), source)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lane_that_dies_or_hangs_in_the_middle_is_passed_by(
    source: StagedCopy, lanes: Lanes, tmp_path: Path, how: signal.Signals
) -> None:
    """The one before it sends the same version to the one after it, from the first byte."""
    growing = StagedCopy(source.paths, source.files)
    first, last = lanes.add(), lanes.add()
    middle = subprocess.Popen(
        [sys.executable, "-c", _RECEIVER, str(tmp_path / "middle")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert middle.stdout is not None
        address = middle.stdout.readline().strip()
        message = greeting(source, first.address, address, last.address, seconds_left=60)
        growing.grow(SIZE // 2)
        results: list[Relayed] = []
        sender = threading.Thread(target=lambda: results.append(send(growing, message)))
        sender.start()
        end_s = time.monotonic() + 4
        while not list((tmp_path / "lane-1").rglob("model.safetensors")):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        middle.send_signal(how)
        growing.grow(source.size_bytes - SIZE // 2)
        assert_same(last.wait(KEY, timeout_s=40), source)
        sender.join()
    finally:
        middle.kill()
        middle.communicate()
    assert_same(first.wait(KEY, timeout_s=0), source)
    assert results == [Relayed(lane=0, sent_bytes=source.size_bytes, left_out={})]
    (relayed,) = [each for each in lanes.relayed if each.left_out]
    assert (relayed.lane, list(relayed.left_out)) == (2, [1])


_RECEIVER = """
import sys, time
from pathlib import Path
from forgemq_weight_relay import Receiver
nothing = lambda *_: None
receiver = Receiver(
    Path(sys.argv[1]), run="r", host="127.0.0.1", on_relayed=nothing, on_broken=nothing
)
print(receiver.address, flush=True)
time.sleep(120)
"""


def test_bytes_that_are_not_the_announced_ones_are_no_copy(
    source: StagedCopy, lanes: Lanes
) -> None:
    with source.paths["policy/model.safetensors"].open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(b"other bytes")
    receiver = lanes.add()
    relayed = send(source, greeting(source, receiver.address))
    assert relayed.lane is None
    assert "model.safetensors has sha256" in relayed.left_out[0]
    assert receiver.wait(KEY, timeout_s=0) is None
    until_empty(lanes.folder / "lane-0")


def until_empty(folder: Path) -> None:
    """A copy that broke off takes no room: the durable copy needs it."""
    end_s = time.monotonic() + 5
    while list(folder.iterdir()):
        assert time.monotonic() < end_s, list(folder.rglob("*"))
        time.sleep(0.01)


@pytest.mark.slow
def test_a_sender_that_dies_is_not_waited_for_until_the_deadline(
    source: StagedCopy, lanes: Lanes
) -> None:
    growing = StagedCopy(source.paths, source.files)
    growing.grow(SIZE // 2)
    receiver = lanes.add()
    message = greeting(source, receiver.address)
    sender = threading.Thread(target=send, args=(growing, message))
    sender.start()
    time.sleep(0.5)
    growing.break_off("killed")
    sender.join()
    started_s = time.monotonic()
    assert receiver.wait(KEY, timeout_s=60) is None
    assert time.monotonic() - started_s < REJOIN_S + 5
    assert "left" in lanes.broken[0]
    until_empty(lanes.folder / "lane-0")


def test_a_name_that_leads_out_of_the_folder_is_refused(
    source: StagedCopy, lanes: Lanes, tmp_path: Path
) -> None:
    outside = RelayedFile("../outside", 2, hashlib.sha256(b"{}").hexdigest())
    copy = StagedCopy.of_files({outside.name: source.paths["policy/config.json"]}, (outside,))
    relayed = send(copy, greeting(copy, lanes.add().address))
    assert "'../outside' is not <folder>/<file>" in relayed.left_out[0]
    assert not (tmp_path / "outside").exists()


def test_a_second_file_of_one_name_is_refused(source: StagedCopy, lanes: Lanes) -> None:
    """It would take the place of the first one, whose checksum the reader compares."""
    first = next(each for each in source.files if each.name == "policy/config.json")
    second = RelayedFile(first.name, 2, hashlib.sha256(b"[]").hexdigest())
    receiver = lanes.add()
    message = replace(greeting(source, receiver.address), files=(first, second))
    host, _, port = receiver.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as link:
        write_message(link, replace(message, route=()))
        answer = read_message(link, RelayAnswer)
    assert answer == RelayAnswer(
        "refuse", "'policy/config.json' is not <folder>/<file>, or comes twice"
    )
    assert receiver.wait(KEY, timeout_s=0) is None


def test_a_newer_version_replaces_the_older_and_an_older_one_is_refused(
    source: StagedCopy, lanes: Lanes, tmp_path: Path
) -> None:
    receiver = lanes.add()
    message = greeting(source, receiver.address)
    for version in (7, 8, 9):
        assert send(source, replace(message, version=version)).lane == 0
    assert receiver.wait(WeightsKey(1, 9), timeout_s=5) is not None
    # The newest whole copy, and the one before it until the next begins.
    assert len(list((tmp_path / "lane-0").iterdir())) <= 2
    assert "came already" in send(source, message).left_out[0]


@pytest.mark.slow
def test_nobody_waits_while_an_older_version_is_removed(
    source: StagedCopy, lanes: Lanes, tmp_path: Path
) -> None:
    """As the removal of a large model's file takes seconds, so does that of many small ones. The
    process that notes a newer version has heartbeats to write meanwhile."""
    receiver, waits_s = lanes.add(), []
    for name in ("lane-0/1.5-9", "other"):
        (tmp_path / name).mkdir()
        for number in range(30_000):
            (tmp_path / name / str(number)).touch()
    started_s = time.monotonic()
    shutil.rmtree(tmp_path / "other")
    removal_s = time.monotonic() - started_s
    with ThreadPoolExecutor(max_workers=1) as pool:
        sending = pool.submit(send, source, greeting(source, receiver.address))
        while not sending.done():
            started_s = time.monotonic()
            receiver.pass_over(WeightsKey(1, 6))
            waits_s.append(time.monotonic() - started_s)
            time.sleep(0.002)
    assert sending.result().lane == 0
    assert_same(receiver.wait(KEY, timeout_s=20), source)
    assert not (tmp_path / "lane-0/1.5-9").exists()
    assert max(waits_s) < removal_s / 3
