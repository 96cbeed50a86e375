"""A group that has not retired, and its episodes."""

from forgemq_contracts.admin import GroupState
from forgemq_gateway.core.episodes import GroupFacts, HeldEpisode
from forgemq_gateway.core.lane_caches import FirstPrompts


class Group:
    """A group that has not retired.

    Attributes:
        episodes: Newest attempt by index.
        first_prompts: Where its episodes have begun.
        finished: Episode id of each index's first final record on the log.
        claiming: Indices whose OpenedEpisode is being written.
        closed: Why no agent may play it any longer; "" while agents may.
    """

    def __init__(self, facts: GroupFacts, *, of_run: FirstPrompts | None = None) -> None:
        self.facts = facts
        self.state: GroupState = "requested"
        self.queue_index: int | None = None
        self.episodes: dict[int, HeldEpisode] = {}
        self.first_prompts = FirstPrompts(of_run)
        self.finished: dict[int, str] = {}
        self.claiming: set[int] = set()
        self.closed = ""

    def claimable(self) -> tuple[int, int] | None:
        """The lowest index that an agent may take now, and its next attempt."""
        if self.state != "admitted" or self.closed:
            return None
        for index in range(self.facts.group_size):
            if index in self.finished or index in self.claiming:
                continue
            episode = self.episodes.get(index)
            if episode is None:
                return index, 0
            if episode.state == "lapsed":
                return index, episode.opened.attempt + 1
        return None

    def unfinished(self) -> list[int]:
        """Indices that have no final record, written or being written."""
        return [index for index in range(self.facts.group_size) if self.is_unfinished(index)]

    def is_unfinished(self, index: int) -> bool:
        """Whether this index has no final record, written or being written."""
        episode = self.episodes.get(index)
        is_finishing = episode is not None and episode.state == "finishing"
        return not is_finishing and index not in self.finished and index not in self.claiming

    def forget_episodes(self) -> None:
        """Drop all trees, because another gateway has them; the group stays known."""
        for episode in self.episodes.values():
            episode.history.held.release()
        self.episodes.clear()
        self.finished.clear()
        self.claiming.clear()

    def open_count(self) -> int:
        """Number of episodes that an agent holds."""
        return sum(
            episode.state in ("open", "finishing") and index not in self.finished
            for index, episode in self.episodes.items()
        )
