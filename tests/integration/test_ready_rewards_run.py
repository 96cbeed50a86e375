"""A whole run of docs/your_rewards.md's run file: three domains, each with a ready reward.

The tiny model answers nothing right, so what differs inside a group is its habits, and in the
domain of texts the judge's score.
"""

import asyncio
from collections import defaultdict

import pytest

from forgemq_contracts import topics
from tests.integration.fleet_run import FleetRun
from tests.unit.graders.judge_server import judge_server

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1500)]

SCORES = 500
"""Replies that the judge has ready, far more than two steps ask for."""


async def test_the_run_file_of_ready_rewards_trains_on_all_three_domains(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path
):
    async with judge_server() as judge:
        judge.replies = [f"Score: {number % 11}" for number in range(SCORES)]
        fleet = FleetRun.on(
            kafka_bootstrap,
            new_run_id(),
            tmp_path / "run",
            steps=2,
            environ={"FORGEMQ_ENGINE_URL": base_engine_url, "JUDGE_URL": judge.url},
        )
        await asyncio.to_thread(fleet.play, run_file="deploy/rewards/run.toml")
    await asyncio.to_thread(check_grades, fleet, judged=len(judge.requests))


def check_grades(fleet: FleetRun, *, judged: int) -> None:
    """Every domain was graded by its reward, and trained in each step."""
    domains = {group.group_id: group.domain for group in fleet.records(topics.REQUESTED_GROUPS)}
    graded = defaultdict(list)
    for grade in fleet.records(topics.GRADED_EPISODES):
        graded[domains[grade.group_id]].append(grade)
    assert set(graded) == {"maths", "programs", "texts"}
    for domain, grades in graded.items():
        assert not any(grade.is_masked for grade in grades), (domain, grades[0].detail)
        assert {len(grade.process) for grade in grades} == {1}
    # Scores of the judge are tenths, and not all the same.
    assert len({round(grade.outcome * 10) for grade in graded["texts"]}) > 1
    # Equal answers to one question are asked once; a text that ran into a limit earns 0 unasked.
    assert 0 < judged <= len(graded["texts"])
    for step in fleet.records(topics.TRAINED_STEPS):
        assert {domains[group] for group in step.group_ids} == {"maths", "programs", "texts"}
