"""Imports finished conversations: each is a group of one episode that is already played.

The gateway knows a conversation by its content. So an import that was stopped is started again,
and what is in the run already is not added a second time.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_agents.conversation_files import FileEntry, entries, entry_count
from forgemq_agents.core.conversations import (
    ConversationError,
    FinishedConversation,
    conversation_of,
)
from forgemq_agents.errors import EpisodeOverError, KeysFullError
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.trained_conversations import ConversationLostError, TrainedConversations
from forgemq_contracts.admin import Claim, GroupStatus
from forgemq_contracts.asked_keys import KEYS_MAX

AT_ONCE_MAX = 64
"""Conversations on their way, each of them about a second: until it is scored and retired."""
BYTES_AT_ONCE_MAX = 64 * 1024 * 1024
"""Of their lines, which this process and the gateway hold in memory a few times each."""
STATE_WAIT_S = 20.0
"""Length of one long poll for a change of the group."""
CLAIM_WAIT_S = 5.0
"""A lapsed lease is no change of its group's state, so claims are repeated after this time."""
TAKEN_MAX = (
    f"a run takes {KEYS_MAX:,} in all its imports: import a part, and the rest into another run; "
    "a supervised domain trains on more if its queue has them as its task_file"
)
"""The limit, and what to do."""
FAULTS_SHOWN_MAX = 20
"""Enough to see what is wrong with a file; its other faults are counted."""


_Play: TypeAlias = Literal["written", "cut", "none"]
"""cut: the episode was over before it was written, by a deadline or a lease that lapsed. none:
another import has it, or it is written."""


class FileRefusedError(Exception):
    """The file has lines or rows that are no conversations; nothing of it was imported."""


class Imported(Struct, frozen=True, kw_only=True):
    """What became of the conversations of a file."""

    added: int
    known: int
    lost: tuple[str, ...]
    unused: Annotated[int, Meta(description="Training ended before it had room for them.")] = 0
    is_full: Annotated[bool, Meta(description="The run takes no further conversation.")] = False


