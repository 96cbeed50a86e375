"""Follows what lanes report, for the publisher, and watches for a newer trainer."""

import asyncio
from collections.abc import Sequence

import msgspec

from forgemq_bus.decoding import decoded_record
from forgemq_bus.log import Log, Place
from forgemq_contracts.lane_plan import lanes_limit
from forgemq_contracts.topics import LOADED_WEIGHTS, PUBLISHED_WEIGHTS, REPORTED_ENGINES
from forgemq_contracts.weights import LoadedWeights, PublishedWeights, ReportedEngine
from forgemq_shell.dead_letters import DeadLetters
from forgemq_shell.service import Context
from forgemq_trainer.previous_lives import FencedTrainerError
from forgemq_trainer.publisher import Publisher

READ_TIMEOUT_S = 0.5
"""A read returns this late if nothing arrives; half a heartbeat, so a lapsed lane is noticed well
before its transfer's deadline."""

RECORDS_MAX = 256
"""Records of one read: several heartbeats of every lane of a large run, each under 1 KB."""


async def watch_lanes(
    context: Context, publisher: Publisher, *, lineage: int, known: asyncio.Event
) -> None:
    """Give the publisher every report of a lane, until cancelled.

    Args:
        context: Of the trainer.
        publisher: Of this life.
        lineage: Of this life.
        known: Set once the publisher has each lane's last heartbeat from before this call.

    Raises:
        FencedTrainerError: a newer trainer has published. The broker also refuses this trainer's
            next TrainedStep, but that may be a whole step away.
    """
    lanes = range(lanes_limit(context.configuration.log))
    places = [Place(PUBLISHED_WEIGHTS.name, 0)]
    places += [Place(topic.name, n) for topic in (REPORTED_ENGINES, LOADED_WEIGHTS) for n in lanes]
    starts = await _last_reports(context.log, places)
    ends = await context.log.end_positions(_reports(places))
    reader = await context.log.reader(starts)
    dead_letters = DeadLetters(
        context.log,
        await context.log.writer(),
        service="trainer",
        telemetry=context.telemetry,
    )
    clock = asyncio.get_running_loop()
    try:
        while True:
            context.loop_watch.beat("lanes")
            publisher.give_up_lapsed(at_s=clock.time())
            publisher.form_group(at_s=clock.time())
            for record in await reader.read(timeout_s=READ_TIMEOUT_S, records_max=RECORDS_MAX):
                try:
                    fact = decoded_record(record)
                except msgspec.ValidationError as error:
                    await dead_letters.write(record, f"does not decode: {error}")
                    continue
                if isinstance(fact, ReportedEngine):
                    publisher.observe_engine(fact, at_s=clock.time())
                elif isinstance(fact, LoadedWeights):
                    publisher.observe_loaded(fact)
                elif isinstance(fact, PublishedWeights) and fact.lineage > lineage:
                    raise FencedTrainerError(
                        f"a trainer of lineage {fact.lineage} has published; this one is {lineage}"
                    )
            if all(reader.position(place) >= end for place, end in ends.items()):
                known.set()
    finally:
        context.loop_watch.end("lanes")
        await reader.close()


async def _last_reports(log: Log, places: Sequence[Place]) -> dict[Place, int]:
    """Where to begin: at each lane's last heartbeat, and at the end of all else.

    A small model is loaded, and its first steps are trained, before the next heartbeats: the lanes
    that live would be offered none of these versions. One that does not live lapses as always.
    """
    positions = await log.end_positions(places)
    for place, first in (await log.first_positions(_reports(places))).items():
        positions[place] = max(first, positions[place] - 1)
    return positions


def _reports(places: Sequence[Place]) -> list[Place]:
    """Those of heartbeats."""
    return [place for place in places if place.topic == REPORTED_ENGINES.name]
