"""What is counted as it changes is what counting everything would find."""

import random

import pytest

from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import FinishedCompletion, TurnPart, WeightSpan
from forgemq_contracts.episodes import OpenedEpisode, Sampling
from forgemq_contracts.groups import AdmittedGroup, RetiredGroup
from forgemq_gateway.core.episodes import EpisodeState, HeldEpisode
from forgemq_gateway.core.message_paths import Branch
from forgemq_gateway.core.registry import Registry
from forgemq_gateway.core.replies import Reply, Text

LEASE_S = 10.0
GROUPS, INDICES = 4, 3


def admitted(group: int) -> AdmittedGroup:
    return AdmittedGroup(
        group_id=f"g-{group}",
        domain="d",
        purpose="train",
        group_size=INDICES,
        task=b"1" * (group + 1),
        version_at_admission=0,
    )


def opened(group: int, index: int, *, attempt: int) -> OpenedEpisode:
    return OpenedEpisode(
        episode_id=f"g-{group}.{index}.{attempt}",
        group_id=f"g-{group}",
        index=index,
        attempt=attempt,
        key_sha256="0" * 64,
        sampling=Sampling(),
        history="append_only",
        lease_s=LEASE_S,
        opened_ms=0,
    )


def finished(episode: HeldEpisode, number: int) -> FinishedCompletion:
    return FinishedCompletion(
        request_id=f"{number:032x}",
        attempt=0,
        episode_id=episode.episode_id,
        group_id=episode.opened.group_id,
        lane=0,
        epoch=1,
        finish_reason="stop",
        turn=TurnPart(
            sequence=number,
            protocol="chat_completions",
            body_digest=str(number),
            message_digests=(f"m{number}",),
        ),
        context=pack_ids([1] * (number % 7)),
        output=pack_ids([2, 3]),
        logprobs=pack_floats([-1.0, -1.0]),
        spans=(WeightSpan(start=0, end=2, lineage=1, version=0),),
    )


def retired(group: int) -> RetiredGroup:
    return RetiredGroup(group_id=f"g-{group}", domain="d", purpose="train", reason="trained")


