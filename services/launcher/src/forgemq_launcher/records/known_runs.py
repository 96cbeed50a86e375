"""The runs that a broker has: for lists of them, and for an id that it does not know."""

from forgemq_bus.errors import LogError
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.kafka_runs import runs_on_broker
from forgemq_bus.kept_records import messages_of, read_from
from forgemq_bus.log import Place
from forgemq_contracts.steps import TrainedStep
from forgemq_contracts.topics import TRAINED_STEPS
from forgemq_shell.announced_runs import AnnouncedRun, announced_runs

NAMED_MAX = 8
"""Some lines of a terminal; the run that is meant is mostly a new one."""
_LAST = 16
"""Offsets of the newest steps: each transaction has one more for its end."""


async def runs_there(connection: KafkaConnection) -> list[AnnouncedRun]:
    """The runs that were announced and have topics, the newest start first."""
    present = await runs_on_broker(connection)
    log = KafkaLog(connection, run="")
    try:
        return [each for each in await announced_runs(log) if each.started.run in present]
    finally:
        await log.close()


async def steps_there(connection: KafkaConnection, run: str) -> int | None:
    """How many steps the newest weights of a run have; None if that cannot be read."""
    place = Place(TRAINED_STEPS.name, 0)
    log = KafkaLog(connection, run=run)
    try:
        first, end = await log.first_positions([place]), await log.end_positions([place])
        start = {place: max(first[place], end[place] - _LAST)}
        batches = [records async for records in read_from(log, start, ends=end)]
    except LogError:
        return None
    finally:
        await log.close()
    trained = [message.record for records in batches for message in messages_of(records)]
    steps = [record.step + 1 for record in trained if isinstance(record, TrainedStep)]
    if steps:
        return steps[-1]
    return None if end[place] else 0


async def absence_of(connection: KafkaConnection, run: str) -> str:
    """Why nothing of this run can be read, and which runs are there; '' if it has topics."""
    if run in await runs_on_broker(connection):
        return ""
    said = f"run {run} has no topics on {connection.bootstrap}: it was deleted, or was never there"
    there = [each.started.run for each in await runs_there(connection)]
    if not there:
        return f"{said}; the broker has no run"
    more = f" and {len(there) - NAMED_MAX} older ones" if len(there) > NAMED_MAX else ""
    return f"{said}; the broker has {', '.join(there[:NAMED_MAX])}{more}"
