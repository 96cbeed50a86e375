"""A run that trains while each of its services goes from one process to three and back to one."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from forgemq_contracts import topics
from tests.integration.hand_run import HandRun, ServiceProcess
from tests.integration.launched_run import DIALOGUE
from tests.integration.run_log import accounts

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(3600)]

PARTITIONS = 3
STEPS = 60
PACED_TOOL_S = 2.0
"""Pause of the agents between turns while services are scaled: about 5 steps a minute, so that the
run is not over before."""
SHARED_TOOL_S = 0.7
"""While agents are scaled: what one process leaves, another one plays within HAND_OVER_S_MAX."""
QUICK_TOOL_S = 0.02
"""Afterwards."""

SESSION_S = 60.0
"""After so long the broker takes a silent process for dead."""

HAND_OVER_S_MAX = 30.0
"""From SIGTERM until the others do the work. Without a word from who leaves it takes SESSION_S, and
LEASE_S for what agents play."""

LEASE_S = 60.0
"""After so long the episode of a silent agent is free."""

SHARED_S_MAX = 120.0
"""From the start of a process until it has a share, on a machine with other work."""

END_S_MAX = 1800.0

ALL_THE_TIME = {
    "FORGEMQ_AUDITOR_AUDIT_EVERY_S": "1",
    "FORGEMQ_AUDITOR_TRIM_EVERY_S": "1",
    "FORGEMQ_GATEWAY_MARK_EVERY_S": "1",
    "FORGEMQ_REWARD_COMMIT_EVERY_S": "1",
}
"""So that what a hand-over might lose is deleted before the next one."""

LEAVE_TURNS = {"agents", "gateway"}
"""Agents that end leave the turns for which they wait. A gateway that ends answers for 5 s more,
and a turn may take longer on a busy machine; its agent asks again."""

ENDED_WELL = {"trained", "zero_variance", "cancelled"}
"""A group fails or expires only if something of it is lost."""


def held(process: ServiceProcess, *names: str, of: str) -> list[int]:
    """Partitions in the newest of these events."""
    events = process.events(*names)
    return list(events[-1][of]) if events else []


def transforms(process: ServiceProcess) -> list[int]:
    return held(process, "assigned", "revoked", of="held")


def grades(process: ServiceProcess) -> list[int]:
    return held(process, "grading_assigned", of="partitions")


def audits(process: ServiceProcess) -> bool:
    events = process.events("active", "standing_by")
    return bool(events) and events[-1]["event"] == "active"


def is_divided(parts: Sequence[Sequence[int]]) -> bool:
    """Whether everybody has a part, and each partition is in one of them."""
    return all(parts) and sorted(n for part in parts for n in part) == list(range(PARTITIONS))


def reward_is_shared(run: HandRun, processes: Sequence[ServiceProcess]) -> bool:
    return (
        is_divided([transforms(each) for each in processes])
        and is_divided([grades(each) for each in processes])
        and run.members("reward") == run.members("reward-grading") == len(processes)
    )


def merger_is_shared(run: HandRun, processes: Sequence[ServiceProcess]) -> bool:
    divided = is_divided([transforms(each) for each in processes])
    return divided and run.members("merger") == len(processes)


def one_schedules(run: HandRun, processes: Sequence[ServiceProcess]) -> bool:
    active = [each for each in processes if transforms(each)]
    return len(active) == 1 and run.members("scheduler") == len(processes)


def one_audits(run: HandRun, processes: Sequence[ServiceProcess]) -> bool:
    active = [each for each in processes if audits(each)]
    return len(active) == 1 and run.members("auditor") == len(processes)


def gateways_own(run: HandRun, processes: Sequence[ServiceProcess]) -> bool:
    owners = run.records(topics.OWNED_RUNS)[-1].owners
    parts = [owner.partitions for owner in owners if owner.partitions]
    restored = [each for each in processes if each.events("restored")]
    return is_divided(parts) and len(parts) == len(restored) == len(processes)


class Players:
    """Sees at each change of the agents' processes whether all play, and nothing is left behind."""

    def __init__(self) -> None:
        self._played: Counter[int] = Counter()
        self._opened: set[tuple[str, int]] | None = None

    def all_play(self, run: HandRun, processes: Sequence[ServiceProcess]) -> bool:
        """Whether each finished an episode since, and all that was open at the change is finished.

        Leases last for LEASE_S: what a process that goes does not give back stays open.
        """
        if self._opened is None:
            self._opened = {(e.group_id, e.index) for e in run.records(topics.OPENED_EPISODES)}
        ended = run.records(topics.FINISHED_EPISODES)
        results = [msgspec.json.decode(each.result) for each in ended if each.result]
        played = Counter(result["process"] for result in results)
        has_news = all(played[each.pid] > self._played[each.pid] for each in processes)
        if not has_news or not self._opened <= {(each.group_id, each.index) for each in ended}:
            return False
        self._played, self._opened = played, None
        return True


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """How the processes of one service share its work.

    Attributes:
        service: Its name.
        written: Topic that grows in every partition while the work is done.
        is_shared: Whether these processes do the work, and no others.
        has_work: Whether others take something over when this process goes.
    """

    service: str
    written: topics.Topic
    is_shared: Callable[[HandRun, Sequence[ServiceProcess]], bool]
    has_work: Callable[[ServiceProcess], Any] = lambda _: True

    def go_to_three_and_back(self, run: HandRun) -> None:
        """Start two more processes, one after the other, and stop the two that were first."""
        for _ in range(2):
            run.start(self.service)
            self._wait(run, within_s=SHARED_S_MAX)
        self._wait_for_work(run)
        for _ in range(2):
            leaving = next(each for each in run.running(self.service) if self.has_work(each))
            assert leaving.stop(within_s=HAND_OVER_S_MAX) == 0, leaving.story()
            self._wait(run, within_s=HAND_OVER_S_MAX)

    def _wait(self, run: HandRun, *, within_s: float) -> None:
        processes = run.running(self.service)
        run.wait_for(
            lambda: self.is_shared(run, processes),
            within_s=within_s,
            what=f"{self.service} is shared by {len(processes)}",
        )

    def _wait_for_work(self, run: HandRun) -> None:
        before = run.ends(self.written)

        def all_grow() -> bool:
            return all(end > before[number] for number, end in run.ends(self.written).items())

        what = f"{self.written.name} grows in every partition"
        run.wait_for(all_grow, within_s=SHARED_S_MAX, what=what)


