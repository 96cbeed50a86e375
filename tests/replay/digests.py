"""Prints, for every core case, a digest of its outputs and of its snapshots on the way.

test_determinism runs this in separate processes, so that each has another hash seed.
"""

import hashlib
import itertools
import sys
from collections.abc import Sequence

from forgemq_bus.kept_records import message_of
from forgemq_bus.log import Emit, Record
from forgemq_contracts.messages import Core, RecallingCore
from forgemq_shell.batch import Batch, digest
from tests.simulation.cases import CASES
from tests.simulation.harness import CoreCase

SNAPSHOT_EVERY_RECORDS = 5
"""A script has tens of records: several snapshots, and records between them."""


def records(case: CoreCase) -> list[Record]:
    """The case's script with the offsets that a log would give its records."""
    offsets: dict[tuple[str, int], itertools.count] = {}
    return [_record(e, next(offsets.setdefault(e.place, itertools.count()))) for e in case.script]


def _record(emit: Emit, offset: int) -> Record:
    return Record(
        topic=emit.topic,
        partition=emit.partition,
        offset=offset,
        timestamp_ms=offset,
        key=emit.key,
        value=emit.value,
    )


def case_digest(case: CoreCase, *, is_restored: bool = False) -> str:
    """Digest of outputs and snapshots; `is_restored`: a fresh core after every snapshot."""
    core: Core = case.make_core()
    state, emits = hashlib.blake2b(digest_size=16), list[Emit]()
    for number, record in enumerate(records(case)):
        batch = Batch(core, service=case.name)
        batch.record(record)
        emits += batch.emits
        if number % SNAPSHOT_EVERY_RECORDS == 0:
            snapshot = core.snapshot()
            state.update(snapshot)
            if is_restored:
                core = case.make_core()
                core.restore(snapshot)
                recall_from(records(case), core)
    state.update(digest(emits).encode())
    return state.hexdigest()


def recall_from(kept: Sequence[Record], core: Core) -> None:
    """Give a restored core the records that its snapshot names."""
    if not isinstance(core, RecallingCore):
        return
    at = {(*record.place, record.offset): record for record in kept}
    for named in core.references():
        for offset in named.offsets:
            core.recall(message_of(at[named.topic, named.partition, offset]))


if __name__ == "__main__":
    for make_case in CASES:
        sys.stdout.write(f"{make_case.__name__} {case_digest(make_case())}\n")
