"""The demo's command line: mini-swe-agent's own classes at the shop desk, with a skilled model."""

import asyncio
import itertools
import json
import random
import socket
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_line.agent import CODE, PYTHON, Player
from command_line.demonstrator import Habits, call_text, demonstration
from command_line.warm_start import BASE, episode_example
from shop_desk.shop import Line, Order, as_task
from transformers import AutoTokenizer

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.clients.install import missing
from tests.unit.gateway.scripted_lane import Asked, contexts_of, wall_ms
from tests.unit.gateway.world import configuration_of, running

pytestmark = pytest.mark.clients

ORDER = Order((Line(3, "lamp"), Line(2, "mug")), "Order: {order}. What is the total?", 7)
SKILLED = Habits(0, 0, 1, 0, 0, 0)


class Claimed(msgspec.Struct):
    """As much of an episode as the player needs."""

    episode_id: str
    base_url: str
    key: str
    task: Any
    environ: dict[str, str]


async def played(turns: list[str]) -> tuple[dict[str, Any], list[list[int]], list[str]]:
    """What came of an episode with these turns, its contexts with outputs, and its forks."""
    assert missing("mini_swe_agent") == ""
    configuration = configuration_of(Path(BASE), context_tokens_max=640)
    left = iter(turns)

    def say(asked: Asked) -> str:
        return next(left)

    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration, say) as (world, _):
        claim = await world.episode()
        episode = Claimed(claim["episode_id"], claim["base_url"], claim["key"], as_task(ORDER), {})
        player = Player()
        end = await player.play(episode)
        player.close()
        records = await world.records(topics.FINISHED_COMPLETIONS)
    wholes = contexts_of(records)
    forks = [record.turn.fork_reason for record in records if record.turn.fork_reason]
    return end, [wholes[record.request_id] for record in records], forks


async def test_mini_swe_agent_plays_a_demonstration_token_for_token_as_the_warm_start_has_it():
    shown = demonstration(ORDER, random.Random(1), SKILLED)
    end, contexts, forks = await played([text for text, _ in shown.turns])
    assert end["exit_status"] == "Submitted"
    assert end["submission"] == f"{ORDER.total}\n"
    assert forks == []
    example = episode_example(AutoTokenizer.from_pretrained(BASE), shown)
    assert contexts[-1] == example.ids
    for before, after in itertools.pairwise(contexts):
        assert after[: len(before)] == before


async def test_a_wrong_command_is_answered_and_a_broken_call_ends_the_episode():
    broken = call_text("answer 1").replace("}}", "}")
    end, contexts, forks = await played([call_text("cost lamp"), call_text("price cheese"), broken])
    assert end["exit_status"] == "RepeatedFormatError"
    text = AutoTokenizer.from_pretrained(BASE).decode(contexts[-1])
    assert text.count("<tool_response>\nbad command\n</tool_response>") == 2
    assert forks == []


# What a policy may try that learned to look around; the shell has no path, so by full names.
CONNECT = (
    "/usr/bin/python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port})).close()'"
)
READ = "/usr/bin/env | /bin/grep FORGEMQ || /bin/cat /proc/$PPID/environ | /bin/grep -a FORGEMQ"
BOMB = "b() { b | b & }; b; /bin/sleep 60"
KILL = "/bin/kill -9 1 -1"


async def test_a_hostile_command_fails_and_is_told_to_the_agent_whose_episode_goes_on(monkeypatch):
    """The network and the secrets are in reach of the same commands outside of the sandbox."""
    monkeypatch.setenv("FORGEMQ_GATEWAY_ADMIN_KEY", "the-admin-key")
    monkeypatch.setenv("FORGEMQ_KAFKA", "127.0.0.1:9092")
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = CONNECT.format(port=server.getsockname()[1])
        for command in (connect, READ):
            await asyncio.to_thread(subprocess.run, command, shell=True, check=True)
        server.accept()[0].close()
        hostile = (connect, READ, "/bin/cat /etc/passwd", KILL, BOMB)
        turns = (*hostile, "price lamp", f"answer {ORDER.total}")
        end, contexts, forks = await played([call_text(turn) for turn in turns])
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert (end["exit_status"], end["submission"]) == ("Submitted", f"{ORDER.total}\n")
    assert forks == []
    text = AutoTokenizer.from_pretrained(BASE).decode(contexts[-1])
    shown = [part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]
    assert shown == ["bad command"] * len(hostile) + [ORDER.page("lamp")]


def test_the_player_ends_with_its_input_also_if_an_episode_is_open():
    assert missing("mini_swe_agent") == ""
    nobody = {"id": "e", "base_url": "http://127.0.0.1:9/v1", "key": "k", "task": as_task(ORDER)}
    done = subprocess.run(
        [PYTHON, "-m", "command_line.player"],
        input=json.dumps(nobody) + "\n",
        text=True,
        env={"PYTHONPATH": str(CODE), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        timeout=120,
    )
    assert done.returncode == 0
