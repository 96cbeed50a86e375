"""Relays a model's folder to lanes, as a trainer does."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from forgemq_trainer.relay_path import RelayPath
from forgemq_trainer.storage.weights import SavedVersion, read_weights_folder
from forgemq_trainer.transfer_deadline import TransferDeadline
from forgemq_weight_relay import Hop, Relayed


async def relay(
    folder: Path,
    addresses: Sequence[str],
    *,
    version: int,
    lineage: int = 1,
    head: Path | None = None,
    deadline_s: float = 60.0,
) -> Relayed:
    """Send the folder's files as this version along the lanes' addresses."""
    saved = SavedVersion(
        version=version,
        weights=read_weights_folder(folder),
        head=None if head is None else read_weights_folder(head),
    )
    return await asyncio.to_thread(
        RelayPath(deadline=TransferDeadline(deadline_s, 2e8)).send,
        saved,
        run="r",
        lineage=lineage,
        route=tuple(Hop(lane, address) for lane, address in enumerate(addresses)),
    )
