"""Puts a kill -9 of its own process at a named point on the way of version 2 to the engines.

Only once: the process that is started in its place finds the mark of the kill.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILLED_VERSION = 2
PART_BYTES = 1 << 16
"""So that the model of a test goes in many parts."""


def arm(point: str, *, mark: str) -> None:
    """Put the kill in its place; `mark` is the file that says that it happened."""

    def die() -> None:
        try:
            Path(mark).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    match point:
        case "while the trainer relays":
            _while_it_relays(die)
        case "before the durable copy":
            _after_the_early_record(die)
        case "before the checkpoint":
            _once_all_lanes_serve(die)
        case "while it receives":
            _while_it_receives(die)
        case "between publication and load":
            _between_publication_and_load(die)
        case _:
            raise ValueError(f"unknown point: {point}")


def _while_it_relays(die: Callable[[], None]) -> None:
    """After the first part that left, and before the version's record, which is written beside."""
    from forgemq_trainer.publisher import Publisher
    from forgemq_weight_relay import sending

    looks, write = sending._Sending._left_s, Publisher._write

    async def writing(self: Any, published: Any, **keywords: Any) -> None:
        if (published.lineage, published.version) == (1, KILLED_VERSION):
            await asyncio.Event().wait()
        await write(self, published, **keywords)

    def looking(self: Any) -> float:
        if self._greeting.version == KILLED_VERSION and self.sent_bytes >= PART_BYTES:
            die()
        return looks(self)

    sending.SENT_AT_ONCE = PART_BYTES
    sending._Sending._left_s = looking  # type: ignore[method-assign]
    Publisher._write = writing  # type: ignore[method-assign]


def _after_the_early_record(die: Callable[[], None]) -> None:
    """After the record that comes before the durable copy, and before the broadcast begins."""
    from forgemq_trainer.publisher import Publisher

    write = Publisher._write

    async def writing(self: Any, published: Any, **keywords: Any) -> None:
        await write(self, published, **keywords)
        if (published.version, published.is_durable) == (KILLED_VERSION, False):
            die()

    Publisher._write = writing  # type: ignore[method-assign]


def _once_all_lanes_serve(die: Callable[[], None]) -> None:
    """After the record of the durable copy, once every lane serves the version."""
    import held_versions

    from forgemq_trainer.publisher import Publisher

    write = Publisher._write

    async def writing(self: Any, published: Any, **keywords: Any) -> None:
        await write(self, published, **keywords)
        if (published.version, published.is_durable) == (KILLED_VERSION, True):
            if published.lineage == 1:
                await held_versions.until_all_serve_the_killed_version(self)
            die()

    Publisher._write = writing  # type: ignore[method-assign]


def _while_it_receives(die: Callable[[], None]) -> None:
    """After the first bytes that arrived, of which the next lane may have some."""
    from forgemq_weight_relay import receiving

    grow = receiving.StagedCopy.grow

    def growing(self: Any, count: int) -> None:
        grow(self, count)
        folder = next(iter(self.paths.values())).parents[1].name
        if folder.startswith(f"1.{KILLED_VERSION}-") and count < self.size_bytes:
            die()

    receiving.RECEIVED_AT_ONCE = PART_BYTES
    receiving.StagedCopy.grow = growing  # type: ignore[method-assign]


def _between_publication_and_load(die: Callable[[], None]) -> None:
    """The record is read and the copy is whole; the engine is not paused yet."""
    from forgemq_inference.relay import RelayedWeights

    folders = RelayedWeights.folders

    async def finding(self: Any, published: Any) -> Any:
        found = await folders(self, published)
        if published.version == KILLED_VERSION and found.policy is not None:
            die()
        return found

    RelayedWeights.folders = finding  # type: ignore[method-assign]
