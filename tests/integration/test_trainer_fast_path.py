"""The fast path to peer processes that join and receive as an SGLang engine does."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forgemq_contracts.weights import Rendezvous
from forgemq_trainer.fast_path import FastPaths
from forgemq_trainer.transfer_deadline import TransferDeadline

PEER = Path(__file__).with_name("fast_path_peer.py")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture
def paths() -> Iterator[FastPaths]:
    # A peer on a busy machine takes many seconds to import torch.
    made = FastPaths(host="127.0.0.1", backend="gloo", deadline=TransferDeadline(60, 2e8))
    yield made
    made.close()


def weights_file(file: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "b.weight": torch.randn(300, 7, generator=generator),
        "a.weight": torch.randn(64, 64, generator=generator).bfloat16(),
        "c.bias": torch.randn(5, generator=generator),
    }
    save_file(tensors, file)
    return file


def start_peer(
    offer: Rendezvous, *files: Path, dies_after: int = -1, rank: int = 1, timeout_s: int = 60
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            str(PEER),
            offer.host,
            str(offer.port),
            offer.group_name,
            str(dies_after),
            *map(str, files),
        ],
        env={
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(offer.world_size),
            "TIMEOUT_S": str(timeout_s),
        },
        stdout=subprocess.PIPE,
        text=True,
    )


def test_every_process_of_an_engine_receives_the_weights(tmp_path: Path, paths: FastPaths) -> None:
    file = weights_file(tmp_path / "w.safetensors", 1)
    (offer,) = paths.offer({0: 3}, prefix="r-1", ranks={0: 2})
    peers = [start_peer(offer, file, rank=rank) for rank in (1, 2)]
    assert paths.send((offer,), file) == {0: ""}
    assert [peer.communicate(timeout=30)[0] for peer in peers] == ["equal\n", "equal\n"]


def test_the_number_of_lanes_adds_no_copy_of_the_weights(tmp_path: Path, paths: FastPaths) -> None:
    tensors = {name: torch.randn(1000, 1000) for name in "abc"}
    save_file(tensors, tmp_path / "w.safetensors")
    offers = paths.offer({0: 1, 1: 1, 2: 1}, prefix="r-1")
    peers = [start_peer(offer, tmp_path / "w.safetensors") for offer in offers]
    assert paths.send(offers, tmp_path / "w.safetensors") == {0: "", 1: "", 2: ""}
    assert [peer.communicate(timeout=30)[0] for peer in peers] == ["equal\n"] * 3
    assert paths.copied_bytes_peak == 0


def test_two_versions_arrive_through_one_group(tmp_path: Path, paths: FastPaths) -> None:
    files = [weights_file(tmp_path / f"{n}.safetensors", n) for n in (1, 2)]
    (first,) = paths.offer({0: 3}, prefix="r-1")
    assert first.is_new
    peer = start_peer(first, *files)
    assert paths.send((first,), files[0]) == {0: ""}
    (second,) = paths.offer({0: 3}, prefix="r-1")
    assert (second.group_name, second.is_new) == (first.group_name, False)
    assert paths.send((second,), files[1]) == {0: ""}
    output, _ = peer.communicate(timeout=30)
    assert output.split() == ["equal", "equal"]


def test_a_draft_heads_tensors_follow_the_policys_in_one_transfer(
    tmp_path: Path, paths: FastPaths
) -> None:
    policy, head, later = (weights_file(tmp_path / f"{n}.safetensors", n) for n in (1, 2, 3))
    (offer,) = paths.offer({0: 3}, prefix="r-1")
    peer = start_peer(offer, policy, head, later)
    assert paths.send((offer,), policy, head) == {0: ""}
    assert paths.send(paths.offer({0: 3}, prefix="r-1"), later) == {0: ""}
    assert peer.communicate(timeout=30)[0].split() == ["equal"] * 3


def test_a_dead_engine_fails_only_its_own_lane(tmp_path: Path, paths: FastPaths) -> None:
    files = [weights_file(tmp_path / f"{n}.safetensors", n) for n in (1, 2)]
    offers = paths.offer({0: 1, 1: 1}, prefix="r-1")
    lives, dies = start_peer(offers[0], *files), start_peer(offers[1], files[0], dies_after=1)
    assert paths.send(offers, files[0]) == {0: "", 1: ""}
    dies.communicate(timeout=30)
    failures = paths.send(paths.offer({0: 1, 1: 1}, prefix="r-1"), files[1])
    assert failures[0] == ""
    assert "RuntimeError" in failures[1]
    assert lives.communicate(timeout=30)[0].split() == ["equal", "equal"]
    again = paths.offer({0: 1, 1: 1}, prefix="r-1")
    assert [offer.is_new for offer in again] == [False, True]
    assert again[1].group_name != offers[1].group_name


def test_an_engine_that_never_joins_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    paths = FastPaths(host="127.0.0.1", backend="gloo", deadline=TransferDeadline(0.4, 2e8))
    offers = paths.offer({5: 1}, prefix="r-1")
    started_s = time.monotonic()
    failures = paths.send(offers, weights_file(tmp_path / "w.safetensors", 0))
    assert 0.4 <= time.monotonic() - started_s < 10
    assert failures == {5: "the engine did not join within 0.4 s"}


@pytest.fixture
def hanging() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for peer in started:
        peer.kill()
        peer.communicate()


def test_a_lane_that_lapses_during_a_transfer_is_given_up_at_once(
    tmp_path: Path, paths: FastPaths, hanging: list[subprocess.Popen[str]]
) -> None:
    file = weights_file(tmp_path / "w.safetensors", 1)
    offers = paths.offer({0: 1, 1: 1}, prefix="r-1")
    hanging.append(start_peer(offers[0], dies_after=-2))
    lives = start_peer(offers[1], file, file)
    with ThreadPoolExecutor(max_workers=1) as pool:
        sending = pool.submit(paths.send, offers, file)
        assert lives.stdout is not None
        assert lives.stdout.readline() == "equal\n"
        while not paths._links[0].group.is_formed:
            time.sleep(0.01)
        time.sleep(0.2)
        assert not sending.done()
        paths.keep_only({1: 1})
        started_s = time.monotonic()
        failures = sending.result(timeout=10)
    assert time.monotonic() - started_s < 5
    assert failures == {0: "the lane has the weights already, or is gone", 1: ""}
    assert paths.send(paths.offer({1: 1}, prefix="r-1"), file) == {1: ""}
    assert lives.communicate(timeout=30)[0] == "equal\n"


def test_one_deadline_holds_for_joining_and_all_buckets_together(
    tmp_path: Path, hanging: list[subprocess.Popen[str]]
) -> None:
    """The peer takes some seconds to start and join, and then hangs."""
    paths = FastPaths(host="127.0.0.1", backend="gloo", deadline=TransferDeadline(12, 2e8))
    offers = paths.offer({0: 1}, prefix="r-1")
    hanging.append(start_peer(offers[0], dies_after=-2))
    started_s = time.monotonic()
    failures = paths.send(offers, weights_file(tmp_path / "w.safetensors", 0))
    assert 11.9 < time.monotonic() - started_s < 20  # And not 24, of two deadlines.
    assert re.search(r"sent \d+ of \d+ bytes in 1\d\.\d s of 12\.0 s", failures[0])


def test_a_lane_that_has_the_weights_is_not_waited_for(tmp_path: Path, paths: FastPaths) -> None:
    offers = paths.offer({5: 1}, prefix="r-1")
    paths.give_up(5)
    started_s = time.monotonic()
    failures = paths.send(offers, weights_file(tmp_path / "w.safetensors", 0))
    assert time.monotonic() - started_s < 5
    assert failures == {5: "the lane has the weights already, or is gone"}


def test_a_new_epoch_of_a_lane_gets_a_new_group(paths: FastPaths) -> None:
    (first,) = paths.offer({0: 1}, prefix="r-1")
    (second,) = paths.offer({0: 2}, prefix="r-1")
    assert second.group_name != first.group_name
    assert second.epoch == 2
    assert paths.offer({}, prefix="r-1") == ()
