"""The reward service grades with ready functions as with a user's own."""

import msgspec
import pytest

from forgemq_contracts import topics
from forgemq_rendering.tokenizer import FolderTokenizer
from tests.unit.reward.test_service import MODEL, Desk, configuration_of

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


@pytest.mark.slow
async def test_a_queue_may_name_a_ready_outcome(tmp_path):
    """A right and a wrong answer are scored; a right answer that cannot be read masks."""
    desk = Desk(configuration_of(tmp_path, outcome="forgemq_graders:math_answer"), tmp_path)
    await desk.open()
    output = FolderTokenizer(MODEL).encode("2 + 2 = $4$")
    async with desk.service():
        for index, answer in enumerate(("4", "5", "")):
            await desk.play(index, [output], task=msgspec.json.encode({"answer": answer}))
        grades = await desk.records(topics.GRADED_EPISODES, count=3)
    await desk.log.close()
    found = {grade.episode_id: (grade.outcome, grade.is_masked) for grade in grades}
    assert found == {"g-1.0.0": (1.0, False), "g-1.1.0": (0.0, False), "g-1.2.0": (0.0, True)}
    details = [grade.detail for grade in grades if grade.is_masked]
    assert details == [
        "outcome raised GoldAnswerError: the right answer '': no expression is in it"
    ]
