"""The run file of docs/your_rewards.md: the real service grades its tasks with its functions."""

import json
from pathlib import Path

import pytest

from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.configuration import configuration, document
from forgemq_rendering.tokenizer import FolderTokenizer
from tests.unit.graders.judge_server import judge_server
from tests.unit.reward.test_service import MODEL, Desk

FOLDER = Path("deploy/rewards")
SUM = "```python\ndef add(a, b):\n    return a + b\n```"
HALF = "```python\ndef add(a, b):\n    return 3\n```"
# Domain, number of the task, answer, outcome; None: masked.
ANSWERS = [
    ("maths", 0, "It is \\boxed{0.75}", 1.0),
    ("maths", 0, "It is \\boxed{0.7}", 0.0),
    ("maths", 1, "\\boxed{1 + x(x + 2)}", 1.0),
    ("programs", 0, SUM, 1.0),
    ("programs", 0, HALF, 0.5),
    ("programs", 1, "```\nprint(int(input()) * 2)\n```", 1.0),
    ("programs", 1, "```\nwhile True: print(8)\n```", 0.0),
    ("texts", 0, "Thank you for your careful eyes.", 0.7),
    ("texts", 1, "Score: 10", None),
]


def run_of_the_file() -> RunConfiguration:
    values = document((FOLDER / "run.toml").read_text(), overrides=())
    return configuration(values, run="r", folder=Path.cwd())


@pytest.mark.slow
async def test_each_domain_of_the_run_file_is_graded_by_its_ready_rewards(tmp_path):
    """The judge answers the first text, and is away for the second."""
    run = run_of_the_file()
    tokenizer = FolderTokenizer(MODEL)
    desk = Desk(run, tmp_path)
    await desk.open()
    async with (
        judge_server() as judge,
        desk.service(JUDGE_URL=judge.url, FORGEMQ_REWARD_GRADERS="1"),
    ):
        judge.replies = ["It is kind. Score: 7", 503]
        for number, (domain, task, answer, _) in enumerate(ANSWERS):
            tasks = (FOLDER / "tasks" / f"{domain}.jsonl").read_bytes().splitlines()
            await desk.play(
                0,
                [tokenizer.encode(answer)],
                group=f"g-{number}",
                domain=domain,
                task=tasks[task],
            )
            # One after the other: the second text must not be the judge's first.
            grades = await desk.records(topics.GRADED_EPISODES, count=number + 1)
    await desk.log.close()
    assert [None if one.is_masked else one.outcome for one in grades] == [
        outcome for *_, outcome in ANSWERS
    ], [one.detail for one in grades]
    assert "JudgeError: no score after 3 tries" in grades[-1].detail
    assert len(judge.requests) == 4
    assert {len(one.process) for one in grades if not one.is_masked} == {1}


def test_the_tasks_of_the_run_file_have_what_its_rewards_read():
    fields = {"maths": "answer", "programs": "tests", "texts": "question"}
    queues = {queue.domain: queue for queue in run_of_the_file().queues}
    assert set(queues) == set(fields)
    for domain, field in fields.items():
        lines = Path(queues[domain].task_file).read_text().splitlines()
        assert all(json.loads(line)[field] for line in lines)
