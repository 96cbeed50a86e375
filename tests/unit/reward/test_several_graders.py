"""Several grader processes: how many there are, and that they grade at the same time."""

import pytest

from forgemq_contracts import topics
from forgemq_reward.settings import RewardSettings, grader_count
from tests.unit.reward.test_service import Desk, configuration_of

CODE = """
import pathlib
import time

def meets_its_sibling(episode):
    here = pathlib.Path(__file__).with_name("met")
    here.mkdir(exist_ok=True)
    (here / episode.episode_id).touch()
    while len(list(here.iterdir())) < 2:
        time.sleep(0.01)
    return 1.0
"""


@pytest.mark.slow
async def test_by_default_an_episode_is_graded_while_the_grader_of_another_one_waits(tmp_path):
    """Each grader returns only once the other one was called."""
    desk = Desk(configuration_of(tmp_path, outcome="meeting:meets_its_sibling"), tmp_path)
    await desk.open()
    (tmp_path / "meeting.py").write_text(CODE)
    async with desk.service(FORGEMQ_REWARD_GRADERS="0"):
        await desk.play(0, [[5]])
        await desk.play(1, [[6]])
        grades = await desk.records(topics.GRADED_EPISODES, count=2)
    await desk.log.close()
    assert [(grade.outcome, grade.is_masked) for grade in grades] == [(1.0, False)] * 2


@pytest.mark.parametrize(
    ("named", "cores", "count"), [(0, 1, 2), (0, 8, 8), (0, 96, 16), (1, 8, 1), (200, 8, 200)]
)
def test_graders_follow_the_cores_unless_a_setting_names_their_number(named, cores, count):
    assert grader_count(RewardSettings(graders=named), cores=cores) == count
