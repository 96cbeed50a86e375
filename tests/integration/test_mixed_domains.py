"""A run of two domains with stages and a curriculum, started as a user starts it, and replayed."""

import asyncio
import io
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest
from rich.console import Console

from forgemq_agents.core.known_tasks import KnownTasks
from forgemq_agents.core.samplers import success_band
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.kept_records import message_of, read_all
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.groups import AdmittedGroup, RequestedGroup, RetiredGroup
from forgemq_contracts.mixture import mixture_of, staleness_bounds
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledStep
from forgemq_contracts.topic import Topic
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.run_folder import RunFolder
from tests.integration.launched_run import LaunchedRun
from tests.integration.stand_in import stand_in_engine

MIXED = "tests/integration/dialogue/mixed.toml"

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(420)]


class MixedRun:
    """The run, ended; it was interrupted in the second stage and resumed."""

    def __init__(self, launched: LaunchedRun, run_id: str, kafka: str) -> None:
        self._kafka, self._run_id, self._runs = kafka, run_id, launched.runs
        self.report = launched.report(run_id)
        self.configuration: RunConfiguration = RunFolder(launched.runs / run_id).configuration()

    def records(self, topic: Topic) -> list[msgspec.Struct]:
        """All records of a topic, in the order of its partitions."""

        async def read() -> list[msgspec.Struct]:
            log = KafkaLog(KafkaConnection(bootstrap=self._kafka), run=self._run_id)
            try:
                places = partitions_of(topic, self.configuration)
                batches = [batch async for batch in read_all(log, places)]
                return [message_of(record).record for batch in batches for record in batch]
            finally:
                await log.close()

        return asyncio.run(read())

    def replay(self) -> tuple[int, Sequence[str]]:
        environ = {
            "FORGEMQ_LAUNCHER_RUNS": str(self._runs),
            "PATH": os.environ["PATH"],
            "FORGEMQ_KAFKA": self._kafka,
        }
        console = Console(file=io.StringIO(), width=200)
        status = run_tool(("replay", self._run_id), environ=environ, console=console)
        return status, console.file.getvalue().splitlines()


@pytest.fixture(scope="module")
def run(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> MixedRun:
    run_id = new_run_id()
    launched = LaunchedRun(tmp_path_factory.mktemp("mixed"), {"FORGEMQ_KAFKA": kafka_bootstrap})
    with stand_in_engine(latency_s=0.05, tokens=8) as engine:
        environ = {"FORGEMQ_ENGINE_URL": engine}
        try:
            launched.start(MIXED, f"run={run_id}", environ=environ)
            launched.wait_for_line("step 4 trained", within_s=150)
            launched.launcher.send_signal(signal.SIGINT)
            launched.wait_for_end(within_s=60)
            launched.start(MIXED, f"run={run_id}", "--resume", run_id, environ=environ)
            launched.wait_for_end(within_s=200)
            return MixedRun(launched, run_id, kafka_bootstrap)
        finally:
            launched.close()


def test_each_step_has_the_shares_of_its_stage_and_the_guarantees_hold(run: MixedRun):
    steps = [each for each in run.records(topics.SCHEDULED_STEPS)]
    bounds = staleness_bounds(run.configuration)
    mixture = mixture_of(run.configuration)
    found = []
    for step in steps:
        assert isinstance(step, ScheduledStep)
        counts = Counter(group.domain for group in step.groups)
        found.append((step.stage, counts["talk"], counts["chat"]))
        assert mixture.groups(step.step) == (counts["talk"], counts["chat"])
        assert all(group.staleness <= bounds[group.domain] for group in step.groups)
    assert found == [
        (0, 3, 1),
        (0, 2, 2),
        (0, 3, 1),
        (0, 2, 2),
        (1, 4, 0),
        (1, 4, 0),
        (2, 1, 3),
        (2, 1, 3),
    ]
    held = {guarantee for guarantee, holds in run.report["guarantees"].items() if holds}
    # The engine stands in for one: G5 compares with its noise.
    assert held >= {"G1", "G2", "G3", "G4"}, run.report["guarantees_checked"]


def test_a_group_has_the_difficulty_and_the_limit_of_its_stage(run: MixedRun):
    requested = {r.group_id: r for r in run.records(topics.REQUESTED_GROUPS)}
    admitted = [a for a in run.records(topics.ADMITTED_GROUPS) if a.domain == "chat"]
    limits = {
        opened.group_id: opened.context_tokens_max for opened in run.records(topics.OPENED_EPISODES)
    }
    assert {a.stage for a in admitted} == {0, 2}
    for group in admitted:
        assert isinstance(group, AdmittedGroup)
        request = requested[group.group_id]
        assert isinstance(request, RequestedGroup)
        assert group.stage == request.stage
        difficulty = msgspec.json.decode(group.task)["difficulty"]
        assert difficulty == (2 if group.stage == 2 else 0)
        if group.group_id in limits:
            assert limits[group.group_id] == (300 if group.stage == 2 else 372)


def test_every_choice_of_the_curriculum_follows_from_the_log(run: MixedRun):
    groups = sorted(
        (r for r in run.records(topics.REQUESTED_GROUPS) if r.domain == "talk"),
        key=lambda r: int(r.idempotency_key.split("/")[1]),
    )
    retired = [r for r in run.records(topics.RETIRED_GROUPS) if isinstance(r, RetiredGroup)]
    results = sorted((r.result for r in retired if r.result), key=lambda each: each.index)
    assert [each.index for each in results] == list(range(len(results)))
    assert max(group.results_known for group in groups) > 5
    curriculum = run.configuration.queues[0].curriculum
    assert curriculum is not None
    for number, group in enumerate(groups):
        tasks = KnownTasks(20, versions=curriculum.versions)
        for earlier, before in enumerate(groups[:number]):
            tasks.ask(earlier, before.task_number)
        tasks.learn(results[: group.results_known])
        key = f"{run.configuration.seed}/talk/{number}"
        assert success_band(tasks, key=key, curriculum=curriculum) == group.task_number


def test_a_replay_makes_the_same_choices(run: MixedRun):
    status, lines = run.replay()
    assert status == 0, lines
    assert sum(line.endswith("equal") for line in lines) >= 3
