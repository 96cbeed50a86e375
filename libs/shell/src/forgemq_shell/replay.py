"""Runs a journal again: the same inputs in the same order must give the same bytes."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from msgspec import structs

from forgemq_bus.log import Emit, LogReads, Place, Record
from forgemq_contracts.journal import JournalledBatch, JournalLoss, writer_logic
from forgemq_contracts.messages import Core
from forgemq_shell.batch import Batch, digest
from forgemq_shell.interruption import Turns
from forgemq_shell.journal import (
    JournalError,
    JournalledInputs,
    OtherLogicError,
    check_kept,
    input_starts,
    read_batches,
)
from forgemq_shell.recall import recall, recalled_starts

_LOST = "the value was lost"
"""In a replay only: the reason of a dead letter is in its headers, which no digest covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedBatch:
    """One batch of the journal, run again.

    Attributes:
        batch: As journalled.
        records: Number of input records.
        emits: What the core writes in the replay; never written to the log.
        digest: Of `emits`.
        snapshot: State after the batch; None if the journal has no snapshot there.
        logic_left_out: The logic version of earlier batches, which this build does not run; 0 if
            it wrote all of them.
        lost: Inputs whose values are lost and were not when the batch was journalled. The core did
            not get them, so what it writes from here on may differ from the journal.
    """

    batch: JournalledBatch
    records: int
    emits: tuple[Emit, ...]
    digest: str
    snapshot: bytes | None
    lost: tuple[Record, ...] = ()
    logic_left_out: int = 0

    @property
    def is_same(self) -> bool:
        """Whether outputs and state have the bytes that the journal says."""
        return (self.digest, self.snapshot) == (self.batch.outputs_digest, self.batch.snapshot)


