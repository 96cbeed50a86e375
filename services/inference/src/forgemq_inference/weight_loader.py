"""Loads new weights into a running engine: relayed, from the trainer's process group, or from disk.

Agents see only delay: running requests are retracted, keep their tokens, and go on under the new
weights. Every phase has a deadline. Between the first changed byte and the last the engine's
weights are named `broken`: an inference process that attaches to the engine later sees the name,
and nothing is generated with them.

The policy's tensors come first, then those of the draft head if one is published with them, each in
a session of its own that names whose they are. The last of all buckets brings the weights' name.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias, assert_never

from msgspec import Struct

from forgemq_contracts.weights import PublishedHead, PublishedWeights, Rendezvous
from forgemq_inference.adapter_load import load_adapter
from forgemq_inference.core.weights import (
    BROKEN_NAME,
    DurableLoad,
    FastLoad,
    Join,
    Load,
    RelayedLoad,
    Rename,
    Weights,
    WeightsState,
    engine_name,
)
from forgemq_inference.durable import Copies, DurableCopyError
from forgemq_inference.engine import BucketPlace, EngineError, EngineRefusedError
from forgemq_inference.engine_pair import LaneEngine
from forgemq_inference.fast_path_receipt import Receipt, ReceivedSession
from forgemq_inference.fetching import Fetching, Folders
from forgemq_inference.head_payloads import head_payloads
from forgemq_inference.pause_clock import PauseClock
from forgemq_inference.read_back import ParameterReadBack
from forgemq_inference.relay import RelayedWeights
from forgemq_telemetry import Telemetry

LoadPath: TypeAlias = Literal["start", "fast", "durable"]
"""As `LoadedWeights.path` has it."""
_FAST: LoadPath = "fast"
_DURABLE: LoadPath = "durable"

_PAUSE_TIMEOUT_S = 30.0
"""The engine answers within a decoding step, but may be busy with its first compilation."""

_FREED_TIMEOUT_S = 5.0
"""The engine's answer that a group was not formed takes milliseconds, and a busy machine."""

_PROBE_TIMEOUT_S = 5.0
"""A connection takes milliseconds; the engine stands still meanwhile."""


class Loading(Struct, frozen=True, kw_only=True):
    """How new weights arrived, in seconds."""

    path: LoadPath
    duration_s: float
    paused_s: float


class _Loaded(Struct, frozen=True, kw_only=True):
    """What an engine holds after a load."""

    published: PublishedWeights
    path: LoadPath
    paused_s: float


