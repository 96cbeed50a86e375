"""A step is saved and published while the next one computes its gradients."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forgemq_trainer.storage.checkpoint import OPTIMIZER_FILE
from forgemq_trainer.storage.durable import DurableWeights
from forgemq_trainer.store import Store
from forgemq_trainer.training import Training
from tests.unit.trainer.bench import Bench, memory_bench
from tests.unit.trainer.scene import agent_samples, merge, scheduled_step

WAIT_S = 20.0


async def _bench(folder: Path, **environ: str) -> Bench:
    bench = await memory_bench(folder, steps=2)
    bench = Bench(bench.log, bench.open_log, bench.configuration, bench.folder, environ=environ)
    generator = np.random.default_rng(0)
    trees = [merge(agent_samples(generator), f"g-{number}") for number in range(4)]
    await bench.put_trees(trees)
    steps = [scheduled_step(0, trees[:2]), scheduled_step(1, trees[2:], is_last=True)]
    await bench.put_steps(steps)
    return bench


def _noted(monkeypatch: pytest.MonkeyPatch, notes: list[str], owner: type, name: str) -> None:
    """Note when calls of a method end, with the version that the model has then."""
    original: Callable[..., Any] = getattr(owner, name)

    def noting(self: Any, *args: Any, **keywords: Any) -> Any:
        returned = original(self, *args, **keywords)
        training = self if isinstance(self, Training) else args[0]
        notes.append(f"{name} {training.version}")
        return returned

    monkeypatch.setattr(owner, name, noting)


@pytest.mark.slow
async def test_the_next_step_computes_while_the_one_before_is_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The durable copy of version 1 waits until step 1 has its gradients, and then is slow."""
    computed = threading.Event()
    notes: list[str] = []
    _noted(monkeypatch, notes, Training, "update")
    _noted(monkeypatch, notes, Store, "save_checkpoint")
    compute, keep = Training.compute_gradients, DurableWeights.keep

    def signalling(self: Training, step: Any) -> None:
        compute(self, step)
        if self.version == 1:
            computed.set()

    def waiting(self: DurableWeights, weights: Any) -> Any:
        if weights.folder.name == "1.1":
            assert computed.wait(WAIT_S), "step 1 waits for version 1 to be durable"
            time.sleep(0.5)
        return keep(self, weights)

    monkeypatch.setattr(Training, "compute_gradients", signalling)
    monkeypatch.setattr(DurableWeights, "keep", waiting)
    bench = await _bench(tmp_path)
    await bench.train(until=1)
    assert [step.step for step in await bench.trained()] == [0, 1]
    assert [each.version for each in await bench.published()] == [0, 1, 2]
    assert notes == ["update 1", "save_checkpoint 1", "update 2", "save_checkpoint 2"]


@pytest.mark.parametrize("beside", ["true", "false"])
async def test_the_weights_change_only_after_the_version_before_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    notes: list[str] = []
    _noted(monkeypatch, notes, Training, "update")
    _noted(monkeypatch, notes, Training, "compute_gradients")
    _noted(monkeypatch, notes, Store, "write_version")
    _noted(monkeypatch, notes, Store, "save_checkpoint")
    bench = await _bench(tmp_path, FORGEMQ_TRAINER_SAVES_BESIDE_STEP=beside)
    await bench.train(until=1)
    without = [note for note in notes if note != "compute_gradients 1"]
    assert without == [
        "compute_gradients 0",
        *("update 1", "write_version 1", "save_checkpoint 1"),
        *("update 2", "write_version 2", "save_checkpoint 2"),
    ]
    if beside == "false":
        assert notes.index("save_checkpoint 1") < notes.index("compute_gradients 1")


async def test_the_bytes_are_those_of_saving_before_the_next_step(tmp_path: Path) -> None:
    """Weights and checkpoints alike."""
    found = []
    for beside in ("true", "false"):
        (tmp_path / beside).mkdir()
        bench = await _bench(tmp_path / beside, FORGEMQ_TRAINER_SAVES_BESIDE_STEP=beside)
        await bench.train(until=1)
        checkpoints = bench.folder / "checkpoints"
        states = [
            (checkpoints / f"step-0000000{step}" / OPTIMIZER_FILE).read_bytes() for step in range(2)
        ]
        found.append(([each.sha256 for each in await bench.published()], states))
    assert found[0] == found[1]


async def test_a_failure_of_saving_ends_the_trainer_although_no_step_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Store, *args: Any, **keywords: Any) -> None:
        raise OSError(28, "no space left on the device")

    monkeypatch.setattr(Store, "save_checkpoint", fails)
    bench = await _bench(tmp_path)
    with pytest.raises(ExceptionGroup) as caught:
        await bench.train(until=1)
    assert caught.group_contains(OSError, match="no space left")
    assert await bench.trained() == []