SCALED = (
    Scaled(service="gateway", written=topics.DELIVERED_COMPLETIONS, is_shared=gateways_own),
    Scaled(service="reward", written=topics.GRADED_EPISODES, is_shared=reward_is_shared),
    Scaled(service="merger", written=topics.MERGED_GROUPS, is_shared=merger_is_shared),
    Scaled(
        service="scheduler",
        written=topics.SCHEDULED_STEPS,
        is_shared=one_schedules,
        has_work=transforms,
    ),
    Scaled(service="auditor", written=topics.AUDITED_GROUPS, is_shared=one_audits, has_work=audits),
    Scaled(service="agents", written=topics.FINISHED_EPISODES, is_shared=Players().all_play),
)

ONE_OF_EACH = ("gateway", "inference", "scheduler", "reward", "merger", "trainer", "auditor")


def test_every_service_goes_from_one_process_to_three_and_back_and_nothing_is_lost_or_doubled(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path
):
    """One service after the other, in one run; those that were first are those that go."""
    pace = tmp_path / "pace"
    pace.write_text(str(PACED_TOOL_S))
    run = HandRun(
        new_run_id(),
        folder=tmp_path,
        bootstrap=kafka_bootstrap,
        engine_url=base_engine_url,
        environ={
            "FORGEMQ_KAFKA_SESSION_TIMEOUT_S": str(SESSION_S),
            "PACE_FILE": str(pace),
            **ALL_THE_TIME,
        },
    )
    try:
        run.create(
            DIALOGUE,
            f"trainer.steps={STEPS}",
            f"log.group_partitions={PARTITIONS}",
            "evaluation.tasks=0",
            f"episodes.lease_s={LEASE_S}",
            "episodes.concurrent_max=8",
            'queues.dialogue.agent="dialogue:play_at_pace"',
        )
        for service in (*ONE_OF_EACH, "agents"):
            run.start(service)
        end = run.start_end()
        run.wait_for(
            lambda: len(run.records(topics.TRAINED_STEPS)) > 1, within_s=300, what="a step trains"
        )
        for scaled in SCALED:
            if scaled.service == "agents":
                pace.write_text(str(SHARED_TOOL_S))
            cancelled = run.ends(topics.CANCELLED_COMPLETIONS)
            scaled.go_to_three_and_back(run)
            if scaled.service not in LEAVE_TURNS:
                assert run.ends(topics.CANCELLED_COMPLETIONS) == cancelled, scaled.service
        trained = len(run.records(topics.TRAINED_STEPS))
        assert trained < STEPS - 1, "the run was over before all services were scaled"
        pace.write_text(str(QUICK_TOOL_S))
        (agents,) = run.running("agents")
        run.wait_for(
            lambda: agents.status() is not None and end.status() is not None,
            within_s=END_S_MAX,
            what="the run ends",
        )
        for service in ONE_OF_EACH:
            (process,) = run.running(service)
            assert process.stop(within_s=HAND_OVER_S_MAX) == 0, process.story()
        assert_nothing_lost_or_doubled(run, bootstrap=kafka_bootstrap)
    finally:
        run.close()


def assert_nothing_lost_or_doubled(run: HandRun, *, bootstrap: str) -> None:
    report = run.report()
    held = dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert report["guarantees"] == held, report["guarantees_checked"]
    assert (report["steps"], report["groups_open"]) == (STEPS, 0)
    assert report["staleness_max"] <= report["staleness_bound"]
    log = accounts(bootstrap, run=run.run_id, blobs=run.blobs, layout=run.configuration)
    log.assert_exactly_once()
    assert list(log.surviving_steps()) == list(range(STEPS))
    assert {group.reason for group in log.retired} <= ENDED_WELL
    ended = Counter(
        (episode.group_id, episode.index) for episode in run.records(topics.FINISHED_EPISODES)
    )
    assert set(ended.values()) == {1}