class WeightLoader:
    """Carries out the loads that `WeightsState` decides on; one at a time.

    After `load` returns, the engine generates with the published weights. After it raised, the
    engine is paused or gone, and `state.served.is_dirty` says whether its weights are whole.
    """

    def __init__(
        self,
        engine: LaneEngine,
        state: WeightsState,
        *,
        copies: Copies,
        relayed: RelayedWeights,
        read_back: ParameterReadBack,
        pauses: PauseClock,
        durable_timeout_s: float,
        telemetry: Telemetry,
    ) -> None:
        """Load nothing yet."""
        self._engine = engine
        self._state = state
        self._copies = copies
        self._relayed = relayed
        self._fetching = Fetching(state, copies=copies, relayed=relayed, telemetry=telemetry)
        self._read_back = read_back
        self._pauses = pauses
        self._durable_timeout_s = durable_timeout_s
        self._telemetry = telemetry

    @property
    def is_fetching(self) -> bool:
        """Whether the load under way only fetches files, while the engine generates."""
        return self._fetching.is_under_way and not self._pauses.is_paused

    def note_published(self) -> None:
        """Note that newer weights are published: older ones are not waited for any longer."""
        if self._state.newest is not None:
            self._relayed.pass_over(self._state.newest)

    async def load(self, load: Load) -> Loading | None:
        """Bring the engine to the published weights, or to the newest durable ones if that fails.

        Returns None if the engine holds what it held: the weights did not come on their fast path,
        and no durable copy is newer, or others were published meanwhile.

        Raises:
            EngineError: the engine refuses, or does not answer in time.
            DurableCopyError: the durable copy cannot be used.
        """
        started_s = time.monotonic()
        match load:
            case Rename(published):
                await self._engine.name_weights(engine_name(published))
                loaded: _Loaded | None = _Loaded(published=published, path="start", paused_s=0.0)
            case DurableLoad(published):
                loaded = await self._load_durable(published)
            case FastLoad(published, rendezvous):
                loaded = await self._load_fast(published, rendezvous)
            case RelayedLoad(published):
                loaded = await self._load_relayed(published)
            case _:
                assert_never(load)
        if loaded is None:
            return None
        self._state.note_loaded(loaded.published)
        duration_s = time.monotonic() - started_s
        return Loading(path=loaded.path, duration_s=duration_s, paused_s=loaded.paused_s)

    async def join(self, join: Join) -> None:
        """Let the engine join a group of several lanes; then it is in that one alone.

        Raises:
            EngineUnreachableError: the engine did not answer, also after the trainer gave up.
        """
        rendezvous, started_s = join.rendezvous, time.monotonic()
        name = rendezvous.group_name
        try:
            await _check_listener(rendezvous)
            # The trainer frees an engine that waits in vain: its answer comes after that.
            timeout_s = join.deadline_s + _FREED_TIMEOUT_S
            await self._engine.join_group(rendezvous, timeout_s=timeout_s)
        except EngineRefusedError as error:
            self._telemetry.event("group_not_joined", group=name, error=str(error))
            return
        self._state.note_shared(name)
        await self._leave_others(name)
        took_s = round(time.monotonic() - started_s, 3)
        self._telemetry.event("group_joined", group=name, took_s=took_s)

    async def _load_durable(self, published: PublishedWeights) -> _Loaded:
        # Before the pause: it may be a download of minutes.
        folders = await self._fetching.durable(published)
        paused_s = self._pauses.total_s
        await self._pause(timeout_s=self._durable_timeout_s)
        await self._load_folders(published, folders)
        await self._resume(timeout_s=self._durable_timeout_s)
        paused_s = self._pauses.total_s - paused_s
        return _Loaded(published=published, path=_DURABLE, paused_s=paused_s)

    async def _load_relayed(self, published: PublishedWeights) -> _Loaded | None:
        """Wait for the relay while the engine generates, then swap."""
        folders = await self._fetching.relayed(published)
        if isinstance(folders, str):
            if self._state.is_replaced(published):
                return None
            self._note_relay_failure(published, folders)
            self._state.note_failed(published)
            newer = self._state.durable_load()
            return None if newer is None else await self._load_durable(newer.published)
        leave_out = await self._read_back.prepare(published)
        paused_s = self._pauses.total_s
        await self._pause(timeout_s=self._durable_timeout_s)
        await self._load_folders(published, folders)
        loaded, path = published, _FAST
        wrong = await self._read_back.wrong(published, leave_out)
        if wrong:
            self._note_relay_failure(published, _held_otherwise(wrong))
            await self._engine.name_weights(BROKEN_NAME)
            loaded, path = await self._fall_back(published), _DURABLE
            await self._confirm(loaded, published, leave_out, wrong=wrong)
        await self._resume(timeout_s=self._durable_timeout_s)
        return _Loaded(published=loaded, path=path, paused_s=self._pauses.total_s - paused_s)

    async def _fall_back(self, published: PublishedWeights) -> PublishedWeights:
        """Load the newest durable weights into an engine that is paused; returns which.

        They are those before the published ones if these have no durable copy yet.

        Raises:
            DurableCopyError: no durable copy is published, or it cannot be used.
        """
        self._state.note_failed(published)
        self._state.note_broken()
        durable = self._state.durable
        if durable is None:
            raise DurableCopyError(f"{_name(published)} failed, and nothing durable is published")
        await self._load_folders(durable, await self._fetching.durable(durable))
        return durable

    async def _confirm(
        self,
        loaded: PublishedWeights,
        published: PublishedWeights,
        leave_out: Sequence[str],
        *,
        wrong: Sequence[str],
    ) -> None:
        """Ask for the parameters that were wrong again, if the copy that is loaded has the same."""
        if loaded.sha256 == published.sha256:
            await self._read_back.confirm(loaded, leave_out, before=wrong)

    def _note_relay_failure(self, published: PublishedWeights, reason: str) -> None:
        self._telemetry.event("relay_failed", weights=_name(published), error=reason)
        self._telemetry.count("inference.fast_path_failures", lane=self._relayed.lane)

    async def _load_fast(self, published: PublishedWeights, rendezvous: Rendezvous) -> _Loaded:
        plan = await self._plan(published)
        leave_out = await self._read_back.prepare(published)
        wrong: tuple[str, ...] = ()
        paused_s = self._pauses.total_s
        await self._pause(timeout_s=_PAUSE_TIMEOUT_S)
        loaded, path = published, _FAST
        progress = Receipt(published, started_s=time.monotonic())
        try:
            await self._receive(published, rendezvous, plan, progress=progress)
            wrong = await self._read_back.wrong(published, leave_out)
            if wrong:
                await self._engine.name_weights(BROKEN_NAME)
                raise EngineRefusedError(_held_otherwise(wrong))
        except EngineError as error:
            self._telemetry.event(
                "fast_path_failed",
                group=rendezvous.group_name,
                error=str(error),
                received=str(progress),
            )
            self._telemetry.count("inference.fast_path_failures", lane=rendezvous.lane)
            await self._abandon_update(rendezvous.group_name)
            loaded, path = await self._fall_back(published), _DURABLE
            await self._confirm(loaded, published, leave_out, wrong=wrong)
        await self._resume(timeout_s=_PAUSE_TIMEOUT_S)
        await self._leave_others(rendezvous.group_name)
        return _Loaded(published=loaded, path=path, paused_s=self._pauses.total_s - paused_s)

    async def _pause(self, *, timeout_s: float) -> None:
        self._pauses.pause()
        await self._engine.pause(timeout_s=timeout_s)

    async def _resume(self, *, timeout_s: float) -> None:
        await self._engine.resume(timeout_s=timeout_s)
        self._pauses.resume()

    async def _receive(
        self,
        published: PublishedWeights,
        rendezvous: Rendezvous,
        plan: Sequence[ReceivedSession],
        *,
        progress: Receipt,
    ) -> None:
        if rendezvous.is_new:
            # The engine's scheduler blocks until rank 0 answers, so ask first whether it is there.
            await _check_listener(rendezvous)
            await self._engine.join_group(rendezvous, timeout_s=progress.left_s())
            self._state.note_joined(rendezvous.group_name)
        await self._engine.name_weights(BROKEN_NAME)
        self._state.note_broken()
        for session in plan:
            await self._receive_session(session, rendezvous.group_name, progress=progress)
        if published.head is not None:
            self._state.note_head(published.head.sha256)

    async def _receive_session(
        self, session: ReceivedSession, group_name: str, *, progress: Receipt
    ) -> None:
        await self._engine.begin_update(session.selector, timeout_s=progress.left_s())
        if session.selector == "draft":
            self._state.note_head(None)
        for bucket, place in session.buckets():
            await self._engine.receive_bucket(
                bucket, group_name=group_name, place=place, timeout_s=progress.left_s()
            )
            progress.received_bytes += sum(tensor.size_bytes for tensor in bucket)
        await self._engine.end_update(timeout_s=progress.left_s())

    async def _plan(self, published: PublishedWeights) -> tuple[ReceivedSession, ...]:
        """What comes on the fast path: the policy's tensors, then those of a published head."""
        tensors = await self._copies.policies.tensors(published)
        name = engine_name(published)
        if published.head is None:
            return (ReceivedSession(selector="target", tensors=tensors, final_name=name),)
        head = await self._copies.heads.tensors(published.head)
        return (
            ReceivedSession(selector="target", tensors=tensors, final_name=None),
            ReceivedSession(selector="draft", tensors=head, final_name=name),
        )

    async def _load_folders(self, published: PublishedWeights, folders: Folders) -> None:
        name = engine_name(published)
        self._state.note_broken()
        named = BROKEN_NAME if folders.head else name
        timeout_s = self._durable_timeout_s
        if published.kind == "adapter":
            adapter = _name(published)
            await load_adapter(
                self._engine, folders.policy, adapter=adapter, name=name, timeout_s=timeout_s
            )
        else:
            await self._engine.load_folder(str(folders.policy), name=named, timeout_s=timeout_s)
        if folders.head is not None:
            await self._load_head(*folders.head, name=name)
        served = (await self._engine.model_info()).weight_version
        if served != name:
            raise EngineRefusedError(f"loaded {name}, but the engine names its weights {served}")

    async def _load_head(self, head: PublishedHead, folder: Path, *, name: str) -> None:
        timeout_s, payloads = self._durable_timeout_s, head_payloads(folder)
        load = await self._engine.tensor_load(timeout_s=timeout_s)
        await self._engine.begin_update("draft", timeout_s=timeout_s)
        self._state.note_head(None)
        payload = await asyncio.to_thread(next, payloads, None)
        while payload is not None:
            following = await asyncio.to_thread(next, payloads, None)
            place = BucketPlace(selector="draft", final_name=None if following else name)
            await load(payload, place)
            payload = following
        await self._engine.end_update(timeout_s=timeout_s)
        self._state.note_head(head.sha256)

    async def _abandon_update(self, group_name: str) -> None:
        """Make the engine ready for a load from disk; leaving the group frees the publisher too."""
        try:
            await self._engine.end_update(timeout_s=self._durable_timeout_s)
        except EngineRefusedError as error:
            self._telemetry.event("nothing_to_drop", group=group_name, answer=str(error))
        await self._leave(group_name)

    async def _leave_others(self, group_name: str) -> None:
        """Leave the groups of an earlier trainer, or of one that has given the lane up."""
        for other in self._state.groups_besides(group_name):
            await self._leave(other)

    async def _leave(self, group_name: str) -> None:
        self._state.note_left(group_name)
        try:
            await self._engine.leave_group(group_name)
        except EngineRefusedError as error:
            self._telemetry.event("nothing_to_drop", group=group_name, answer=str(error))


async def _check_listener(rendezvous: Rendezvous) -> None:
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(rendezvous.host, rendezvous.port)
            writer.close()
            await writer.wait_closed()
    except OSError as error:
        raise EngineRefusedError(
            f"nobody listens at {rendezvous.host}:{rendezvous.port}: {error}"
        ) from error


def _held_otherwise(parameters: Sequence[str]) -> str:
    return f"holds other bytes than were sent: {', '.join(parameters)}"


def _name(published: PublishedWeights) -> str:
    """For people."""
    return Weights(published.lineage, published.version).name
