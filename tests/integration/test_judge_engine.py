"""A judge on a real engine: SGLang's own chat completions, asked once for equal questions."""

import pytest

from forgemq_graders import Judge, JudgeError, judged, judged_turns
from forgemq_settings.ports import free_port
from tests.unit.graders.episodes import answered

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def letters(reply: str) -> float:
    """A score that any model can give: the base model writes no numbers on demand."""
    if not reply:
        raise ValueError("an empty reply has no score")
    return min(len(reply), 200)


async def test_a_real_engine_scores_outcomes_and_turns_and_its_replies_are_kept(
    base_engine_url, tmp_path
):
    judge = Judge(
        url=f"{base_engine_url}/v1",
        model="policy",
        sampling={"max_tokens": 12},
        cache=str(tmp_path / "replies.sqlite"),
    )
    episode = answered("The total is 12.", "The total is 99.")
    outcome = judged(judge, prompt="How much for 2 pen? {answer}", score=letters, scale=200.0)
    turns = judged_turns(judge, prompt="How much for 2 pen? {turn}", score=letters, scale=200.0)
    first, by_turn = await outcome(episode), await turns(episode)
    assert 0 < first <= 1
    assert len(by_turn) == 2
    assert by_turn[1] == first, "the same question about the last turn: the kept reply"
    # Another process of the machine, with nobody to ask, has the kept replies.
    away = f"http://127.0.0.1:{free_port()}/v1"
    kept = judged(
        Judge(
            url=away, model="policy", sampling={"max_tokens": 12}, cache=judge.cache, tries_max=1
        ),
        prompt="How much for 2 pen? {answer}",
        score=letters,
        scale=200.0,
    )
    assert await kept(episode) == first
    with pytest.raises(JudgeError, match="no score after 1 tries"):
        await kept(answered("Something else."))
