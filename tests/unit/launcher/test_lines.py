"""What commands print is text: graders, agents and bad records may say what looks like markup."""

import io

import msgspec
from rich.console import Console

from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import partition_counts
from forgemq_contracts import topics
from forgemq_launcher.commands.dead_letters import print_letters
from forgemq_launcher.commands.inspection import print_trajectory
from forgemq_launcher.display.lines import say
from forgemq_run_view.rewards import EpisodeReward
from forgemq_run_view.trajectory import trajectories
from tests.small_run import small_run
from tests.unit.run_view.synthetic import SyntheticRun

ODD = "expected [/INST] behind [bold]"


def console() -> Console:
    return Console(file=io.StringIO(), width=400)


def test_a_line_with_brackets_is_printed_as_it_is():
    out = console()
    say(out, f"in /runs/[a]: {ODD}")
    assert out.file.getvalue() == f"in /runs/[a]: {ODD}\n"


def test_why_an_episode_is_masked_is_shown_whatever_its_grader_said():
    out = console()
    trajectory = trajectories(SyntheticRun().play(steps=1).messages)[0]
    reward = EpisodeReward(
        outcome=0.0,
        speed=0.0,
        process=0.0,
        total=0.0,
        is_masked=True,
        truncated_by="",
        detail=ODD,
    )
    print_trajectory(msgspec.structs.replace(trajectory, reward=reward), None, out)
    assert f"masked; {ODD}" in out.file.getvalue()


async def test_a_dead_letter_is_listed_whatever_is_in_it():
    log = MemoryLog(run="r")
    await log.create_topics(partition_counts(small_run(group_partitions=2)))
    emit = Emit(
        topic=topics.SCORED_GROUPS.dlq_name,
        partition=0,
        key=b"",
        value=b"[/INST] no record",
        headers=(("reason", ODD.encode()),),
    )
    await (await log.writer()).write(emit)
    out = console()
    assert await print_letters(log, out) == 1
    await log.close()
    assert ODD in out.file.getvalue()
    assert "[/INST] no record" in out.file.getvalue()
