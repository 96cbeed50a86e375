"""Two ranks write a checkpoint while they compute the gradients of the next step."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from forgemq_trainer.command_loop import carry_out_commands
from forgemq_trainer.ranks import part_saving
from forgemq_trainer.ranks.ranks import RankLostError, Ranks
from forgemq_trainer.storage.checkpoint import checkpoint_at
from forgemq_trainer.storage.optimizer_state import StatePart
from forgemq_trainer.training import Training
from tests.unit.trainer.rank_life import Life, compute, live, save_checkpoint, store_of, update
from tests.unit.trainer.rank_scene import START_DEADLINE_S, WORK_DEADLINE_S, RankPair
from tests.unit.trainer.scene import save_base

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

WAIT_S = 20.0


@contextmanager
def _writing(write: object) -> Iterator[None]:
    """Write parts by another function, in this process."""
    patch = pytest.MonkeyPatch()
    patch.setattr(part_saving, "write_state_part", write)
    yield
    patch.undo()


def _beside(ranks: Ranks, life: Life) -> None:
    """Train two steps; no rank writes its part of the first until it has the second's gradients."""
    computed, write = threading.Event(), part_saving.write_state_part
    original = Training.compute_gradients

    def waiting(file: Path, parts: Mapping[str, StatePart]) -> str:
        assert computed.wait(WAIT_S), "the next step waits for the checkpoint"
        return write(file, parts)

    def signalling(training: Training, step: object) -> None:
        original(training, step)  # type: ignore[arg-type]
        if training.version == 1:
            computed.set()

    with _writing(waiting), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "compute_gradients", signalling)
        if ranks.rank > 0:
            carry_out_commands(ranks, device="cpu")
            return
        configuration = life.configuration(world_size=2)
        store = store_of(life.folder, configuration)
        training = Training(configuration, device="cpu", checkpoint=None, ranks=ranks)
        compute(training, life, 0)
        metrics = update(training, life, 0)
        training.saving.gather_weights()
        training.saving.begin_optimizer()
        with ThreadPoolExecutor(1) as pool:
            saved = pool.submit(save_checkpoint, store, training, metrics)
            compute(training, life, 1)
            saved.result(WAIT_S)
        save_checkpoint(store, training, update(training, life, 1))
        training.end()


def test_a_checkpoint_beside_the_next_step_has_the_bytes_of_one_before_it(
    tmp_path: Path, rank_pair: RankPair
) -> None:
    before, beside = (Life(tmp_path / name, (0, 1), "bfloat16") for name in ("before", "beside"))
    for life in (before, beside):
        save_base(life.folder / "base")
    rank_pair.run(live, before)
    rank_pair.run(_beside, beside)
    for step in range(2):
        hashes = [
            checkpoint_at(
                life.folder / f"trainer/checkpoints/step-{step:08d}", is_hashed=True
            ).record.sha256_of_file()
            for life in (before, beside)
        ]
        assert hashes[0] == hashes[1]


def _full_disk(ranks: Ranks, life: Life) -> str:
    """Save a checkpoint while rank 1's disk is full; returns each rank's error."""

    def refused(file: Path, parts: Mapping[str, StatePart]) -> str:
        raise OSError(28, "No space left on device")

    if ranks.rank > 0:
        with _writing(refused), pytest.raises(OSError, match="No space left") as caught:
            carry_out_commands(ranks, device="cpu")
        return str(caught.value)
    configuration = life.configuration(world_size=2)
    training = Training(configuration, device="cpu", checkpoint=None, ranks=ranks)
    compute(training, life, 0)
    metrics = update(training, life, 0)
    store = store_of(life.folder, configuration)
    with pytest.raises(OSError, match="No space left") as caught:
        save_checkpoint(store, training, metrics)
    training.end()
    return str(caught.value)


def test_a_rank_that_cannot_write_its_part_is_named_and_there_is_no_checkpoint(
    tmp_path: Path, rank_pair: RankPair
) -> None:
    life = Life(tmp_path, (0,))
    save_base(life.folder / "base")
    first, second = rank_pair.run(_full_disk, life)
    assert first.startswith("rank 1 could not write optimizer/part-00001.safetensors: OSError")
    assert second.startswith("optimizer/part-00001.safetensors: OSError")
    assert store_of(tmp_path, life.configuration(world_size=2)).newest_checkpoint() is None


DEADLINE_S = 3.0
STOPPED_S = 3 * DEADLINE_S


def _saved_beside_a_stopped_rank(ranks: Ranks, life: Life) -> tuple[str, float]:
    """Save a checkpoint while rank 1 is stopped in the middle of its part."""

    def stopped(file: Path, parts: Mapping[str, StatePart]) -> str:
        subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        return write(file, parts)

    write = part_saving.write_state_part
    if ranks.rank > 0:
        with _writing(stopped), pytest.raises(RankLostError):
            carry_out_commands(ranks, device="cpu")
        return "", 0.0
    configuration = life.configuration(world_size=2)
    training = Training(configuration, device="cpu", checkpoint=None, ranks=ranks)
    compute(training, life, 0)
    metrics = update(training, life, 0)
    store, began_s = store_of(life.folder, configuration), time.monotonic()
    with pytest.raises(RankLostError) as caught:
        save_checkpoint(store, training, metrics)
    took_s = time.monotonic() - began_s
    training.end()
    return str(caught.value), took_s


def test_a_rank_that_hangs_while_it_writes_ends_the_others(tmp_path: Path) -> None:
    """A step's end waits for its checkpoint, and its other waits end, so nothing else would."""
    life = Life(tmp_path, (0,))
    save_base(life.folder / "base")
    pair = RankPair(deadline_s=DEADLINE_S)
    try:
        (reason, took_s), _ = pair.run(_saved_beside_a_stopped_rank, life)
    finally:
        pair.close()
    assert reason.startswith(
        "rank 0 lost another of 2 ranks, which died or did not come within 3 s"
    )
    assert took_s < STOPPED_S
    assert store_of(tmp_path, life.configuration(world_size=2)).newest_checkpoint() is None


def _slow_disk(ranks: Ranks, life: Life) -> None:
    """Save a checkpoint on a disk that takes longer than ranks wait for each other in a step."""
    write = part_saving.write_state_part

    def slow(file: Path, parts: Mapping[str, StatePart]) -> str:
        time.sleep(1.5 * DEADLINE_S * ranks.rank)
        return write(file, parts)

    with _writing(slow):
        live(ranks, life)


def test_a_rank_that_writes_longer_than_a_deadline_is_waited_for(tmp_path: Path) -> None:
    life = Life(tmp_path, (0,))
    save_base(life.folder / "base")
    pair = RankPair(deadline_s=DEADLINE_S)
    try:
        pair.run(_slow_disk, life)
    finally:
        pair.close()
    found = store_of(tmp_path, life.configuration(world_size=2)).newest_checkpoint()
    assert found is not None
    assert found.step == 0
