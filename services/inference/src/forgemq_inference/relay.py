"""New weights that reach this process as files, from the trainer or from another lane's process.

They arrive while the engine generates, so that its pause holds the load alone; this process passes
them on to the next lane meanwhile (`forgemq_weight_relay`).
"""

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

from forgemq_contracts.weights import PublishedWeights
from forgemq_inference.durable import WEIGHTS_FILE
from forgemq_telemetry import Telemetry
from forgemq_weight_relay import Greeting, Receiver, Relayed, StagedCopy, WeightsKey


class RelayedFolders(NamedTuple):
    """Local folders with the published bytes; no policy if the relay did not bring them."""

    policy: Path | None = None
    head: Path | None = None
    failure: str = ""


class RelayedWeights:
    """What the relay brings to one lane; listens from its making until `close`."""

    def __init__(
        self, folder: Path, *, run: str, host: str, lane: int, telemetry: Telemetry
    ) -> None:
        """Listen.

        Args:
            folder: For the newest version and the one that arrives; emptied first.
            run: Its id.
            host: Address at which the neighbours reach this process.
            lane: For telemetry.
            telemetry: Of the service.

        Raises:
            OSError: `host` is no address of this machine.
        """
        self.lane = lane
        self._telemetry = telemetry
        self.receiver = Receiver(
            folder, run=run, host=host, on_relayed=self._note_relayed, on_broken=self._note_broken
        )
        """Waits for versions by their key."""
        self.address = self.receiver.address
        """host:port for neighbours."""

    async def folders(self, published: PublishedWeights) -> RelayedFolders:
        """The published weights, waited for until their deadline or until others are newer."""
        key, started_s = WeightsKey(published.lineage, published.version), time.monotonic()
        copy = await asyncio.to_thread(self.receiver.wait, key, timeout_s=published.deadline_s)
        if copy is None:
            waited_s = time.monotonic() - started_s
            failure = f"not whole after {waited_s:.1f} s of {published.deadline_s:.1f} s"
            return RelayedFolders(failure=failure)
        policy = _folder(copy, "policy", sha256=published.sha256)
        if policy is None:
            return RelayedFolders(failure="the relay brought other bytes than were published")
        head = published.head
        return RelayedFolders(
            policy, None if head is None else _folder(copy, "head", sha256=head.sha256)
        )

    def pass_over(self, newest: PublishedWeights) -> None:
        """Wait no longer for weights that are older than these."""
        self.receiver.pass_over(WeightsKey(newest.lineage, newest.version))

    def close(self) -> None:
        """Stop listening; what arrives breaks off."""
        self.receiver.close()

    def _note_relayed(self, greeting: Greeting, relayed: Relayed) -> None:
        self._telemetry.event(
            "weights_passed_on",
            weights=f"{greeting.lineage}.{greeting.version}",
            to_lane=relayed.lane,
            sent_bytes=relayed.sent_bytes,
            left_out={str(lane): reason for lane, reason in relayed.left_out.items()},
        )

    def _note_broken(self, greeting: Greeting, reason: str) -> None:
        self._telemetry.event(
            "relay_broken", weights=f"{greeting.lineage}.{greeting.version}", error=reason
        )


def _folder(copy: StagedCopy, kind: str, *, sha256: str) -> Path | None:
    name = f"{kind}/{WEIGHTS_FILE}"
    return copy.paths[name].parent if copy.sha256_of(name) == sha256 else None
