"""One process group for all lanes, to peer processes that join and receive as engines do."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stand_in_lane import heartbeat

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.weights import OfferedBroadcast
from forgemq_telemetry import Telemetry
from forgemq_trainer.core.lanes import LiveLanes
from forgemq_trainer.core.shared_members import GroupMember
from forgemq_trainer.group_forming import GroupForming
from forgemq_trainer.previous_lives import TrainerLife
from forgemq_trainer.shared_path import SharedPath
from forgemq_trainer.transfer_deadline import TransferDeadline
from tests.integration.test_trainer_fast_path import start_peer, weights_file

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def shared() -> Iterator[SharedPath]:
    made = shared_path()
    yield made
    made.close()


def shared_path(*, form_deadline_s: float = 60.0) -> SharedPath:
    """The first deadline is also that of a bucket, after which a member that hangs is noticed.

    A peer on a busy machine takes many seconds to import torch, before it joins.
    """
    deadline = TransferDeadline(6, 2e8)
    return SharedPath(
        host="127.0.0.1", backend="gloo", deadline=deadline, form_deadline_s=form_deadline_s
    )


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts peers that do not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def _start(*args: object, **options: object) -> subprocess.Popen[str]:
        started.append(start_peer(*args, **options))  # type: ignore[arg-type]
        return started[-1]

    yield _start
    for each in started:
        each.kill()
        each.communicate()


def says_all(_lane: int, _group: str) -> bool:
    return True


def offer(shared: SharedPath, *members: GroupMember) -> OfferedBroadcast:
    return shared.offer_group(members, prefix="r-1", lineage=1)


def peers_of(
    start: Start,
    offered: OfferedBroadcast,
    *files: Path,
    lanes: Sequence[int],
    timeout_s: int = 60,
) -> list[subprocess.Popen[str]]:
    """One process for each lane, which has one rank."""
    places = [each for each in offered.members if each.lane in lanes]
    return [start(place, *files, rank=place.rank_first, timeout_s=timeout_s) for place in places]


def test_every_rank_of_every_lane_receives_each_version_through_one_group(
    tmp_path: Path, shared: SharedPath, start: Start
) -> None:
    files = [weights_file(tmp_path / f"{n}.safetensors", n) for n in (1, 2)]
    members = (GroupMember(0, 3, 1), GroupMember(2, 1, 2))
    offered = offer(shared, *members)
    first, second = offered.members
    assert (first.world_size, second.world_size) == (4, 4)
    assert (first.rank_first, second.rank_first) == (1, 2)
    assert first.group_name == second.group_name == offered.group_name
    places = ((first, 1), (second, 2), (second, 3))
    peers = [start(place, *files, rank=rank) for place, rank in places]
    assert shared.form(has_joined=says_all) == ()
    assert shared.members == members
    for file in files:
        offers = shared.offer({0: 3, 2: 1}, prefix="r-1")
        assert [each.is_new for each in offers] == [False, False]
        assert shared.send(offers, file) == {0: "", 2: ""}
    assert [each.communicate(timeout=30)[0].split() for each in peers] == [["equal", "equal"]] * 3
    assert shared.copied_bytes_peak < sum(file.stat().st_size for file in files)


def test_a_group_is_offered_only_while_all_its_members_live(
    tmp_path: Path, shared: SharedPath, start: Start
) -> None:
    file = weights_file(tmp_path / "w.safetensors", 1)
    offered = offer(shared, GroupMember(0, 1, 1), GroupMember(1, 1, 1))
    peers_of(start, offered, file, lanes=(0, 1))
    assert shared.form(has_joined=says_all) == ()
    assert shared.offer({0: 1}, prefix="r-1") == ()
    assert shared.offer({0: 1, 1: 2}, prefix="r-1") == ()
    assert len(shared.offer({0: 1, 1: 1, 2: 1}, prefix="r-1")) == 2


async def test_a_group_is_offered_to_nobody_once_an_engine_has_left_it(
    tmp_path: Path, shared: SharedPath, start: Start
) -> None:
    """Its lane lives under the same epoch and has the newest weights, from their durable copy:
    all others would wait for it in the broadcast, paused, until the deadline of a bucket."""
    file = weights_file(tmp_path / "w.safetensors", 1)
    offered = offer(shared, GroupMember(0, 1, 1), GroupMember(1, 1, 1))
    peers_of(start, offered, file, lanes=(0, 1))
    assert shared.form(has_joined=says_all) == ()
    lanes, log, weights = LiveLanes(), MemoryLog(run="r"), (1, 1)
    for lane in (0, 1):
        lanes.observe(heartbeat(lane=lane, version=1, process_group=offered.group_name), at_s=0.0)
    async with asyncio.TaskGroup() as tasks:
        forming = GroupForming(
            shared,
            lanes,
            life=TrainerLife(
                lineage=1, claim=await log.transaction_writer("t"), writer=await log.writer()
            ),
            prefix="r-1",
            tasks=tasks,
            telemetry=Telemetry(service="trainer", stream=StringIO()),
        )
        present = forming.in_group(weights, at_s=0.0)
        assert len(shared.offer({each.lane: each.epoch for each in present}, prefix="r-1")) == 2
        lanes.observe(heartbeat(lane=1, version=1), at_s=0.1)
        present = forming.in_group(weights, at_s=0.1)
        assert [each.lane for each in present] == [0]
        assert [each.lane for each in lanes.at(weights, at_s=0.1)] == [0, 1]
        assert shared.offer({each.lane: each.epoch for each in present}, prefix="r-1") == ()


def test_an_engine_that_does_not_join_is_named_and_the_others_are_let_go(
    tmp_path: Path, shared: SharedPath, start: Start
) -> None:
    file = weights_file(tmp_path / "w.safetensors", 1)
    offered = offer(shared, GroupMember(0, 1, 1), GroupMember(1, 1, 1), GroupMember(2, 1, 1))
    waiting = peers_of(start, offered, file, lanes=(0, 2))
    with ThreadPoolExecutor(max_workers=1) as pool:
        assert shared._forming is not None
        group = shared._forming.group
        forming = pool.submit(shared.form, has_joined=says_all)
        while group.joined_ranks() != {1, 3}:
            time.sleep(0.05)
        assert not forming.done()
        shared.keep_only({0: 1, 2: 1})
        assert forming.result(timeout=10) == (GroupMember(1, 1, 1),)
    del group
    assert shared.members == ()
    started_s = time.monotonic()
    assert all(each.wait(timeout=30) != 0 for each in waiting)
    # Long before their own time limit; a busy machine takes seconds to end them.
    assert time.monotonic() - started_s < 40


def test_a_group_that_lacks_members_is_given_up_at_the_deadline() -> None:
    shared = shared_path(form_deadline_s=0.5)
    offer(shared, GroupMember(0, 1, 1), GroupMember(1, 1, 1))
    started_s = time.monotonic()
    assert shared.form(has_joined=says_all) == (GroupMember(0, 1, 1), GroupMember(1, 1, 1))
    assert 0.5 <= time.monotonic() - started_s < 10


def test_a_lane_whose_process_does_not_say_that_it_joined_is_named(
    tmp_path: Path, shared: SharedPath, start: Start
) -> None:
    file = weights_file(tmp_path / "w.safetensors", 1)
    offered = offer(shared, GroupMember(0, 1, 1), GroupMember(1, 1, 1))
    peers_of(start, offered, file, lanes=(0, 1))

    def says_one(lane: int, group: str) -> bool:
        if lane == 1:
            shared.keep_only({0: 1})
        return (lane, group) == (0, offered.group_name)

    absent = shared.form(has_joined=says_one)
    assert absent == (GroupMember(1, 1, 1),)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_dies_or_hangs_costs_the_others_one_deadline_and_not_the_next_group(
    tmp_path: Path, shared: SharedPath, start: Start, fault: signal.Signals
) -> None:
    """Rank 1 passes on what rank 3 gets: with Gloo it is the worst one to lose.

    If it only hangs, nothing but its own time limit frees rank 3.
    """
    file = tmp_path / "w.safetensors"
    # More than the sockets between two ranks hold, or rank 0 would be done with it.
    save_file({"a.weight": torch.randn(8_000_000)}, file)
    lanes = {0: 1, 1: 1, 2: 1}
    offered = offer(shared, *(GroupMember(lane, 1, 1) for lane in lanes))
    lost, *others = peers_of(start, offered, file, file, lanes=(0, 1, 2), timeout_s=20)
    assert shared.form(has_joined=says_all) == ()
    assert shared.send(shared.offer(lanes, prefix="r-1"), file) == {0: "", 1: "", 2: ""}
    for each in (lost, *others):
        assert each.stdout is not None
        assert each.stdout.readline() == "equal\n"
    lost.send_signal(fault)
    started_s = time.monotonic()
    failures = shared.send(shared.offer(lanes, prefix="r-1"), file)
    assert time.monotonic() - started_s < 11  # And not 12, of two deadlines.
    assert set(failures) == {0, 1, 2}
    assert all("RuntimeError" in failure for failure in failures.values())
    # Rank 2 may have got all from rank 0. The group is dropped, so that rank 3 does not wait on.
    assert others[1].wait(timeout=30) != 0
    assert others[0].wait(timeout=30) is not None
    assert time.monotonic() - started_s < 30
    assert shared.members == ()
    again = offer(shared, GroupMember(1, 1, 1), GroupMember(2, 1, 1))
    assert again.group_name != offered.group_name
    peers = peers_of(start, again, file, lanes=(1, 2))
    assert shared.form(has_joined=says_all) == ()
    assert shared.send(shared.offer({1: 1, 2: 1}, prefix="r-1"), file) == {1: "", 2: ""}
    assert [each.communicate(timeout=30)[0] for each in peers] == ["equal\n", "equal\n"]


def test_closing_ends_the_forming_of_a_group(shared: SharedPath) -> None:
    offer(shared, GroupMember(0, 1, 1))
    with ThreadPoolExecutor(max_workers=1) as pool:
        forming = pool.submit(shared.form, has_joined=says_all)
        time.sleep(0.1)
        started_s = time.monotonic()
        shared.close()
        assert forming.result(timeout=10) == (GroupMember(0, 1, 1),)
    assert time.monotonic() - started_s < 5


def test_lanes_that_lapse_between_two_versions_and_return_are_in_the_group_still(
    tmp_path: Path, shared: SharedPath, start: Start
) -> None:
    file = weights_file(tmp_path / "w.safetensors", 1)
    offered = offer(shared, GroupMember(0, 1, 1))
    (lane,) = peers_of(start, offered, file, lanes=(0,))
    assert shared.form(has_joined=says_all) == ()
    shared.keep_only({})
    shared.give_up(0)
    assert shared.send(shared.offer({0: 1}, prefix="r-1"), file) == {0: ""}
    assert lane.communicate(timeout=30)[0] == "equal\n"


def test_lanes_that_all_have_the_weights_are_not_waited_for(
    tmp_path: Path, shared: SharedPath, start: Start
) -> None:
    """They loaded the durable copy, and nobody receives."""
    file = weights_file(tmp_path / "w.safetensors", 1)
    offered = offer(shared, GroupMember(0, 1, 1), GroupMember(1, 1, 1))
    places = offered.members
    for place in places:
        start(place, dies_after=-2, rank=place.rank_first)
    assert shared.form(has_joined=says_all) == ()
    with ThreadPoolExecutor(max_workers=1) as pool:
        sending = pool.submit(shared.send, shared.offer({0: 1, 1: 1}, prefix="r-1"), file)
        time.sleep(0.2)
        shared.give_up(0)
        time.sleep(0.2)
        assert not sending.done()
        shared.give_up(1)
        started_s = time.monotonic()
        failures = sending.result(timeout=10)
    assert time.monotonic() - started_s < 5
    assert set(failures.values()) == {"the lane has the weights already, or is gone"}
