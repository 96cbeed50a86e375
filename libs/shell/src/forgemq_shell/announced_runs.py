"""Every run that was ever announced on a broker, and how each stands."""

import msgspec

from forgemq_bus.errors import UnknownPlaceError
from forgemq_bus.kept_records import messages_of, read_all
from forgemq_bus.log import Log, Place
from forgemq_contracts.run import EndedRun, StartedRun
from forgemq_contracts.run_ends import is_end_of
from forgemq_contracts.topics import SHARED


class AnnouncedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run by its newest start; `ended` is None while that is up, or if it was killed."""

    started: StartedRun
    ended: EndedRun | None = None


async def announced_runs(log: Log) -> tuple[AnnouncedRun, ...]:
    """The runs of a broker, the newest start first; () on a broker that never had one.

    A run that was deleted is among them: its start stays on the topic that all runs share. Records
    that do not decode are left out.
    """
    starts: dict[str, StartedRun] = {}
    ends: dict[str, EndedRun] = {}
    try:
        async for records in read_all(log, [Place(topic.name, 0) for topic in SHARED]):
            for message in messages_of(records):
                match message.record:
                    case StartedRun() as started:
                        starts[started.run] = started
                    case EndedRun() as ended:
                        ends[ended.run] = ended
                    case _:
                        pass
    except UnknownPlaceError:
        return ()
    found = [
        AnnouncedRun(started=started, ended=end if end and is_end_of(end, started) else None)
        for started, end in ((started, ends.get(run)) for run, started in starts.items())
    ]
    return tuple(sorted(found, key=lambda each: -each.started.started_ms))
