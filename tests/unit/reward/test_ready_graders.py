"""The reward service grades with ready process rewards as with a user's own functions."""

from forgemq_contracts import topics
from tests.unit.reward.test_service import Desk, configuration_of

CODE = """
from forgemq_graders import malformed_calls, overlong, weighted

process = weighted((0.5, overlong(tokens_max=3, buffer_tokens=2)), (1.0, malformed_calls))
"""


async def test_a_queue_may_name_a_weighted_sum_of_ready_process_rewards(tmp_path):
    """Outputs of 1, 2 and 3 tokens: half of 0, 0.5 and 1 is taken."""
    desk = Desk(configuration_of(tmp_path, process="composed:process"), tmp_path)
    await desk.open()
    (tmp_path / "composed.py").write_text(CODE)
    async with desk.service():
        await desk.play(0, [[5], [5, 6], [5, 6, 7]])
        (grade,) = await desk.records(topics.GRADED_EPISODES, count=1)
    await desk.log.close()
    assert (grade.is_masked, grade.detail) == (False, "")
    assert [reward.value for reward in grade.process] == [0.0, -0.25, -0.5]
