"""Follows a journal: the same inputs in the same order must give the same bytes."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from forgemq.bus.log import Emit, Log, Place
from forgemq.contracts.journal import JournalledBatch
from forgemq.contracts.messages import Core
from forgemq.shell.batch import BadRecordHook, Batch, digest
from forgemq.shell.history import HistoryError, InputHistory, journal


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedBatch:
    """One batch of the journal, run again.

    Attributes:
        batch: As journalled.
        emits: What the core writes now; already on the log, never written again.
        digest: Of `emits`.
        snapshot: State after the batch, where the journal holds one to compare with.
    """

    batch: JournalledBatch
    emits: tuple[Emit, ...]
    digest: str
    snapshot: bytes | None

    @property
    def is_same(self) -> bool:
        """Whether the bytes are those that were written then, and the state is the same."""
        return (self.digest, self.snapshot) == (self.batch.outputs_digest, self.batch.snapshot)


def begin(core: Core, batches: Sequence[JournalledBatch]) -> Sequence[JournalledBatch]:
    """Put a fresh core where these batches start; returns those that are left to run on it.

    Raises:
        HistoryError: there is neither the first batch nor a snapshot to begin with.
    """
    if not batches:
        return batches
    if batches[0].snapshot is not None:
        core.restore(batches[0].snapshot)
        return batches[1:]
    if batches[0].sequence != 0:
        raise HistoryError(
            f"the journal starts with batch {batches[0].sequence} and has no snapshot to begin with"
        )
    return batches


async def replay(
    core: Core,
    batches: Sequence[JournalledBatch],
    *,
    inputs: InputHistory,
    on_bad_record: BadRecordHook | None = None,
) -> AsyncIterator[ReplayedBatch]:
    """Run batches again on a core; it holds the state after the last one at the end.

    Args:
        core: As `begin` left it.
        batches: Those that `begin` returned.
        inputs: Opened for them.
        on_bad_record: As in the run.
    """
    for batch in batches:
        again = Batch(core, on_bad_record=on_bad_record)
        for item in batch.inputs:
            if not item.topic:
                again.tick(item.tick_ms)
                continue
            for record in await inputs.records(item):
                again.record(record)
        yield ReplayedBatch(
            batch=batch,
            emits=tuple(again.emits),
            digest=digest(again.emits),
            snapshot=core.snapshot() if batch.snapshot is not None else None,
        )


async def replay_task(
    log: Log, place: Place, core: Core, *, on_bad_record: BadRecordHook | None = None
) -> AsyncIterator[ReplayedBatch]:
    """Run everything that is kept of one task's journal again; writes nothing.

    Args:
        log: The run's log.
        place: One partition of a journal topic.
        core: Fresh, made as the service makes it for this partition.
        on_bad_record: As in the run.
    """
    start = (await log.first_positions([place]))[place]
    end = (await log.end_positions([place]))[place]
    batches = begin(core, await journal(log, place, start=start, end=end))
    inputs = InputHistory(log)
    try:
        await inputs.open(batches)
        async for replayed in replay(core, batches, inputs=inputs, on_bad_record=on_bad_record):
            yield replayed
    finally:
        await inputs.close()
