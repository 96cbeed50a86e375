"""The whole reward service on a log in memory: real grader processes, the demo's tokenizer."""

import asyncio
import io
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import dead_letters_of, partition_counts
from forgemq_contracts import topics
from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode
from forgemq_contracts.groups import RetiredGroup, ScoredGroup
from forgemq_contracts.run import (
    LogLayout,
    Model,
    Queue,
    Rewards,
    RunConfiguration,
    StartedRun,
    Trainer,
)
from forgemq_rendering.tokenizer import FolderTokenizer
from forgemq_reward.app import CONSUMES, PRODUCES, main
from forgemq_reward.grader_process import GraderRefusedError
from forgemq_settings.environment import SettingsError
from forgemq_shell.dead_letters import letter_of
from forgemq_shell.service import Context
from forgemq_telemetry import Telemetry
from tests.lost_values import LosingStore, log_with, write_lost
from tests.small_run import small_run
from tests.unit.reward.records import finished_completion, finished_episode

MODEL = Path("deploy/demo/model")
PARTITION = 1
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
TOOLS = msgspec.json.encode(
    [
        {
            "type": "function",
            "function": {
                "name": "price",
                "description": "",
                "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
            },
        }
    ]
)
QUICK = {"FORGEMQ_REWARD_COMMIT_EVERY_S": "0.05", "FORGEMQ_REWARD_GRADERS": "1"}
CODE = """
import pathlib

def outcome(episode):
    with pathlib.Path(__file__).with_name("graded.txt").open("a") as file:
        print(episode.episode_id, file=file)
    calls = [len(c.message.get("tool_calls", ())) for c in episode.completions]
    contents = [m["content"] for c in episode.completions for m in c.messages_before]
    assert contents == ["go"] * len(calls), contents
    return sum(calls) if episode.task == {"item": "lamp"} else 100.0
"""


def configuration_of(folder: Path, **queue: str) -> RunConfiguration:
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path=str(MODEL), context_tokens_max=372),
        queues=(Queue(domain="d", task_source="", agent="", group_size=2, **queue),),
        trainer=Trainer(steps=1),
        rewards=Rewards(grader_timeout_s=20.0),
        log=LogLayout(group_partitions=2),
        code_paths=(str(folder),),
    )


