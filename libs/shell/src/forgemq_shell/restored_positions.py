"""Where a restored task reads on: the journal says it, and committed positions must agree.

A batch, its journal record and its positions are one transaction. So a difference between journal
and positions means that the brokers lost one of them, and the task must not go on. Positions that
are missing altogether have expired: a broker keeps those of a quiet partition for a limited time
(`offsets.retention.minutes`), and the journal replaces them.
"""

from collections.abc import Mapping, Sequence

from forgemq_bus.log import Place
from forgemq_contracts.journal import JournalledBatch
from forgemq_shell.journal import JournalError


def restored_positions(
    inputs: Sequence[Place],
    *,
    batches: Sequence[JournalledBatch],
    committed: Mapping[Place, int],
    first: Mapping[Place, int],
) -> dict[Place, int]:
    """Position of the next record of each input.

    Args:
        inputs: Every partition that the task reads.
        batches: Its journal from the newest snapshot on, or from its first batch.
        committed: Its positions, as far as the brokers have them.
        first: Offsets of the oldest records that are kept.

    Raises:
        JournalError: journal and positions differ; says where.
    """
    handled = handled_positions(batches)
    positions = {}
    for place in inputs:
        journalled = handled.get(place, 0)
        if place not in handled and not _says_all(batches):
            journalled = committed.get(place, 0)
        if committed.get(place, journalled) != journalled:
            raise JournalError(
                f"{place}: the journal has handled it up to {journalled}, "
                f"committed is {committed[place]}: the brokers lost records of the journal or "
                f"positions"
            )
        positions[place] = journalled or first[place]
    return positions


def handled_positions(batches: Sequence[JournalledBatch]) -> dict[Place, int]:
    """Position behind the last record of each partition that these batches name."""
    handled: dict[Place, int] = {}
    for batch in batches:
        for position in batch.positions:
            handled[Place(position.topic, position.partition)] = position.position
        for item in batch.inputs:
            if item.topic:
                handled[Place(item.topic, item.partition)] = item.offset + item.count
    return handled


def _says_all(batches: Sequence[JournalledBatch]) -> bool:
    """Whether a partition that these batches do not name was never read.

    False only behind a snapshot that was written before snapshots held positions.
    """
    return not batches or batches[0].sequence == 0 or bool(batches[0].positions)
