"""The journal of a transform task: what it handled, in which order, and its snapshots."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.fields import Offset, Partition


class JournalInput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of the core: records [offset, offset + count) of a partition, or a tick."""

    topic: Annotated[str, Meta(description="'' for a tick.")] = ""
    partition: Partition = 0
    offset: Offset = 0
    count: Annotated[int, Meta(ge=0)] = 0
    tick_ms: Annotated[int, Meta(ge=0, description="Run time of a tick, milliseconds.")] = 0


class JournalPosition(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a task has handled one of its inputs."""

    topic: str
    partition: Partition = 0
    position: Annotated[Offset, Meta(description="Of the next record to handle.")] = 0


class JournalLoss(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record whose value no reader can have any more: its blob is gone or damaged."""

    topic: str
    partition: Partition = 0
    offset: Offset = 0
    key: bytes = b""
    is_late: Annotated[
        bool,
        Meta(
            description="An earlier batch handled the record with its value. A restart found the "
            "value lost, and this batch wrote the dead letter."
        ),
    ] = False


class JournalledBatch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One committed batch, in the same transaction as its outputs."""

    sequence: Annotated[int, Meta(ge=0, description="Gap-free per task.")]
    inputs: tuple[JournalInput, ...]
    outputs: Annotated[int, Meta(ge=0, description="Number of records written.")]
    outputs_digest: Annotated[str, Meta(description="blake2b over the outputs' bytes, in order.")]
    snapshot: Annotated[
        bytes | None, Meta(description="State after this batch, if it was stored.")
    ] = None
    logic_version: Annotated[
        int,
        Meta(
            ge=1,
            description="Of the core that handled it; a higher one is newer. With a snapshot: the "
            "lowest that can go on from it.",
        ),
    ] = 1
    positions: Annotated[
        tuple[JournalPosition, ...],
        Meta(description="With a snapshot: of every input after this batch; () without one."),
    ] = ()
    run_ms: Annotated[
        int, Meta(ge=0, description="With a snapshot: run time of the last tick before it.")
    ] = 0
    needed: Annotated[
        tuple[JournalPosition, ...],
        Meta(
            description="With a snapshot: the oldest record of a partition that it names instead "
            "of containing it; () if it names none."
        ),
    ] = ()
    lost: Annotated[
        tuple[JournalLoss, ...],
        Meta(description="Records that the core did not get, since their values were lost."),
    ] = ()
    snapshot_logic_version: Annotated[
        int, Meta(ge=0, description="With a snapshot: of the core that took it; 0: logic_version.")
    ] = 0


def writer_logic(batch: JournalledBatch) -> int:
    """Logic version of the core that wrote a batch."""
    return batch.snapshot_logic_version or batch.logic_version
