"""Follows a journal: the same inputs in the same order must give the same bytes."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import structs

from forgemq_bus.log import Emit, Log, Place
from forgemq_contracts.journal import JournalledBatch
from forgemq_contracts.messages import Core
from forgemq_shell.batch import Batch, digest
from forgemq_shell.history import (
    HistoryError,
    InputHistory,
    check_kept,
    input_starts,
    journalled,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedBatch:
    """One batch of the journal, run again.

    Attributes:
        batch: As journalled.
        records: Number of input records.
        emits: What the core writes now; already on the log, never written again.
        digest: Of `emits`.
        snapshot: State after the batch, where the journal holds one to compare with.
    """

    batch: JournalledBatch
    records: int
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
        raise _without_beginning(batches)
    return batches


async def replay(
    core: Core,
    batches: Sequence[JournalledBatch],
    *,
    inputs: InputHistory,
    service: str,
) -> AsyncIterator[ReplayedBatch]:
    """Run batches again on a core; it holds the state after the last one at the end.

    Args:
        core: As `begin` left it.
        batches: Those that `begin` returned.
        inputs: Opened for them.
        service: Whose journal it is.
    """
    for batch in batches:
        yield await _again(core, batch, inputs=inputs, service=service)


async def _again(
    core: Core,
    batch: JournalledBatch,
    *,
    inputs: InputHistory,
    service: str,
) -> ReplayedBatch:
    again = Batch(core, service=service)
    for item in batch.inputs:
        if not item.topic:
            again.tick(item.tick_ms)
            continue
        for record in await inputs.records(item):
            again.record(record)
    return ReplayedBatch(
        batch=batch,
        records=again.records,
        emits=tuple(again.emits),
        digest=digest(again.emits),
        snapshot=core.snapshot() if batch.snapshot is not None else None,
    )


async def replay_task(
    log: Log, place: Place, core: Core, *, service: str
) -> AsyncGenerator[ReplayedBatch, None]:
    """Run everything that is kept of one task's journal again; writes nothing.

    It begins with the first batch, or else behind the oldest snapshot after which every input is
    kept. One snapshot is held at a time.

    Args:
        log: The run's log.
        place: One partition of a journal topic.
        core: Fresh, made as the service makes it for this partition.
        service: Whose journal it is.

    Raises:
        HistoryError: a batch is missing, or inputs are and no snapshot is behind them.
    """
    start = (await log.first_positions([place]))[place]
    end = (await log.end_positions([place]))[place]
    outline = [
        (offset, _without_state(batch))
        async for offset, batch in journalled(log, place, start=start, end=end)
    ]
    if not outline:
        return
    batches = [batch for _, batch in outline]
    begins = await _oldest_beginning(log, batches)
    inputs = InputHistory(log)
    try:
        await inputs.open(batches[begins.batches_done :])
        offset = outline[begins.index][0]
        async with aclosing(journalled(log, place, start=offset, end=end)) as kept:
            async for at, batch in kept:
                if at == offset and begins.is_restored:
                    assert batch.snapshot is not None
                    core.restore(batch.snapshot)
                    continue
                yield await _again(core, batch, inputs=inputs, service=service)
    finally:
        await inputs.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beginning:
    """A batch to begin with: run it on a fresh core, or restore the state behind it."""

    index: int
    is_restored: bool

    @property
    def batches_done(self) -> int:
        return self.index + self.is_restored


async def _oldest_beginning(log: Log, batches: Sequence[JournalledBatch]) -> _Beginning:
    candidates = [_Beginning(index=0, is_restored=False)] if batches[0].sequence == 0 else []
    candidates += [
        _Beginning(index=index, is_restored=True)
        for index, batch in enumerate(batches)
        if batch.snapshot is not None
    ]
    if not candidates:
        raise _without_beginning(batches)
    kept = await log.first_positions(list(input_starts(batches)))
    refused: HistoryError | None = None
    for candidate in candidates:
        left = batches[candidate.batches_done :]
        try:
            check_kept(input_starts(left), kept)
        except HistoryError as error:
            refused = error
            continue
        if left or refused is None:
            return candidate
    assert refused is not None
    raise refused


def _without_beginning(batches: Sequence[JournalledBatch]) -> HistoryError:
    return HistoryError(
        f"the journal starts with batch {batches[0].sequence} and has no snapshot to begin with"
    )


def _without_state(batch: JournalledBatch) -> JournalledBatch:
    """The batch with its snapshot only marked: snapshots of a whole run may not fit in memory."""
    return batch if batch.snapshot is None else structs.replace(batch, snapshot=b"")
