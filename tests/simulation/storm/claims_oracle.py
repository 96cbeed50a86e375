"""What must be true of groups that agents played, decided from the log and what agents heard."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from forgemq_bus.log import Emit, Place
from forgemq_bus.names import broker_place
from forgemq_contracts import topics
from forgemq_contracts.episodes import FinishedEpisode, OpenedEpisode
from forgemq_contracts.groups import RetiredGroup, ScoredGroup
from forgemq_contracts.mixture import staleness_bounds
from forgemq_contracts.ownership import OwnedRun
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import RunConfiguration
from tests.simulation.storm.agents import Ended, Heard
from tests.simulation.storm.claimed_world import outcome_of
from tests.simulation.storm.cluster import StormStore, committed_records
from tests.simulation.storm.oracle import ViolationError

LATE_S = 2.0
"""The scheduler's time is late by at most so much: a tick, a batch and the delay of markers."""

PAUSE_S = 6.0
"""Longest pause of a process."""


@dataclass(frozen=True, slots=True)
class Written:
    """A record on the log."""

    at_s: float
    record: Any


class ClaimsOracle:
    """Reads the log, also what is trimmed.

    Args:
        store: The cluster.
        configuration: Of the run, with one queue.
        faults_s: When each fault happened; grows with the schedule.
    """

    def __init__(
        self, store: StormStore, configuration: RunConfiguration, *, faults_s: Sequence[float]
    ) -> None:
        self._store = store
        self._run = configuration.run
        self._configuration = configuration
        self._queue = configuration.queues[0]
        self._faults_s = faults_s

    def owners(self) -> list[int]:
        """Numbers of the gateways that owned the run, one after the other."""
        return list(dict.fromkeys(each.record.owner for each in self._all(topics.OWNED_RUNS)))

    def owner_of(self, group_id: str) -> str:
        """Address of the gateway that owns a group; "" if none does."""
        number = group_partition(group_id, partitions=self._configuration.log.group_partitions)
        records: list[OwnedRun] = [each.record for each in self._all(topics.OWNED_RUNS)]
        owners = records[-1].owners if records else ()
        return next((each.url for each in owners if number in each.partitions), "")

    def is_settled(self) -> bool:
        """Whether the last step is trained and every admitted group is retired."""
        has_ended = any(each.record.is_last for each in self._all(topics.TRAINED_STEPS))
        return has_ended and not self.open_groups()

    def open_groups(self) -> set[str]:
        """Groups that are admitted and not retired."""
        return self._ids(topics.ADMITTED_GROUPS) - self._ids(topics.RETIRED_GROUPS)

    def check_end(self, ended: Ended) -> None:
        """An acknowledged end is the one that counts, or the gateway had ended the episode before.

        Raises:
            ViolationError: it is not.
        """
        if not ended.is_certain:
            return
        claim = ended.claim
        first = self._first_ends(claim.group_id).get(claim.index)
        if first is None or first.episode_id != claim.episode_id:
            raise ViolationError(f"{claim.episode_id} ended, and {first} is what counts")
        said = (ended.status, ended.truncated_by)
        if first.status != "failed" and (first.status, first.truncated_by) != said:
            raise ViolationError(f"{claim.episode_id} ended as {said}, and {first} counts")
        is_closed = claim.group_id in self._ids(topics.CLOSED_GROUPS)
        if first.status == "failed" and not is_closed and "lease" not in first.detail:
            raise ViolationError(f"{first} failed, and its agent ended it as {said}")

    def check(self, heard: Heard) -> None:
        """Check all groups of a run that has ended.

        Raises:
            ViolationError: something is not as it must be.
        """
        self._check_owners()
        self._check_accounts(heard)
        self._check_steps()
        self._check_claims(heard)
        self._check_delivered(heard)
        self._check_rewards(heard)
        for each in self._all(topics.SCORED_GROUPS):
            self._check_scored(each.record)
        self._check_deadlines()

    def counts(self) -> dict[str, int]:
        """How often what happened."""
        retired = [each.record for each in self._all(topics.RETIRED_GROUPS)]
        ends = self._ends().values()
        return {
            "owners": len(self.owners()),
            "groups": len(self._ids(topics.ADMITTED_GROUPS)),
            "episodes": len(ends),
            "attempts": len({each.record.episode_id for each in self._all(topics.OPENED_EPISODES)}),
            "closed": len(self._ids(topics.CLOSED_GROUPS)),
            "unclaimed": sum("no agent claimed" in group.detail for group in retired),
            "trained": sum(group.reason == "trained" for group in retired),
            "truncated": sum(end.truncated_by is not None for end in ends),
            "rewarded": sum(len(end.rewards) for end in ends),
        }

    def _check_owners(self) -> None:
        numbers = [each.record.owner for each in self._all(topics.OWNED_RUNS)]
        if self.owners() != list(range(1, len(self.owners()) + 1)) or numbers != sorted(numbers):
            raise ViolationError(f"the run had the owners {numbers}")

    def _check_accounts(self, heard: Heard) -> None:
        """G1: admitted once, retired once; every answered request is one of them, or too late."""
        retired_s = {each.record.group_id: each.at_s for each in self._all(topics.RETIRED_GROUPS)}
        for each in self._all(topics.REQUESTED_GROUPS):
            group = each.record.group_id
            if each.at_s > retired_s.get(group, math.inf) + PAUSE_S + LATE_S:
                raise ViolationError(f"{group} is requested again when it is long over")
        for topic in (
            topics.ADMITTED_GROUPS,
            topics.RETIRED_GROUPS,
            topics.CLOSED_GROUPS,
            topics.SCORED_GROUPS,
        ):
            twice = [group for group, count in self._counted(topic).items() if count > 1]
            if twice:
                raise ViolationError(f"{topic.name} has twice {twice}")
        admitted, retired = self._ids(topics.ADMITTED_GROUPS), self._ids(topics.RETIRED_GROUPS)
        if admitted != retired:
            raise ViolationError(f"admitted or retired only: {admitted ^ retired}")
        if len(set(heard.groups.values())) < len(heard.groups):
            raise ViolationError(f"two keys have one group: {heard.groups}")
        if not admitted <= self._ids(topics.REQUESTED_GROUPS):
            raise ViolationError("a group is admitted that nobody requested")
        lost = set(heard.groups.values()) - admitted - self._asked_at_the_end()
        if lost:
            raise ViolationError(f"requested, acknowledged and never admitted: {lost}")

    def _asked_at_the_end(self) -> set[str]:
        """Groups that still waited for a slot when the last step was trained."""
        asked = list(self._counted(topics.REQUESTED_GROUPS))
        admitted = [asked.index(group) for group in self._ids(topics.ADMITTED_GROUPS)]
        return set(asked[max(admitted, default=-1) + 1 :])

    def _check_steps(self) -> None:
        """G2 and G3: a group in one step at most, full steps, none too stale."""
        trained = {g for each in self._all(topics.TRAINED_STEPS) for g in each.record.group_ids}
        reasons = {
            each.record.group_id: each.record.reason for each in self._all(topics.RETIRED_GROUPS)
        }
        bound = staleness_bounds(self._configuration)[self._queue.domain]
        taken: Counter[str] = Counter()
        for each in self._all(topics.SCHEDULED_STEPS):
            taken.update(group.group_id for group in each.record.groups)
            if len(each.record.groups) != self._queue.groups_per_step:
                raise ViolationError(f"not P groups: {each.record}")
            if any(g.staleness > bound for g in each.record.groups):
                raise ViolationError(f"too stale: {each.record}")
        if set(taken.values()) - {1}:
            raise ViolationError(f"in two steps: {taken}")
        if {group for group, reason in reasons.items() if reason == "trained"} != trained:
            raise ViolationError(f"trained {trained}, retired as {reasons}")

    def _check_claims(self, heard: Heard) -> None:
        """An attempt is one agent's, and its record comes first."""
        opened = {each.record.episode_id for each in self._all(topics.OPENED_EPISODES)}
        for episode_id, gateways in heard.claims.items():
            if len(gateways) > 1:
                raise ViolationError(f"two agents have {episode_id}")
            if episode_id not in opened:
                raise ViolationError(f"{episode_id} is claimed and not on the log")
            if int(episode_id.rsplit(".", 1)[1]) >= self._configuration.episodes.attempts_max:
                raise ViolationError(f"one attempt too many: {episode_id}")

    def _check_delivered(self, heard: Heard) -> None:
        """What an agent had of a run's owner is in the manifest of its episode."""
        ends = self._ends()
        for episode_id, delivered in heard.delivered.items():
            end = ends.get(episode_id)
            kept = set() if end is None else {entry.completion_id for entry in end.manifest}
            if end is not None and end.status == "completed" and not set(delivered) <= kept:
                raise ViolationError(f"{episode_id}: of {delivered} only {kept} counts")

    def _check_rewards(self, heard: Heard) -> None:
        """Every reward that a gateway took is in the end of its episode, and none is twice."""
        for episode_id, end in self._ends().items():
            counted = Counter(reward.reward_id for reward in end.rewards)
            taken = heard.rewarded.get(episode_id, set())
            if end.status == "completed" and not taken <= counted.keys():
                raise ViolationError(f"{episode_id}: of rewards {taken} only {set(counted)} count")
            if set(counted.values()) - {1}:
                raise ViolationError(f"{episode_id}: a reward counts twice: {counted}")

    def _ends(self) -> dict[str, FinishedEpisode]:
        """The ends that count, by episode."""
        return {
            end.episode_id: end
            for group in self._ids(topics.ADMITTED_GROUPS)
            for end in self._first_ends(group).values()
        }

    def _check_scored(self, scored: ScoredGroup) -> None:
        """It has the first end of each index, and advantages over those that completed."""
        ends = self._first_ends(scored.group_id)
        if [score.episode_id for score in scored.episodes] != [
            ends[index].episode_id for index in range(self._queue.group_size)
        ]:
            raise ViolationError(f"{scored.episodes} are not the first ends of their indices")
        earned = {index: self._earned(end) for index, end in ends.items()}
        for score, (index, outcome) in zip(scored.episodes, sorted(earned.items()), strict=True):
            end = ends[index]
            if score.is_masked != (outcome is None) or score.truncated_by != end.truncated_by:
                raise ViolationError(f"{score}, and its end is {end}")
        compared = {i: o for i, o in earned.items() if o is not None and ends[i].manifest}
        expected = {}
        if compared:
            mean = math.fsum(compared.values()) / len(compared)
            expected = {
                entry.completion_id: outcome - mean
                for index, outcome in compared.items()
                for entry in ends[index].manifest
            }
        counted = sum(outcome is not None for outcome in earned.values())
        has_variance = any(abs(value) > 1e-6 for value in expected.values())
        reason = "" if has_variance else "zero_variance"
        if counted < max(2.0, 0.5 * self._queue.group_size):
            reason = "failed"
        found = {each.completion_id: each.advantage for each in scored.completions}
        if scored.not_trainable != reason:
            raise ViolationError(f"{scored} must be trainable, or not: {reason!r}, {expected}")
        if found.keys() != (expected if not reason else {}).keys() or any(
            not math.isclose(value, expected[each], abs_tol=1e-9) for each, value in found.items()
        ):
            raise ViolationError(f"advantages {found}, not {expected}")

    def _earned(self, end: FinishedEpisode) -> float | None:
        """The outcome that counts; None if the episode is masked."""
        treated = self._configuration.rewards.truncated
        if end.status != "completed" or (end.truncated_by is not None and treated == "mask"):
            return None
        if end.truncated_by is not None and treated == "zero":
            return 0.0
        return outcome_of(end.episode_id)

    def _check_deadlines(self) -> None:
        """Groups close a deadline after their first claim; those without any claim expire."""
        claimed_s: dict[str, float] = {}
        for each in self._all(topics.OPENED_EPISODES):
            group = each.record.group_id
            claimed_s[group] = min(each.at_s, claimed_s.get(group, each.at_s))
        closed_s = {each.record.group_id: each.at_s for each in self._all(topics.CLOSED_GROUPS)}
        admitted_s = {e.record.group_id: e.at_s for e in self._all(topics.ADMITTED_GROUPS)}
        for group, at_s in closed_s.items():
            first_s = claimed_s.get(group, math.inf)
            if at_s < first_s + self._queue.group_deadline_s - self._late_s(first_s, at_s):
                raise ViolationError(f"{group} closed at {at_s}, claimed {claimed_s.get(group)}")
        for each in self._all(topics.RETIRED_GROUPS):
            retired: RetiredGroup = each.record
            group, at_s = retired.group_id, each.at_s
            late_s = self._late_s(admitted_s[group], at_s)
            if "no agent claimed" in retired.detail and (
                claimed_s.get(group, math.inf) < at_s - late_s
                or at_s < admitted_s[group] + self._queue.claim_deadline_s - late_s
            ):
                raise ViolationError(f"{retired} at {at_s}, claimed {claimed_s.get(group)}")
            if "not scored within" in retired.detail and not self._has_fault(closed_s[group], at_s):
                raise ViolationError(f"{retired}: closed at {closed_s[group]}, and never scored")

    def _late_s(self, begin_s: float, end_s: float) -> float:
        return LATE_S + PAUSE_S * self._has_fault(begin_s, end_s)

    def _has_fault(self, begin_s: float, end_s: float) -> bool:
        """Whether a fault can have had an effect in this time."""
        return any(begin_s - PAUSE_S - LATE_S <= fault_s <= end_s for fault_s in self._faults_s)

    def check_written(self, emits: Sequence[Emit]) -> None:
        """One gateway ends each episode in one way, and opens each attempt in one way.

        An end whose request was cut off may be on the log: the next request writes it again. So may
        an opening whose agent left: the next agent gets the attempt, with the same key.

        Args:
            emits: What this gateway wrote and knows to stand on the log.

        Raises:
            ViolationError: it wrote another end, or an attempt again.
        """
        ended: dict[tuple[str, int], bytes] = {}
        opened: dict[str, OpenedEpisode] = {}
        for emit in emits:
            match topics.decode(topics.BY_NAME[emit.topic], emit.value):
                case FinishedEpisode() as end:
                    if ended.setdefault((end.group_id, end.index), emit.value) != emit.value:
                        raise ViolationError(f"a gateway ended {end.episode_id} in two ways")
                case OpenedEpisode() as attempt if not attempt.rewards:
                    same = msgspec.structs.replace(attempt, opened_ms=0)
                    if opened.setdefault(attempt.episode_id, same) != same:
                        raise ViolationError(f"a gateway opened {attempt.episode_id} in two ways")

    def _first_ends(self, group_id: str) -> dict[int, FinishedEpisode]:
        """The end of each index that counts: the first on the log."""
        ends: dict[int, FinishedEpisode] = {}
        for each in self._all(topics.FINISHED_EPISODES):
            if each.record.group_id == group_id:
                ends.setdefault(each.record.index, each.record)
        return ends

    def _ids(self, topic: topics.Topic) -> set[str]:
        return set(self._counted(topic))

    def _counted(self, topic: topics.Topic) -> Counter[str]:
        return Counter(each.record.group_id for each in self._all(topic))

    def _all(self, topic: topics.Topic) -> Iterator[Written]:
        for number in range(topics.partition_count(topic, self._configuration)):
            place = broker_place(Place(topic.name, number), run=self._run)
            for entry in committed_records(self._store.all_entries(place)):
                if entry.record is not None:
                    record = topics.decode(topic, entry.record.value)
                    yield Written(entry.record.timestamp_ms / 1000, record)
