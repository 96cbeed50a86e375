"""When each episode must be looked at because its lease may have lapsed.

A lease is renewed far more often than it lapses. So renewing it changes nothing here: an episode is
looked at when its lease would have ended, and again when the lease that it has by then ends.
"""

import heapq
from collections.abc import Callable

from forgemq_gateway.core.episodes import HeldEpisode


class Leases:
    """Times to look at each episode that has not ended.

    Example: leased at 0 s for 60 s and renewed at 50 s, an episode is checked at 60 s and 110 s.

    Args:
        episode: Episode id -> the episode, or None if its group is over or has a later attempt.
    """

    def __init__(self, episode: Callable[[str], HeldEpisode | None]) -> None:
        self._episode = episode
        self._looks: list[tuple[float, str]] = []

    def add(self, episode: HeldEpisode) -> None:
        """Look at an episode when its lease ends: a new one, or one whose lease was shortened."""
        heapq.heappush(self._looks, (episode.lease_until_s, episode.episode_id))

    def lapsed(self, now_s: float) -> list[HeldEpisode]:
        """The open episodes whose lease has lapsed; named again until they are open no more."""
        due: dict[str, HeldEpisode] = {}
        while self._looks and self._looks[0][0] <= now_s:
            episode = self._episode(heapq.heappop(self._looks)[1])
            if episode is not None and episode.state != "ended":
                due[episode.episode_id] = episode
        for episode in due.values():
            heapq.heappush(self._looks, (_next_look_s(episode, now_s), episode.episode_id))
        return [episode for episode in due.values() if episode.has_lapsed(now_s)]


def _next_look_s(episode: HeldEpisode, now_s: float) -> float:
    """Before this time the episode cannot lapse, or lapse again."""
    if episode.state == "lapsed" or (episode.clients and not episode.is_released):
        # The last client that leaves, or the agent that comes back, renews the lease.
        return max(episode.lease_until_s, now_s + episode.opened.lease_s)
    return max(episode.lease_until_s, now_s)
