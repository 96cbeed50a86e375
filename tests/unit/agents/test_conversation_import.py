"""Imports against the gateway in memory."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from forgemq_agents.conversation_import import (
    AT_ONCE_MAX,
    BYTES_AT_ONCE_MAX,
    ConversationImport,
    Imported,
)
from forgemq_agents.episode_player import EpisodePlayer
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.import_command import run_import, tell_done
from forgemq_agents.lease_thread import LeaseThread
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_agents.trained_conversations import TrainedConversations
from forgemq_contracts.asked_keys import KEYS_FULL_CODE
from forgemq_telemetry.telemetry import Telemetry
from tests.memory_gateway import ADMIN_KEY, MemoryGateway
from tests.memory_gateway_http import served


def write(path: Path, *numbers: int) -> Path:
    def line(number: int) -> str:
        messages = [
            {"role": "user", "content": f"{number}?"},
            {"role": "assistant", "content": "yes"},
        ]
        return json.dumps({"messages": messages, "reward": number, "result": number})

    path.write_text("".join(line(number) + "\n" for number in numbers))
    return path


@asynccontextmanager
async def importing(
    gateway: MemoryGateway,
    *,
    bytes_at_once_max: int = BYTES_AT_ONCE_MAX,
    is_supervised: bool = False,
) -> AsyncIterator[ConversationImport]:
    retry = Retry(deadline_s=5)
    leases = LeaseThread(url=gateway.url, admin_key=ADMIN_KEY, retry=retry)
    async with aiohttp.ClientSession() as http, leases:
        requests = JsonRequests(http, retry=retry)
        client = GatewayClient(requests, url=gateway.url, admin_key=ADMIN_KEY)
        player = EpisodePlayer(
            gateway=client,
            requests=requests,
            leases=leases,
            environ={},
            telemetry=Telemetry(service="agents"),
        )
        yield ConversationImport(
            client,
            domain="count",
            bytes_at_once_max=bytes_at_once_max,
            training=TrainedConversations(client, player=player) if is_supervised else None,
        )


async def imported(gateway: MemoryGateway, file: Path) -> Imported:
    async with importing(gateway) as made:
        return await made.run(file)


async def test_every_conversation_is_a_finished_group_with_its_reward_and_result(
    memory_gateway, tmp_path
):
    gateway = await memory_gateway()
    done = await imported(gateway, write(tmp_path / "f", *range(40)))
    assert done == Imported(added=40, known=0, lost=())
    groups = gateway.in_order()
    assert {(g.request.source, g.request.purpose, g.size, g.state) for g in groups} == {
        ("import", "eval", 1, "retired")
    }
    asked = [msgspec.json.decode(g.request.task)["messages"][0]["content"] for g in groups]
    earned = [g.attempts[0].rewards["import/outcome"].value for g in groups]
    ended = [msgspec.json.decode(g.ended[0].result) for g in groups]
    assert asked == [f"{int(value)}?" for value in earned]
    assert ended == earned
    assert sorted(ended) == list(range(40))


async def test_what_is_in_the_run_already_is_not_added_again(memory_gateway, tmp_path):
    gateway = await memory_gateway()
    await imported(gateway, write(tmp_path / "f", 1, 2))
    again = await imported(gateway, write(tmp_path / "f", 2, 3, 1, 2))
    assert again == Imported(added=1, known=3, lost=())
    assert len(gateway.in_order()) == 3


async def test_a_conversation_that_a_killed_import_had_claimed_is_played_when_its_lease_lapses(
    memory_gateway, tmp_path
):
    gateway = await memory_gateway()
    file = write(tmp_path / "f", 1)
    async with importing(gateway) as made:
        killed = asyncio.create_task(made.run(file))
        while not any(g.attempts for g in gateway.in_order()):  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0)
        killed.cancel()
        await asyncio.wait([killed])
    [group] = gateway.in_order()
    assert group.state == "admitted"
    assert await imported(gateway, file) == Imported(added=1, known=0, lost=())
    assert group.ended[0] is not None
    assert group.attempts[0].number == 1


async def test_an_import_that_takes_long_says_how_many_conversations_are_done(
    memory_gateway, tmp_path, capsys
):
    gateway = await memory_gateway()
    async with importing(gateway) as made:
        with tell_done(made, count=40, every_s=0.02):
            await made.run(write(tmp_path / "f", *range(40)))
            await asyncio.sleep(0.1)
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "40 of 40 are done"
    await asyncio.sleep(0.1)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
async def test_a_stopped_import_ends_what_is_on_its_way_and_takes_no_further_line(
    memory_gateway, tmp_path
):
    gateway = await memory_gateway()
    file = write(tmp_path / "f", *range(5 * AT_ONCE_MAX))
    async with importing(gateway) as made:
        running = asyncio.create_task(made.run(file))
        while not gateway.in_order():  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0)
        made.stop()
        done = await running
    assert 0 < done.added <= AT_ONCE_MAX
    assert {group.state for group in gateway.in_order()} == {"retired"}
    assert len(gateway.in_order()) == done.added


async def test_conversations_that_training_has_no_room_for_are_counted_and_not_lost(
    memory_gateway, tmp_path
):
    gateway = await memory_gateway()
    gateway.run = msgspec.structs.replace(
        gateway.run, supervised_domains=("count",), training_ended=True
    )
    async with importing(gateway, is_supervised=True) as made:
        done = await made.run(write(tmp_path / "f", 1, 2, 3))
    assert done == Imported(added=0, known=0, lost=(), unused=3)
    assert not gateway.in_order()


async def test_a_conversation_whose_episode_ends_before_it_is_written_is_lost(
    memory_gateway, tmp_path
):
    gateway = await memory_gateway()
    admit = gateway.scheduler

    def admit_and_end_what_is_claimed(gateway: MemoryGateway) -> None:
        admit(gateway)
        for group in gateway.in_order():
            for attempt in group.attempts.values():
                attempt.state = "ended"
                gateway.retire(group.group_id, "evaluated")

    gateway.scheduler = admit_and_end_what_is_claimed
    file = write(tmp_path / "f", 1)
    done = await imported(gateway, file)
    [group] = gateway.in_order()
    reason = f"{file}:1: {group.group_id} ended before all of it was written"
    assert done == Imported(added=0, known=0, lost=(reason,))


async def test_a_conversation_that_cannot_be_read_is_lost_and_named_by_its_line(
    memory_gateway, tmp_path, refusal
):
    gateway = await memory_gateway()
    gateway.run = msgspec.structs.replace(gateway.run, supervised_domains=("count",))
    admit = gateway.scheduler

    def admit_and_refuse_the_first_reply(gateway: MemoryGateway) -> None:
        admit(gateway)
        if not gateway.chats:
            gateway.answers = [refusal(400, "an image")]

    gateway.scheduler = admit_and_refuse_the_first_reply
    file = write(tmp_path / "f", 1)
    async with importing(gateway, is_supervised=True) as made:
        done = await made.run(file)
    [group] = gateway.in_order()
    [lost] = done.lost
    assert (done.added, done.known) == (0, 0)
    assert lost.startswith(f"{file}:1: {group.group_id} was aborted: GatewayError: 400 from ")
    assert lost.endswith("an image")
    gateway.retire(group.group_id, "failed")
    async with importing(gateway, is_supervised=True) as made:
        again = await made.run(file)
    assert again.lost == (f"{file}:1: {group.group_id} retired as failed",)


async def test_a_run_that_is_full_ends_an_import_that_says_how_many_it_has_not_got(
    memory_gateway, tmp_path, refusal
):
    gateway = await memory_gateway()
    file = write(tmp_path / "f", 1, 2, 3)
    gateway.answers = [refusal(400, "full", code=KEYS_FULL_CODE)]
    assert await imported(gateway, file) == Imported(added=2, known=0, lost=(), is_full=True)
    assert {group.state for group in gateway.in_order()} == {"retired"}

    gateway.answers = [refusal(400, "full", code=KEYS_FULL_CODE)]
    environ = {"FORGEMQ_AGENTS_GATEWAY_URL": gateway.url, "FORGEMQ_AGENTS_ADMIN_KEY": ADMIN_KEY}
    arguments = ("-m", "forgemq_agents", "import", str(file), "--domain", "count")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments), env={**os.environ, **environ}, stdout=PIPE, stderr=PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode == 1
    assert out.endswith(b"2 of 3 are in count: 0 added, 2 there already\n")
    assert errors.startswith(
        b"import: the run is full and has not got the other 1: a run takes 49,152 in all its "
    )


async def test_lines_on_their_way_are_bounded_by_their_bytes_and_a_longer_one_goes_alone(
    memory_gateway, tmp_path
):
    gateway = await memory_gateway(group_size=1)
    file = write(tmp_path / "f", *range(10, 40))
    size = len(file.read_bytes().splitlines()[0])
    async with importing(gateway, bytes_at_once_max=3 * size) as made:
        assert await made.run(file) == Imported(added=30, known=0, lost=())
    assert gateway.scheduler.open_max == 3
    async with importing(gateway, bytes_at_once_max=size - 1) as made:
        assert (await made.run(write(file, *range(40, 50)))).added == 10


async def test_an_import_that_is_stopped_twice_waits_for_no_engine(tmp_path):
    async with served(MemoryGateway()) as gateway, importing(gateway) as made:
        running = asyncio.create_task(made.run(write(tmp_path / "f", 1)))
        while not gateway.in_order():  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0)
        made.stop()
        await asyncio.sleep(0.05)
        assert not running.done()
        made.stop()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_group_that_is_lost_is_named_by_its_line(memory_gateway, tmp_path):
    gateway = await memory_gateway()
    file = write(tmp_path / "f", 1, 2)
    await imported(gateway, file)
    group = gateway.in_order()[1]
    gateway.retire(group.group_id, "expired")
    done = await imported(gateway, file)
    assert done.lost == (f"{file}:2: {group.group_id} retired as expired",)


@pytest.mark.parametrize(
    ("file", "domain", "said"),
    [
        ("good", "moon", "there is no domain 'moon'; there are count"),
        ("bad", "count", "bad:1: not one JSON object"),
        ("nowhere", "count", "No such file"),
    ],
)
async def test_what_is_refused_leaves_no_request_for_a_group(
    memory_gateway, tmp_path, capfd, file, domain, said
):
    gateway = await memory_gateway()
    write(tmp_path / "good", 1)
    (tmp_path / "bad").write_text("nope\n")
    arguments = ["import", str(tmp_path / file), "--domain", domain]
    environ = {"FORGEMQ_AGENTS_GATEWAY_URL": gateway.url, "FORGEMQ_AGENTS_ADMIN_KEY": ADMIN_KEY}
    assert await asyncio.to_thread(run_import, arguments, environ) == 2
    assert said in capfd.readouterr().err
    assert gateway.asked_keys == []


async def test_an_import_needs_no_setting_of_the_agents_besides_the_gateway(capfd, tmp_path):
    arguments = ["import", str(write(tmp_path / "f", 1)), "--domain", "count"]
    environ = {"FORGEMQ_AGENTS_CONFIGURATION": "c", "FORGEMQ_AGENTS_ADMIN_KEY": ADMIN_KEY}
    assert run_import(arguments, environ) == 2
    assert capfd.readouterr().err == "import: FORGEMQ_AGENTS_GATEWAY_URL: must be set\n"