def begin(core: Core, batches: Sequence[JournalledBatch]) -> Sequence[JournalledBatch]:
    """Restore a fresh core to where these batches start; returns the batches left to run.

    Raises:
        JournalError: neither the first batch nor a snapshot is there to begin with.
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
    inputs: JournalledInputs,
    service: str,
) -> AsyncIterator[ReplayedBatch]:
    """Run batches again on a core, which then has the state after the last one.

    Args:
        core: As `begin` left it.
        batches: As `begin` returned them.
        inputs: Opened for these batches.
        service: Owner of the journal.
    """
    for batch in batches:
        yield await _replay_batch(core, batch, inputs=inputs, service=service)


async def _replay_batch(
    core: Core,
    batch: JournalledBatch,
    *,
    inputs: JournalledInputs,
    service: str,
) -> ReplayedBatch:
    replayed, turns = Batch(core, service=service), Turns()
    known = {(loss.topic, loss.partition, loss.offset) for loss in batch.lost}
    lost: list[Record] = []
    for loss in batch.lost:
        if loss.is_late:
            replayed.lose(_lost_record(loss))
    for item in batch.inputs:
        if not item.topic:
            replayed.tick(item.tick_ms)
            continue
        for record in await inputs.read(item):
            is_known = (*record.place, record.offset) in known
            if record.lost and not is_known:
                lost.append(record)
            # A known loss stays one if the value is there again: the core did not get it then.
            replayed.record(structs.replace(record, value=b"", lost=_LOST) if is_known else record)
            await turns.give()
    return ReplayedBatch(
        batch=batch,
        records=replayed.records,
        emits=tuple(replayed.emits),
        digest=digest(replayed.emits),
        snapshot=core.snapshot() if batch.snapshot is not None else None,
        lost=tuple(lost),
    )


def _lost_record(loss: JournalLoss) -> Record:
    return Record(
        topic=loss.topic,
        partition=loss.partition,
        offset=loss.offset,
        timestamp_ms=0,
        key=loss.key,
        value=b"",
        lost=_LOST,
    )


async def replay_task(
    log: LogReads, place: Place, core: Core, *, service: str, logic_version: int
) -> AsyncGenerator[ReplayedBatch, None]:
    """Run everything that is kept of one task's journal again; writes nothing.

    Begins with the first batch, or with the oldest snapshot after which every input is kept. One
    snapshot is held in memory at a time.

    Args:
        log: Of the run, or of a recording.
        place: One partition of a journal topic.
        core: Fresh, made as the service makes it for this partition.
        service: Owner of the journal.
        logic_version: Of the core. Batches of an older one are left out: a build that takes a
            journal over begins with a snapshot of its own.

    Raises:
        JournalError: a batch is missing, or inputs are missing and no snapshot follows them, or
            none is of this logic version.
    """
    start = (await log.first_positions([place]))[place]
    end = (await log.end_positions([place]))[place]
    outline = [
        (offset, _without_state(batch))
        async for offset, batch in read_batches(log, place, start=start, end=end)
    ]
    if not outline:
        return
    _check_logic(outline[-1][1], service=service, logic_version=logic_version)
    left_out = _left_out(outline, logic_version=logic_version)
    before = writer_logic(outline[left_out - 1][1]) if left_out else 0
    outline = outline[left_out:]
    batches = [batch for _, batch in outline]
    begins = await _oldest_beginning(log, batches)
    inputs = JournalledInputs(log)
    try:
        await inputs.open(batches[begins.batches_done :])
        offset = outline[begins.index][0]
        async with aclosing(read_batches(log, place, start=offset, end=end)) as kept:
            async for at, batch in kept:
                if at == offset and begins.is_restored:
                    assert batch.snapshot is not None
                    core.restore(batch.snapshot)
                    for record in await recall(core, log):
                        raise JournalError(f"{record.where}: {record.lost}")
                    continue
                done = await _replay_batch(core, batch, inputs=inputs, service=service)
                yield replace(done, logic_left_out=before)
    finally:
        await inputs.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beginning:
    """A batch to begin with: run it on a fresh core, or restore the snapshot after it."""

    index: int
    is_restored: bool

    @property
    def batches_done(self) -> int:
        return self.index + self.is_restored


async def _oldest_beginning(log: LogReads, batches: Sequence[JournalledBatch]) -> _Beginning:
    candidates = [_Beginning(index=0, is_restored=False)] if batches[0].sequence == 0 else []
    candidates += [
        _Beginning(index=index, is_restored=True)
        for index, batch in enumerate(batches)
        if batch.snapshot is not None
    ]
    if not candidates:
        raise _without_beginning(batches)
    read = {*input_starts(batches), *recalled_starts(batches)}
    kept = await log.first_positions(sorted(read))
    refused: JournalError | None = None
    for candidate in candidates:
        left = batches[candidate.batches_done :]
        try:
            check_kept(input_starts(left), kept)
            if candidate.is_restored:
                check_kept(recalled_starts([batches[candidate.index]]), kept)
        except JournalError as error:
            refused = error
            continue
        if left or refused is None:
            return candidate
    assert refused is not None
    raise refused


def _check_logic(newest: JournalledBatch, *, service: str, logic_version: int) -> None:
    written_by = writer_logic(newest)
    if written_by != logic_version:
        raise OtherLogicError(
            f"the journal was written by logic version {written_by} of {service}, this build has "
            f"{logic_version}"
        )


def _left_out(outline: Sequence[tuple[int, JournalledBatch]], *, logic_version: int) -> int:
    """How many batches come before those that this logic version wrote."""
    others = [n for n, (_, batch) in enumerate(outline) if writer_logic(batch) != logic_version]
    return others[-1] + 1 if others else 0


def _without_beginning(batches: Sequence[JournalledBatch]) -> JournalError:
    return JournalError(
        f"the journal starts with batch {batches[0].sequence} and has no snapshot to begin with"
    )


def _without_state(batch: JournalledBatch) -> JournalledBatch:
    """The batch with an empty snapshot: the snapshots of a whole run may not fit in memory."""
    return batch if batch.snapshot is None else structs.replace(batch, snapshot=b"")