def check_file(path: Path) -> int:
    """Check every line or row; returns the number of conversations.

    Raises:
        FileRefusedError: Names each bad one, up to a limit, with its field and rule.
        OSError: The file cannot be read.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileRefusedError(f"{path}: must be a file or a folder, as it is read twice")
    count, faults, shown = 0, 0, []
    try:
        _check_count(path)
        for entry in entries(path):
            try:
                _read(entry)
                count += 1
            except ConversationError as error:
                faults += 1
                if faults <= FAULTS_SHOWN_MAX:
                    shown.append(f"{entry.place}: {error}")
    except ConversationError as error:
        raise FileRefusedError(f"{error}\nnothing is imported") from error
    if faults > len(shown):
        shown.append(f"and {faults - len(shown)} more")
    if faults:
        raise FileRefusedError("\n".join((*shown, "nothing is imported")))
    if not count:
        raise FileRefusedError(f"{path}: has no conversation")
    return count


def _check_count(path: Path) -> None:
    """Refuse more than a run takes, before each of them is checked."""
    count = entry_count(path)
    if count > KEYS_MAX:
        raise FileRefusedError(
            f"{path}: has {count:,} conversations, and {TAKEN_MAX}\nnothing is imported"
        )


class ConversationImport:
    """One import of a file into a domain.

    Lifecycle: `run` once. After `stop` it ends what is on its way and takes no further line; after
    a second one it ends at once.
    """

    def __init__(
        self,
        gateway: GatewayClient,
        *,
        domain: str,
        bytes_at_once_max: int = BYTES_AT_ONCE_MAX,
        training: TrainedConversations | None = None,
    ) -> None:
        """Import nothing yet; `training` plays those of a supervised domain, None of no such."""
        self._gateway = gateway
        self._domain = domain
        self._training = training
        self._unused = 0
        self._is_stopped = self._is_full = False
        self._running: asyncio.Task[object] | None = None
        self._reading = asyncio.Lock()
        self._room = asyncio.Condition()
        self._bytes = 0
        self._bytes_max = bytes_at_once_max
        self._added = 0
        self._known = 0
        self._lost: list[str] = []

    def stop(self) -> None:
        """Take no further line; a second time, cancel `run`: no engine may ever serve."""
        if self._is_stopped and self._running is not None:
            self._running.cancel()
        self._is_stopped = True

    @property
    def done(self) -> int:
        """Conversations whose end is known so far."""
        return self._added + self._known + self._unused + len(self._lost)

    async def run(self, path: Path) -> Imported:
        """Import every conversation of a checked file.

        Raises:
            ConversationError: The file has changed since it was checked.
            GatewayError: The gateway refuses, or was away for too long.
        """
        waiting = entries(path)
        self._running = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE_MAX):
                tasks.create_task(self._take(waiting))
        return Imported(
            added=self._added,
            known=self._known,
            lost=tuple(self._lost),
            unused=self._unused,
            is_full=self._is_full,
        )

    async def _take(self, waiting: Iterator[FileEntry]) -> None:
        while (entry := await self._next(waiting)) is not None:
            try:
                await self._import(entry.place, _read(entry))
            except KeysFullError:  # Those on their way have their keys, and go on to their ends.
                self._is_full = self._is_stopped = True
            async with self._room:
                self._bytes -= len(entry.line)
                self._room.notify_all()

    async def _next(self, waiting: Iterator[FileEntry]) -> FileEntry | None:
        """The next one, once there is room for it; None at the end, or if the import stops.

        One at a time reads ahead, so that a single one waits in memory, not one for each.
        """
        async with self._reading, self._room:
            taken = next(waiting, None)
            if taken is None:
                return None
            size = len(taken.line)
            await self._room.wait_for(
                lambda: not self._bytes or self._bytes + size <= self._bytes_max
            )
            if self._is_stopped:
                return None
            self._bytes += size
            return taken

    async def _import(self, place: str, conversation: FinishedConversation) -> None:
        """Bring one conversation to the end of its group, or to its training."""
        if self._training is not None:
            try:
                end = await self._training.add(conversation, domain=self._domain)
            except ConversationLostError as error:
                self._lost.append(f"{place}: {error}")
                return
            self._added += end == "added"
            self._known += end == "known"
            self._unused += end == "unused"
            return
        status = await self._gateway.request_group(conversation.group(self._domain))
        plays: set[_Play] = set()
        while status.state != "retired":
            if status.state == "admitted":
                plays.add(await self._play(status, conversation))
            is_written = "written" in plays
            wait_s = STATE_WAIT_S if is_written or status.state == "requested" else CLAIM_WAIT_S
            try:
                status = await self._gateway.read_group(status, wait_s=wait_s)
            except EpisodeOverError:  # It retired so long ago that its status is forgotten.
                break
        if status.state == "retired" and status.retire_reason not in ("evaluated", ""):
            self._lost.append(f"{place}: {status.group_id} retired as {status.retire_reason}")
        elif "cut" in plays and "written" not in plays:
            self._lost.append(f"{place}: {status.group_id} ended before all of it was written")
        self._added += "written" in plays
        self._known += not plays & {"written", "cut"}

    async def _play(self, status: GroupStatus, conversation: FinishedConversation) -> _Play:
        """Write the conversation's episode."""
        try:
            claim: Claim | None = await self._gateway.claim(status.group_id)
        except EpisodeOverError:
            return "none"
        if claim is None:
            return "none"
        try:
            await report(self._gateway, claim.episode_id, conversation)
        except EpisodeOverError:
            return "cut"
        return "written"


async def report(
    gateway: GatewayClient, episode_id: str, conversation: FinishedConversation
) -> None:
    """Write what the conversation earned, and that its episode ends."""
    for reward in conversation.rewards:
        await gateway.report_reward(episode_id, reward)
    await gateway.finish(episode_id, conversation.end)


def _read(entry: FileEntry) -> FinishedConversation:
    """The conversation of this entry; raises ConversationError."""
    if entry.fault:
        raise ConversationError(entry.fault)
    return conversation_of(entry.line)
