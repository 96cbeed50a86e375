"""Brings the files of a load to this machine: from their durable copies, or by the relay.

That may take minutes. Unless the engine is paused, it generates meanwhile with what it has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from forgemq_contracts.weights import PublishedHead, PublishedWeights
from forgemq_inference.core.weights import WeightsState
from forgemq_inference.durable import Copies, DurableCopyError
from forgemq_inference.relay import RelayedWeights
from forgemq_telemetry import Telemetry


class Folders(Struct, frozen=True, kw_only=True):
    """Where the files of a load lie: the policy's, and the head's if the engine needs one."""

    policy: Path
    head: tuple[PublishedHead, Path] | None = None


class Fetching:
    """The files of one lane's loads, one load at a time."""

    def __init__(
        self,
        state: WeightsState,
        *,
        copies: Copies,
        relayed: RelayedWeights,
        telemetry: Telemetry,
    ) -> None:
        """Fetch nothing yet."""
        self._state = state
        self._copies = copies
        self._relayed = relayed
        self._telemetry = telemetry
        self.is_under_way = False
        """Whether files are being waited for, or downloaded."""

    async def durable(self, published: PublishedWeights) -> Folders:
        """The durable copies of published weights, and of the head that the engine lacks.

        Raises:
            DurableCopyError: a copy is gone, or other bytes.
        """
        with self._noted():
            policy = await self._copies.policies.folder(published)
            return Folders(policy=policy, head=await self._missing_head(published))

    async def relayed(self, published: PublishedWeights) -> Folders | str:
        """What the relay brings of published weights; the reason if it does not bring them.

        Raises:
            DurableCopyError: the head comes from its durable copy, which cannot be used.
        """
        with self._noted():
            found = await self._relayed.folders(published)
            if found.policy is None:
                return found.failure
            head = self._state.missing_head(published)
            if head is not None and head == published.head and found.head is not None:
                return Folders(policy=found.policy, head=(head, found.head))
            return Folders(policy=found.policy, head=await self._missing_head(published))

    async def _missing_head(self, published: PublishedWeights) -> tuple[PublishedHead, Path] | None:
        """The durable copy of the head that the engine lacks; None if it lacks none."""
        head = self._state.missing_head(published)
        if head is None:
            return None
        try:
            return head, await self._copies.heads.folder(head)
        except DurableCopyError as error:
            if head == published.head:
                raise
            # The head of an older version, whose copy may be deleted: the next one comes soon.
            self._telemetry.event("head_not_loaded", sha256=head.sha256, error=str(error))
            return None

    @contextmanager
    def _noted(self) -> Iterator[None]:
        self.is_under_way = True
        try:
            yield
        finally:
            self.is_under_way = False
