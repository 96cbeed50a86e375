"""Grades of conversations that were finished elsewhere, and of live traffic."""

from pathlib import Path

import pytest

from forgemq_contracts import topics
from forgemq_contracts.episodes import ReportedReward
from tests.unit.reward.test_service import Desk, configuration_of


@pytest.mark.parametrize(
    ("source", "masked"),
    [("import", "imported without an outcome"), ("live", "live traffic without an outcome")],
)
async def test_an_import_and_live_traffic_are_graded_by_their_own_outcome_and_else_masked(
    tmp_path: Path, source: str, masked: str
):
    desk = Desk(configuration_of(tmp_path, outcome="user_rewards:outcome"), tmp_path)
    await desk.open()
    rated = (ReportedReward(reward_id="o", name="outcome", value=0.5),)
    untrained = {"size": 1, "purpose": "eval", "source": source}
    async with desk.service():
        await desk.play(0, [], group="g-1", rewards=rated, **untrained)
        await desk.play(0, [], group="g-2", **untrained)
        grades = await desk.records(topics.GRADED_EPISODES, count=2)
        scored = await desk.records(topics.SCORED_GROUPS, count=2)
    assert [(g.grader, g.outcome, g.is_masked, g.detail) for g in grades] == [
        ("reported", 0.5, False, ""),
        ("reported", 0.0, True, masked),
    ]
    assert [(g.not_trainable, g.completions) for g in scored] == [("evaluated", ())] * 2
    assert not (desk.folder / "graded.txt").exists()
    await desk.log.close()