class Desk:
    """A log, and the records that other services write to it."""

    def __init__(self, configuration: RunConfiguration, folder: Path) -> None:
        self.configuration = configuration
        self.folder = folder
        self.log = MemoryLog(run="r")
        self.lines = io.StringIO()

    async def open(self) -> None:
        (self.folder / "user_rewards.py").write_text(CODE)
        await self.log.create_topics(partition_counts(small_run(group_partitions=2)))
        self.writer = await self.log.writer()

    @asynccontextmanager
    async def service(self, **environ: str) -> AsyncIterator[None]:
        """Run the service on its own handle of the log, as a separate process would."""
        stop = asyncio.Event()
        log = self.log.open()
        context = Context(
            started=StartedRun(
                run="r", configuration=self.configuration, blobs="memory://r", started_ms=0
            ),
            log=log,
            blobs=BlobStore("memory://r", run="r"),
            telemetry=Telemetry(service="reward", stream=self.lines),
            stop=stop,
            environ={**os.environ, **QUICK, **environ},
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(main(context))
            yield
            stop.set()
        await log.close()

    async def write(self, topic: topics.Topic, record: msgspec.Struct, *, key: str = "") -> int:
        value = topics.encode(record)
        emit = Emit(topic=topic.name, partition=PARTITION, key=key.encode(), value=value)
        return await self.writer.write(emit)

    async def play(
        self, index: int, outputs: Sequence[Sequence[int]], **episode
    ) -> FinishedEpisode:
        group = episode.get("group", "g-1")
        offsets = [
            await self.write(
                topics.FINISHED_COMPLETIONS,
                finished_completion(
                    index,
                    sequence,
                    group=group,
                    output=output,
                    tools=TOOLS,
                    messages=b'[{"role": "user", "content": "go"}]',
                ),
            )
            for sequence, output in enumerate(outputs)
        ]
        finished = finished_episode(
            index, **{"offsets": offsets, "task": b'{"item": "lamp"}', **episode}
        )
        await self.write(topics.FINISHED_EPISODES, finished, key=finished.episode_id)
        return finished

    async def records(self, topic: topics.Topic, *, count: int) -> list[msgspec.Struct]:
        """Wait for `count` records of the partition; returns them decoded."""
        place = Place(topic.name, PARTITION)
        async with asyncio.timeout(20):
            reader = await self.log.reader({place: 0})
            found = []
            while len(found) < count:
                found += await reader.read(timeout_s=1.0, records_max=100)
        await reader.close()
        return [topics.decode(topic, record.value) for record in found]

    def graded(self) -> list[str]:
        return (self.folder / "graded.txt").read_text().split()


@pytest.fixture(scope="module")
def output_with_call() -> list[int]:
    return FolderTokenizer(MODEL).encode(CALL)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(configuration_of(tmp_path, outcome="user_rewards:outcome"), tmp_path)
    await desk.open()
    yield desk
    await desk.log.close()


async def test_a_group_is_graded_by_the_users_function_and_scored(desk, output_with_call):
    async with desk.service():
        await desk.play(0, [output_with_call, output_with_call])
        await desk.play(1, [[5, 6, 7]])
        [scored] = await desk.records(topics.SCORED_GROUPS, count=1)
    assert isinstance(scored, ScoredGroup)
    assert [episode.outcome for episode in scored.episodes] == [2.0, 0.0]
    assert [c.advantage for c in scored.completions] == [1.0, 1.0, -1.0]
    metrics = {metric.name: metric.value for metric in scored.episodes[0].metrics}
    assert (metrics["tool_calls"], metrics["turns"]) == (2.0, 2.0)
    [first, _] = await desk.records(topics.GRADED_EPISODES, count=2)
    assert isinstance(first, GradedEpisode)
    assert first.grader == "user_rewards:outcome"
    assert len(first.grader_version) == 16


async def test_a_grade_carries_its_group_for_readers_that_cannot_decode_it(desk):
    async with desk.service():
        await desk.play(0, [[5]])
        await desk.records(topics.GRADED_EPISODES, count=1)
    reader = await desk.log.reader({Place(topics.GRADED_EPISODES.name, PARTITION): 0})
    [grade] = await reader.read(timeout_s=0, records_max=10)
    assert (grade.key, dict(grade.headers)["group"]) == (b"g-1.0.0", b"g-1")


@pytest.mark.slow
@pytest.mark.parametrize("result", [b'"\xff"', b"[" * 20_000 + b"]" * 20_000, b"9" * 5000])
async def test_a_result_that_does_not_decode_masks_its_episode_alone(
    desk, output_with_call, result
):
    async with desk.service():
        await desk.play(0, [output_with_call], result=result)
        await desk.play(1, [output_with_call])
        grades = await desk.records(topics.GRADED_EPISODES, count=2)
    masked = {grade.episode_id: grade.is_masked for grade in grades}
    assert masked == {"g-1.0.0": True, "g-1.1.0": False}


@pytest.mark.slow
async def test_a_sampled_call_that_cannot_be_encoded_is_graded_as_text(desk):
    call = CALL.replace("lamp", "\\ud800")
    async with desk.service():
        await desk.play(0, [FolderTokenizer(MODEL).encode(call)])
        [grade] = await desk.records(topics.GRADED_EPISODES, count=1)
    assert (grade.is_masked, grade.outcome) == (False, 0.0)


@pytest.mark.slow
async def test_records_that_do_not_decode_end_no_grading(desk, output_with_call):
    for topic in CONSUMES:
        emit = Emit(
            topic=topic.name,
            partition=PARTITION,
            key=b"g-9.0.0",
            value=b"\x81\xaarequest_id\xa4\xff\xff\xff\xff",
        )
        await desk.writer.write(emit)
    async with desk.service():
        await desk.play(0, [output_with_call])
        async with asyncio.timeout(20):
            while not (desk.folder / "graded.txt").exists():  # noqa: ASYNC110 - a file
                await asyncio.sleep(0.05)
    assert desk.graded() == ["g-1.0.0"]


@pytest.mark.slow
async def test_a_restart_grades_what_is_missing_and_nothing_twice(desk, output_with_call):
    async with desk.service():
        await desk.play(0, [output_with_call])
        await desk.records(topics.GRADED_EPISODES, count=1)
    await desk.play(1, [[5]])
    await desk.play(0, [output_with_call], group="g-2")
    async with desk.service():
        await desk.records(topics.GRADED_EPISODES, count=3)
        await desk.records(topics.SCORED_GROUPS, count=1)
    assert desk.graded() == ["g-1.0.0", "g-1.1.0", "g-2.0.0"]


async def test_grades_that_are_on_the_log_are_not_made_again_after_a_crash(desk):
    """The positions were never committed, but the grade was written."""
    grade = GradedEpisode(
        episode_id="g-1.0.0",
        group_id="g-1",
        grader="before",
        grader_version="",
        outcome=0.5,
        speed=0.0,
    )
    await desk.write(topics.GRADED_EPISODES, grade)
    await desk.play(0, [[5]])
    await desk.play(1, [[5]])
    async with desk.service():
        [scored] = await desk.records(topics.SCORED_GROUPS, count=1)
    assert [episode.outcome for episode in scored.episodes] == [0.5, 0.0]
    assert desk.graded() == ["g-1.1.0"]


async def test_an_episode_that_cannot_be_graded_is_masked_and_fails_a_small_group(desk):
    async with desk.service():
        await desk.play(0, [[5]], task=b"no json")
        await desk.play(1, [[5]])
        [scored] = await desk.records(topics.SCORED_GROUPS, count=1)
    assert [episode.is_masked for episode in scored.episodes] == [True, False]
    assert scored.not_trainable == "failed"
    assert '"event":"masked"' in desk.lines.getvalue()


async def test_a_retired_group_is_not_graded_after_a_restart(desk):
    retired = RetiredGroup(group_id="g-1", domain="d", purpose="train", reason="expired")
    await desk.write(topics.RETIRED_GROUPS, retired)
    await desk.play(0, [[5]])
    await desk.play(0, [[5]], group="g-2")
    async with desk.service():
        [grade] = await desk.records(topics.GRADED_EPISODES, count=1)
    assert grade.episode_id == "g-2.0.0"


@pytest.mark.slow
async def test_more_episodes_than_may_wait_are_graded_all_the_same(desk):
    async with desk.service(
        FORGEMQ_REWARD_EPISODES_WAITING_MAX="1",
        FORGEMQ_REWARD_RECORDS_MAX="1",
        FORGEMQ_REWARD_GRADERS="2",
    ):
        for group in range(4):
            for index in range(2):
                await desk.play(index, [[5]], group=f"g-{group}")
        scored = await desk.records(topics.SCORED_GROUPS, count=4)
    assert {group.not_trainable for group in scored} == {"zero_variance"}


@pytest.mark.slow
async def test_a_record_that_does_not_decode_is_one_dead_letter_and_the_next_is_scored(desk):
    """The transform and the grading loop read the topic; the letter names the group."""
    async with desk.service():
        await desk.writer.write(
            Emit(
                topic=topics.FINISHED_EPISODES.name,
                partition=PARTITION,
                key=b"g-7.0.0",
                value=b"\xc1 torn",
            )
        )
        await desk.play(0, [[5]])
        await desk.play(1, [[5]])
        [scored] = await desk.records(topics.SCORED_GROUPS, count=1)
    assert (scored.group_id, scored.not_trainable) == ("g-1", "zero_variance")
    reader = await desk.log.reader({dead_letters_of(topics.FINISHED_EPISODES): 0})
    [letter] = await reader.read(timeout_s=0, records_max=10)
    assert letter_of(letter).group == "g-7"


@pytest.mark.slow
async def test_a_lost_value_is_one_dead_letter_and_the_next_group_is_scored(tmp_path: Path):
    """Of an episode the transform writes it, of a completion the merger; after a restart too."""
    desk = Desk(configuration_of(tmp_path, outcome="user_rewards:outcome"), tmp_path)
    store = LosingStore(tmp_path / "blobs")
    desk.log = log_with(store)
    await desk.open()
    lost = Emit(
        topic=topics.FINISHED_EPISODES.name, partition=PARTITION, key=b"g-7.0.0", value=b"x" * 99
    )
    for _ in range(2):
        async with desk.service():
            if not await desk.log.committed(group="reward-positions", places=[lost.place]):
                await write_lost(desk.log, store, lost)
                await write_lost(
                    desk.log,
                    store,
                    msgspec.structs.replace(
                        lost, topic=topics.FINISHED_COMPLETIONS.name, key=b"1" * 32
                    ),
                )
                await desk.play(0, [[5]])
                await desk.play(1, [[5]])
            [scored] = await desk.records(topics.SCORED_GROUPS, count=1)
    assert (scored.group_id, scored.not_trainable) == ("g-1", "zero_variance")
    place = dead_letters_of(topics.FINISHED_EPISODES)
    [letter] = await (await desk.log.reader({place: 0})).read(timeout_s=0, records_max=10)
    assert (letter_of(letter).group, letter_of(letter).offset) == ("g-7", 0)
    other = dead_letters_of(topics.FINISHED_COMPLETIONS)
    assert await desk.log.end_positions([other]) == {other: 0}
    await desk.log.close()


async def test_without_functions_the_agents_rewards_count_and_no_process_starts(tmp_path):
    configuration = msgspec.structs.replace(
        configuration_of(tmp_path), model=Model(path="no such folder")
    )
    desk = Desk(configuration, tmp_path)
    await desk.open()
    async with desk.service():
        await desk.play(0, [[5]])
        await desk.play(1, [[5]])
        [grade, _] = await desk.records(topics.GRADED_EPISODES, count=2)
    assert (grade.grader, grade.outcome, grade.is_masked) == ("reported", 0.0, False)
    await desk.log.close()


async def test_a_function_that_does_not_exist_ends_the_service_by_name(tmp_path):
    desk = Desk(configuration_of(tmp_path, outcome="user_rewards:absent"), tmp_path)
    await desk.open()
    with pytest.raises(ExceptionGroup) as raised:
        async with desk.service():
            await asyncio.sleep(20)
    assert raised.group_contains(GraderRefusedError, match="user_rewards:absent")
    await desk.log.close()


async def test_an_unknown_setting_is_refused_by_name(desk):
    with pytest.raises(ExceptionGroup) as raised:
        async with desk.service(FORGEMQ_REWARD_GRADER="1"):
            await asyncio.sleep(20)
    assert raised.group_contains(SettingsError, match="FORGEMQ_REWARD_GRADER: no such setting")


def test_it_reads_and_writes_what_the_registry_says():
    assert {t.name for t in CONSUMES} == {
        t.name for t in topics.OF_RUN if "reward" in t.consumers and "journal" not in t.name
    }
    assert {t.name for t in PRODUCES} == {
        t.name for t in topics.OF_RUN if t.producer == "reward" and "journal" not in t.name
    }
