"""Holds versions back in the trainer until the lanes are where a kill is to meet them.

On a busy machine a lane may be so late that the next version overtakes the one that it waits for,
or that the run ends before it is there. Every guarantee allows that, but then the kill would meet
another state than its test names, or nothing would follow it. These wait as long as it takes:

- version 1 and version 2, in each life, until every lane lives and serves the version before;
- the first version of the next life, until the lanes have given up a broadcast that never comes;
- behind a killed inference process version 3, until the other lanes serve version 2, and version 4,
  until its successor serves;
- the last version, until every lane serves the version before.
"""

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from forgemq_bus.decoding import decoded_record
from forgemq_bus.log import Place
from forgemq_contracts.topics import LOADED_WEIGHTS
from forgemq_contracts.weights import LoadedWeights
from forgemq_trainer.publisher import Publisher

LOOK_EVERY_S = 0.05
RECORDS_MAX = 100


def arm(service: str, point: str, *, mark: str) -> None:
    """Hold the versions of this trainer back.

    Args:
        service: Which one is killed.
        point: Its kill point.
        mark: The file that says that the kill happened.
    """
    offer, publish = Publisher.offer, Publisher.publish

    async def offering(self: Any, written: Any, **keywords: Any) -> None:
        if written.version in (2, self._context.configuration.trainer.steps):
            await _until_all_serve(self, version=written.version - 1)
        elif service == "inference":
            await _hold_behind_a_killed_lane(self, written.version, mark=Path(mark))
        await offer(self, written, **keywords)

    async def publishing(self: Any, saved: Any, **keywords: Any) -> None:
        lineage = self._life.lineage
        if (lineage, saved.version) == (1, 1):
            await _until_all_serve(self, version=0)
        elif lineage == 2 and self._durable is None and point == "before the durable copy":
            await until_loaded(self, _is(1, 1, path="durable"), lanes=_lanes(self))
        await publish(self, saved, **keywords)

    Publisher.offer = offering  # type: ignore[method-assign]
    Publisher.publish = publishing  # type: ignore[method-assign]


async def until_loaded(
    publisher: Any, is_wanted: Callable[[LoadedWeights], bool], *, lanes: Collection[int]
) -> None:
    """Wait until each of these lanes has once loaded what is wanted, or the trainer is to stop."""
    log, missing = publisher._context.log, set(lanes)
    if not missing:
        return
    places = [Place(LOADED_WEIGHTS.name, lane) for lane in missing]
    reader = await log.reader(await log.first_positions(places))
    while missing and not publisher._context.stop.is_set():
        for record in await reader.read(timeout_s=LOOK_EVERY_S, records_max=RECORDS_MAX):
            loaded = decoded_record(record)
            if is_wanted(loaded):
                missing.discard(loaded.lane)
    await reader.close()


async def until_all_serve_the_killed_version(publisher: Any) -> None:
    """Wait until every lane has loaded version 2 of the first life."""
    await until_loaded(publisher, _is(1, 2), lanes=_lanes(publisher))


async def _until_all_serve(publisher: Any, *, version: int) -> None:
    """Wait until every lane has loaded this life's version, and the publisher knows it to live."""
    lanes = _lanes(publisher)
    await until_loaded(publisher, _is(publisher._life.lineage, version), lanes=lanes)
    await _until_all_live(publisher)


async def _hold_behind_a_killed_lane(publisher: Any, version: int, *, mark: Path) -> None:
    """Hold a version that follows the kill of lane 0."""
    if version == 3:
        await _until(mark.exists)
        await until_loaded(publisher, _is(1, 2), lanes=_lanes(publisher)[1:])
    elif version == 4:
        # What the killed process has loaded is older.
        await until_loaded(publisher, lambda loaded: loaded.version >= 2, lanes=_lanes(publisher))
        await _until_all_live(publisher)


async def _until_all_live(publisher: Any) -> None:
    """Wait until the publisher knows of every lane that it lives."""
    # A transfer that goes on would let time pass between this look and the next version's route.
    await publisher._finish_transfer()
    clock, lanes = asyncio.get_running_loop(), _lanes(publisher)
    await _until(lambda: len(publisher._lanes.live(at_s=clock.time())) == len(lanes))


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - a file, and what the publisher knows at a time
        await asyncio.sleep(LOOK_EVERY_S)


def _lanes(publisher: Any) -> range:
    return range(publisher._context.configuration.log.lanes)


def _is(lineage: int, version: int, *, path: str = "") -> Callable[[LoadedWeights], bool]:
    """Whether a lane loaded this version, by this path if one is named."""

    def is_wanted(loaded: LoadedWeights) -> bool:
        is_version = (loaded.lineage, loaded.version) == (lineage, version)
        return is_version and path in ("", loaded.path)

    return is_wanted
