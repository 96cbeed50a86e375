"""A trainer that kills itself with SIGKILL at a named point of saving version 2, or of a step.

While it saves, it waits at the point until the next step has its gradients, so that the kill meets
both at once. Each step takes four updates.
Arguments: broker, run, folder of the run, point.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.updates import Updates
from forgemq_trainer.loop import TrainingLoop
from forgemq_trainer.publisher import Publisher
from forgemq_trainer.step_updates import StepUpdates
from forgemq_trainer.store import Store
from forgemq_trainer.training import Training
from tests.unit.trainer.bench import Bench
from tests.unit.trainer.scene import configuration_of

WAIT_S = 60.0
KILLED_VERSION = 2
"""The first one is published after its record, the following ones before."""
COMPUTED = threading.Event()


def _die() -> None:
    assert COMPUTED.wait(WAIT_S), "the next step did not compute meanwhile"
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(original: Callable[..., Any], *, is_before: bool) -> Callable[..., Any]:
    def dying(self: Store, saved: Any, **keywords: Any) -> Any:
        if is_before and saved.version == KILLED_VERSION:
            _die()
        returned = original(self, saved, **keywords)
        if saved.version == KILLED_VERSION:
            _die()
        return returned

    return dying


def _dying_after(original: Callable[..., Any], *, calls: int) -> Callable[..., Any]:
    """Die after a coroutine's call number `calls`."""
    counted = iter(range(1, calls + 1))

    async def dying(*args: Any, **keywords: Any) -> Any:
        returned = await original(*args, **keywords)
        if next(counted) == calls:
            await asyncio.to_thread(_die)
        return returned

    return dying


def _dying_within(original: Callable[..., Any]) -> Callable[..., Any]:
    """Die before the third update of step 1, which is the seventh of the run."""
    counted = iter(range(1, 8))

    def dying(self: StepUpdates, minibatch: Any) -> Any:
        if next(counted) == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, minibatch)

    return dying


def killed_configuration(base: Path) -> RunConfiguration:
    """The run of a killed trainer, and of the one that continues it."""
    return msgspec.structs.replace(configuration_of(base), updates=Updates(minibatches=2, passes=2))


_Wrapper: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

POINTS: Mapping[str, tuple[type, str, _Wrapper]] = {
    "between two updates": (StepUpdates, "_compute", _dying_within),
    "before the weights are written": (Store, "write_version", partial(_dying, is_before=True)),
    "after the weights are written": (Store, "write_version", partial(_dying, is_before=False)),
    "after the early publication": (Publisher, "offer", partial(_dying_after, calls=1)),
    "after the durable copy": (Store, "keep_version", partial(_dying, is_before=False)),
    "after the publication": (Publisher, "publish", partial(_dying_after, calls=3)),
    "after the checkpoint": (Store, "save_checkpoint", partial(_dying, is_before=False)),
    # A run without a checkpoint commits nothing when it begins.
    "after the record": (TrainingLoop, "_commit", partial(_dying_after, calls=2)),
}


def arm(point: str) -> None:
    """Put the kill in its place."""
    compute = Training.compute_gradients

    def computing(self: Training, step: Any) -> None:
        compute(self, step)
        if self.version == KILLED_VERSION:
            COMPUTED.set()

    Training.compute_gradients = computing  # type: ignore[method-assign]
    owner, name, wrapper = POINTS[point]
    setattr(owner, name, wrapper(getattr(owner, name)))


async def _train(bootstrap: str, run: str, folder: Path) -> None:
    blobs = BlobStore(str(folder / "blobs"), run=run)
    log = KafkaLog(KafkaConnection(bootstrap=bootstrap), run=run, blobs=blobs)
    bench = Bench(
        log,
        lambda: log,
        killed_configuration(folder / "base"),
        folder / "trainer",
        environ={"FORGEMQ_TRAINER_FAST_PATH": "relay"},
    )
    await bench.train(until=2)


if __name__ == "__main__":
    arm(sys.argv[4])
    asyncio.run(_train(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
