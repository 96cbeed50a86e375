"""Which finished episodes can be graded, and from which positions a restart must read."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct

from forgemq_contracts.accounting import CompletionLedger, RetiredIds, end_of
from forgemq_contracts.completions import FinishedCompletion, TurnPart
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.partitions import group_of_episode
from forgemq_contracts.turn_reading import is_raw, parses_tools

CONTEXT_TAIL_BYTES = 4 * 256
"""The last 256 token ids: parsing a completion looks back to the opening of its turn."""


class HeldCompletion(Struct, frozen=True, kw_only=True):
    """The part of a completion that graders see: no context, no log-probabilities.

    Attributes:
        tools: JSON array of those whose calls are read in the output; None: it is text as it is.
        stop_string: What ended the output; "" if something else did.
    """

    completion_id: str
    offset: int
    output: bytes
    context_tail: bytes
    messages: bytes
    tools: bytes | None
    stop_string: str
    finish_reason: str


class PendingEpisode(Struct, frozen=True, kw_only=True):
    """A finished episode that is not graded; offset and time are those of its record."""

    episode: FinishedEpisode
    offset: int
    finished_ms: int
    trace: tuple[tuple[str, bytes], ...] = ()


class PendingPositions(Struct, frozen=True, kw_only=True):
    """Positions from which a restart must read, by topic; None if nothing was read."""

    episodes: int | None
    completions: int | None
    grades: int | None


class PendingEpisodes:
    """Episodes of one partition between finished and graded, and the completions they need.

    An episode is ready once finished-completions was read beyond its manifest. Completions of
    graded episodes and retired groups are dropped, so memory is that of the open groups.
    """

    def __init__(self) -> None:
        self._episodes: dict[str, PendingEpisode] = {}  # in log order
        self._held: dict[str, dict[str, HeldCompletion]] = {}  # by episode, by completion
        self._tools: dict[str, dict[str, bytes]] = {}  # by episode, by digest
        self._ledger = CompletionLedger()
        self._started: set[str] = set()
        self._grades: dict[str, int] = {}  # offset of the grade, by episode
        self._retired = RetiredIds()
        self._episodes_read = 0
        self._completions_read = 0
        self._grades_read = 0

    def __len__(self) -> int:
        return len(self._episodes)

    def on_completion(self, completion: FinishedCompletion, *, offset: int) -> None:
        """Hold a completion until its episode is graded."""
        self.on_completions_read(offset + 1)
        over = completion.group_id in self._retired or completion.episode_id in self._grades
        if over or not self._ledger.observe(completion, offset=offset):
            return
        turn = completion.turn
        tools = self._tools.setdefault(completion.episode_id, {})
        if turn.tools:
            tools[turn.tools_digest] = turn.tools
        self._held.setdefault(completion.episode_id, {})[completion.request_id] = HeldCompletion(
            completion_id=completion.request_id,
            offset=offset,
            output=completion.output,
            context_tail=completion.context[-CONTEXT_TAIL_BYTES:],
            messages=turn.messages,
            tools=_tools_read(turn, tools),
            stop_string=completion.stop_string,
            finish_reason=end_of(completion),
        )

    def on_completions_read(self, position: int) -> None:
        """Note that all of finished-completions below this offset was read."""
        self._completions_read = max(self._completions_read, position)

    def on_episode(
        self,
        episode: FinishedEpisode,
        *,
        offset: int,
        finished_ms: int = 0,
        trace: tuple[tuple[str, bytes], ...] = (),
    ) -> None:
        """Keep an episode to be graded, unless it is graded, retired or did not complete."""
        self._episodes_read = max(self._episodes_read, offset + 1)
        episode_id = episode.episode_id
        if episode_id in self._episodes:
            return  # The first end counts.
        if (
            episode.status != "completed"
            or episode.group_id in self._retired
            or episode_id in self._grades
        ):
            self._forget(episode_id)
        else:
            self._episodes[episode_id] = PendingEpisode(
                episode=episode, offset=offset, finished_ms=finished_ms, trace=trace
            )

    def on_graded(self, episode_id: str, *, offset: int) -> None:
        """Note that the grade of this episode is on the log, and drop its completions."""
        self._grades_read = max(self._grades_read, offset + 1)
        self._forget(episode_id)
        if group_of_episode(episode_id) not in self._retired:
            self._grades.setdefault(episode_id, offset)

    def on_retired(self, group_id: str) -> None:
        """Drop everything of this group: its grades are not needed."""
        self._retired.add(group_id)
        for episode_id in _of_group((*self._held, *self._episodes), group_id):
            self._forget(episode_id)
        for episode_id in _of_group(self._grades, group_id):
            self._grades.pop(episode_id)

    def oldest_ready(self, is_free: Callable[[str], bool]) -> PendingEpisode | None:
        """The oldest ready episode that was not taken; None if no such episode exists.

        Args:
            is_free: Whether an episode of this domain can be graded now.
        """
        for episode_id, pending in self._episodes.items():
            if (
                episode_id not in self._started
                and is_free(pending.episode.domain)
                and self._is_ready(pending)
            ):
                return pending
        return None

    def take(self, ready: PendingEpisode) -> None:
        """Note that the grading of this episode begins."""
        self._started.add(ready.episode.episode_id)

    def completions_of(self, episode: FinishedEpisode) -> tuple[HeldCompletion, ...]:
        """The completions of the episode's manifest, by sequence.

        Raises:
            LookupError: a completion is not on the log, or its first record has another offset.
        """
        held = self._held.get(episode.episode_id, {})
        entries = sorted(episode.manifest, key=lambda entry: entry.sequence)
        for entry in entries:
            known = held.get(entry.completion_id)
            if known is None:
                raise LookupError(f"completion {entry.completion_id} is not on the log")
            if known.offset != entry.offset:
                raise LookupError(
                    f"completion {entry.completion_id} counts at offset {known.offset}, "
                    f"the manifest says {entry.offset}"
                )
        return tuple(held[entry.completion_id] for entry in entries)

    def positions(self) -> PendingPositions:
        """Positions from which a restart finds every ungraded episode and all it needs."""
        episodes = min(
            (pending.offset for pending in self._episodes.values()), default=self._episodes_read
        )
        completions = min(self._held_offsets(), default=self._completions_read)
        grades = min(self._grades.values(), default=self._grades_read)
        return PendingPositions(
            episodes=episodes or None, completions=completions or None, grades=grades or None
        )

    def _held_offsets(self) -> Iterator[int]:
        return (one.offset for held in self._held.values() for one in held.values())

    def _is_ready(self, pending: PendingEpisode) -> bool:
        last = max((entry.offset for entry in pending.episode.manifest), default=-1)
        return last < self._completions_read

    def _forget(self, episode_id: str) -> None:
        self._episodes.pop(episode_id, None)
        self._started.discard(episode_id)
        self._tools.pop(episode_id, None)
        for completion_id in self._held.pop(episode_id, {}):
            self._ledger.forget(completion_id)


def take_oldest(
    partitions: Mapping[int, PendingEpisodes], is_free: Callable[[str], bool] = bool
) -> tuple[int, PendingEpisode] | None:
    """Take the ready episode that ended first, and its partition; None if none is ready.

    No partition waits for another one: its groups would hold their slots meanwhile, until all that
    is left to grade is in one partition, and so with one process.

    Args:
        partitions: Those of this process.
        is_free: Whether an episode of this domain can be graded now; by default any can.
    """
    found = [
        (ready.finished_ms, partition, ready)
        for partition, pending in partitions.items()
        if (ready := pending.oldest_ready(is_free)) is not None
    ]
    if not found:
        return None
    _, partition, ready = min(found, key=lambda each: each[:2])
    partitions[partition].take(ready)
    return partition, ready


def _tools_read(turn: TurnPart, known: Mapping[str, bytes]) -> bytes | None:
    """As the gateway read the output for the agent: without tools, call markup stays text."""
    if is_raw(turn):
        return None
    return known.get(turn.tools_digest, b"[]") if parses_tools(turn) else b"[]"


def _of_group(episode_ids: Iterable[str], group_id: str) -> list[str]:
    prefix = group_id + "."  # a group id holds no dot
    return [episode_id for episode_id in episode_ids if episode_id.startswith(prefix)]
