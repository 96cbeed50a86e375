"""Grades of conversations that were finished elsewhere."""

from pathlib import Path

from forgemq_contracts import topics
from forgemq_contracts.episodes import ReportedReward
from tests.unit.reward.test_service import Desk, configuration_of


async def test_an_imported_conversation_is_graded_by_its_own_outcome_and_else_masked(
    tmp_path: Path,
):
    desk = Desk(configuration_of(tmp_path, outcome="user_rewards:outcome"), tmp_path)
    await desk.open()
    rated = (ReportedReward(reward_id="o", name="outcome", value=0.5),)
    imported = {"size": 1, "purpose": "eval", "source": "import"}
    async with desk.service():
        await desk.play(0, [], group="g-1", rewards=rated, **imported)
        await desk.play(0, [], group="g-2", **imported)
        grades = await desk.records(topics.GRADED_EPISODES, count=2)
        scored = await desk.records(topics.SCORED_GROUPS, count=2)
    assert [(g.grader, g.outcome, g.is_masked, g.detail) for g in grades] == [
        ("reported", 0.5, False, ""),
        ("reported", 0.0, True, "imported without an outcome"),
    ]
    assert [(g.not_trainable, g.completions) for g in scored] == [("evaluated", ())] * 2
    assert not (desk.folder / "graded.txt").exists()
    await desk.log.close()