class World:
    """Groups that come, are played, lapse and retire at random."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.registry = Registry()
        self.now_s = 0.0
        self.groups = 0
        self.completions = 0
        self.gone: list[HeldEpisode] = []
        self.before: dict[str, EpisodeState] = {}

    def step(self) -> None:
        """One change, and a while."""
        changes = (self.open, self.play, self.play, self.renew, self.end, self.serve, self.retire)
        self.chance.choice((*changes, self.release))()
        self.now_s += self.chance.random() * 2

    def open(self) -> None:
        group = self.chance.randrange(self.groups + 1)
        self.groups = max(self.groups, group + 1)
        self.registry.apply_admitted_group(admitted(group))
        index, attempt = self.chance.randrange(INDICES), self.chance.randrange(3)
        held = self.registry.groups.get(f"g-{group}")
        earlier = None if held is None else held.episodes.get(index)
        record = opened(group, index, attempt=attempt)
        at_s = self.now_s + LEASE_S
        if self.registry.apply_opened_episode(record, lease_until_s=at_s) and earlier:
            self.gone.append(earlier)

    def play(self) -> None:
        if episode := self.any_episode():
            self.completions += 1
            reply = Reply(parts=(Text("x" * self.chance.randrange(9)),))
            self.registry.apply_finished_completion(
                finished(episode, self.completions),
                offset=self.completions,
                finished_ms=0,
                parse=lambda *_: reply,
            )

    def renew(self) -> None:
        if episode := self.any_episode():
            episode.renew(self.now_s)

    def release(self) -> None:
        if (episode := self.any_episode()) and self.chance.random() < 0.2:
            self.registry.release(episode, now_s=self.now_s)

    def serve(self) -> None:
        """A client comes, or the last one leaves."""
        if episode := self.any_episode():
            episode.clients = 1 - episode.clients
            episode.renew(self.now_s)

    def end(self) -> None:
        """The end of an episode begins, fails to be written, or is written."""
        if episode := self.any_episode():
            if episode.state == "finishing":
                before = self.before.pop(episode.episode_id)
                episode.state = self.chance.choice((before, "ended"))
            else:
                self.before[episode.episode_id] = episode.state
                episode.state = "finishing"

    def retire(self) -> None:
        if self.groups and self.chance.random() < 0.2:
            group = self.registry.apply_retired_group(retired(self.chance.randrange(self.groups)))
            self.gone += [] if group is None else group.episodes.values()

    def any_episode(self) -> HeldEpisode | None:
        episodes = [episode for _, episode in self.registry.episodes()]
        # An end is final.
        episodes = [episode for episode in episodes if episode.state != "ended"]
        return self.chance.choice(episodes) if episodes else None


@pytest.mark.parametrize("seed", range(20))
def test_the_leases_that_lapsed_are_those_that_a_look_at_every_episode_finds(seed: int) -> None:
    world, lapsed_count = World(seed), 0
    for _ in range(300):
        world.step()
        lapsed = world.registry.lapsed(world.now_s)
        episodes = [episode for _, episode in world.registry.episodes()]
        wanted = {e.episode_id for e in episodes if e.has_lapsed(world.now_s)}
        assert {episode.episode_id for episode in lapsed} == wanted
        assert len(lapsed) == len(wanted)
        for episode in lapsed[:1]:
            episode.state = "lapsed"
        lapsed_count += len(lapsed)
    assert lapsed_count > 0


@pytest.mark.parametrize("seed", range(20))
def test_the_bytes_held_are_the_sum_over_all_open_groups(seed: int) -> None:
    world = World(seed)
    for _ in range(300):
        world.step()
        for episode in world.gone[-2:]:  # A request that is still being read.
            episode.history.note(Branch((f"late {world.completions}",)))
        tasks = sum(len(group.facts.task) for group in world.registry.groups.values())
        histories = sum(e.history.held.size_bytes for _, e in world.registry.episodes())
        assert world.registry.size_bytes() == tasks + histories
    assert world.completions > 0


def test_tools_count_once_for_each_set_that_an_episode_has_had() -> None:
    registry = Registry()
    registry.apply_admitted_group(admitted(0))
    episode = registry.apply_opened_episode(opened(0, 0, attempt=0), lease_until_s=0.0)
    assert episode is not None
    before = registry.size_bytes()
    for digest in ("a", "b", "a"):
        episode.note_tools(digest, ({"type": "function"},), 1000)
    assert registry.size_bytes() - before == 2 * 5000


def test_an_episode_that_is_given_back_lapses_when_the_last_connection_of_its_agent_ends() -> None:
    registry = Registry()
    registry.apply_admitted_group(admitted(0))
    episode = registry.apply_opened_episode(opened(0, 0, attempt=0), lease_until_s=LEASE_S)
    assert episode is not None
    episode.clients = 1
    registry.release(episode, now_s=1.0)
    assert registry.lapsed(1.0) == []
    episode.clients = 0
    episode.renew(2.0)
    registry.renew_leases(2.0)
    assert registry.lapsed(2.0) == [episode]


def test_an_episode_whose_lease_runs_is_not_looked_at() -> None:
    looks: list[str] = []

    class Looked(Registry):
        def episode(self, episode_id: str) -> HeldEpisode | None:
            looks.append(episode_id)
            return super().episode(episode_id)

    registry = Looked()
    registry.apply_admitted_group(admitted(0))
    record = opened(0, 0, attempt=0)
    episode = registry.apply_opened_episode(record, lease_until_s=10.0)
    assert episode is not None
    for quarter in range(80):  # 20 s, renewed four times a second
        episode.renew(quarter / 4)
        assert registry.lapsed(quarter / 4) == []
    assert len(looks) == 1
