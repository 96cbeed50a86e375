"""The real reward service grades episodes of each domain by what the run file names."""

import json
import random
from pathlib import Path

import pytest
from four_domains import demonstrator
from four_domains.demonstrator import FLAWLESS
from four_domains.tasks import DRAWS, task

from forgemq_contracts import topics
from forgemq_launcher.core.configuration import configuration, document
from forgemq_rendering.tokenizer import FolderTokenizer
from tests.unit.reward.test_service import MODEL, Desk

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
async def test_each_domain_is_graded_by_the_functions_of_its_queue(tmp_path):
    values = document((ROOT / "deploy/four_domains/run.toml").read_text(), overrides=())
    desk = Desk(configuration(values, run="r", folder=ROOT), tmp_path)
    tokenizer = FolderTokenizer(MODEL)
    await desk.open()
    async with desk.service(FORGEMQ_REWARD_GRADERS="1"):
        for number, domain in enumerate(DRAWS):
            drawn = task(0, domain, 0)
            turns = demonstrator.turns(domain, drawn, random.Random(0), FLAWLESS)
            right = [tokenizer.encode(text) for text, _ in turns]
            given = {"domain": domain, "task": json.dumps(drawn).encode()}
            await desk.play(0, right, group=f"g-right-{number}", **given)
            await desk.play(0, right[:-1] or [[5, 6]], group=f"g-wrong-{number}", **given)
        grades = await desk.records(topics.GRADED_EPISODES, count=2 * len(DRAWS))
    await desk.log.close()
    assert not [one.detail for one in grades if one.is_masked]
    outcomes = {one.episode_id.partition(".")[0]: one for one in grades}
    for number in range(len(DRAWS)):
        assert outcomes[f"g-right-{number}"].outcome == 1.0
        assert outcomes[f"g-wrong-{number}"].outcome < 0.5
    booked = outcomes[f"g-right-{tuple(DRAWS).index('bookings')}"]
    assert booked.speed > 0.0
    assert {each.value for each in booked.process} == {0.0}
