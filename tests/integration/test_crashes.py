"""kill -9 of services during a run, on the real broker: nothing is lost, nothing counts twice."""

import os
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from forgemq_contracts.topics import (
    CANCELLED_COMPLETIONS,
    OWNED_RUNS,
    REPORTED_ENGINES,
    REPORTED_GATEWAYS,
    SAMPLED_CHUNKS,
)
from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.run_log import accounts, first_offsets
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

SERVICES = ("trainer", "scheduler", "merger", "reward", "inference", "gateway", "agents")
STEPS_BETWEEN_KILLS = 2

READERS = ("merger", "reward", "gateway", "auditor", "trainer", "scheduler")
ALL_THE_TIME = {
    "FORGEMQ_AUDITOR_TRIM_EVERY_S": "0.5",
    "FORGEMQ_TRANSFORM_SNAPSHOT_EVERY_S": "1",
    "FORGEMQ_GATEWAY_MARK_EVERY_S": "0.5",
    "FORGEMQ_REWARD_COMMIT_EVERY_S": "0.5",
    "FORGEMQ_AUDITOR_AUDIT_EVERY_S": "0.5",
}


def kill_one_after_another(run: LaunchedRun, services: Sequence[str]) -> None:
    """Kill one service after every second step, so that each kill meets a run that trains again."""
    for number, service in enumerate(services):
        run.wait_for_line(rf"step {STEPS_BETWEEN_KILLS * number} trained", within_s=180)
        os.kill(run.pid_of(service, within_s=60), signal.SIGKILL)


def deaths(story: str) -> Counter[str]:
    """Number of deaths that the launcher saw, by service and cause."""
    lines = re.findall(r"s  (\S+) (was killed by \S+|ended with status \d+);", story)
    return Counter(f"{name.removesuffix('-0')} {how}" for name, how in lines)


def play_with_kills(
    services: Sequence[str],
    *,
    run_id: str,
    folder: Path,
    kafka: str,
    engine_url: str,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> tuple[LaunchedRun, int]:
    """Play a run and kill each of the services once; returns the run and its exit status."""
    where = {"FORGEMQ_KAFKA": kafka, "FORGEMQ_ENGINE_URL": engine_url}
    run = LaunchedRun(folder, {**where, **environ})
    steps = STEPS_BETWEEN_KILLS * len(services)
    try:
        run.start(DIALOGUE, f"run={run_id}", f"trainer.steps={steps}", *overrides)
        kill_one_after_another(run, services)
        status = run.wait_for_end(within_s=300)
        assert run.left_behind() == []
    finally:
        run.close()
    assert deaths(run.output()) == {f"{each} was killed by SIGKILL": 1 for each in services}
    log = accounts(kafka, run=run_id, blobs=str(run.blobs(run_id)))
    log.assert_exactly_once()
    assert len(log.surviving_steps()) == steps
    return run, status


@pytest.mark.long
def test_a_run_survives_one_kill_of_every_service(kafka_bootstrap, new_run_id, tmp_path):
    run_id = new_run_id()
    with stand_in_engine(latency_s=0.2, tokens=16) as engine_url:
        run, status = play_with_kills(
            SERVICES,
            run_id=run_id,
            folder=tmp_path,
            kafka=kafka_bootstrap,
            engine_url=engine_url,
            overrides=["log.keep_for_replay=true"],
        )
    assert set(first_offsets(kafka_bootstrap, run=run_id).values()) == {0}
    report = run.report(run_id)
    held = {guarantee for guarantee, holds in report["guarantees"].items() if holds}
    # The stand-in's log-probabilities are noise, so G5 fails and the exit status is 1.
    assert held == {"G1", "G2", "G3", "G4"}, report["guarantees_checked"]
    assert status == 1
    assert report["groups_open"] == 0
    assert report["staleness_max"] <= report["staleness_bound"] == 2


@pytest.mark.long
def test_a_run_that_is_trimmed_all_the_time_survives_one_kill_of_every_service(
    kafka_bootstrap, new_run_id, tmp_path
):
    run_id = new_run_id()
    with stand_in_engine(latency_s=0.2, tokens=16) as engine_url:
        run, _ = play_with_kills(
            READERS,
            run_id=run_id,
            folder=tmp_path,
            kafka=kafka_bootstrap,
            engine_url=engine_url,
            environ=ALL_THE_TIME,
        )
    first = first_offsets(kafka_bootstrap, run=run_id)
    untouched = {place.topic for place, offset in first.items() if offset == 0}
    # These may be untouched: fewer heartbeats and owners were written than are kept, few
    # cancellations, and chunks only for streams that are live.
    kept = (REPORTED_ENGINES, REPORTED_GATEWAYS, OWNED_RUNS)
    few = {topic.name for topic in (*kept, CANCELLED_COMPLETIONS, SAMPLED_CHUNKS)}
    assert untouched <= few, first
    report = run.report(run_id)
    held = {guarantee for guarantee, holds in report["guarantees"].items() if holds}
    assert held == {"G1", "G2", "G3", "G4"}, report["guarantees_checked"]
    log = accounts(kafka_bootstrap, run=run_id, blobs=str(run.blobs(run_id)))
    trained = {each for step in log.surviving_steps().values() for each in step.group_ids}
    samples = sum(len(group.completions) for group in log.scored if group.group_id in trained)
    assert (report["samples"], report["groups_open"]) == (samples, 0)
    assert len(log.trees) < len(trained)
    assert report["completions"] >= samples


def test_a_run_on_the_real_engine_survives_kills_with_every_guarantee(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path
):
    run_id = new_run_id()
    run, status = play_with_kills(
        ("inference", "trainer", "gateway"),
        run_id=run_id,
        folder=tmp_path,
        kafka=kafka_bootstrap,
        engine_url=base_engine_url,
    )
    report = run.report(run_id)
    assert status == 0, run.story()
    assert report["guarantees"] == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert report["groups_open"] == 0
