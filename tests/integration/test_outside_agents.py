"""A run without agents of its own, played by OpenAI's client with the client's own defaults.

Its gateway is killed in the middle of turns. The launcher holds the gateway's socket, so each turn
costs one of the client's two retries, however long the gateway takes to come back.
"""

import asyncio
import itertools
import os
import re
import signal
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from msgspec import Raw
from openai import AsyncOpenAI

from forgemq_agents.errors import EpisodeOverError, GatewayError, TrainingEndedError
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_contracts.admin import Claim, FinishRequest, GroupRequest
from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.run_log import accounts
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
TURNS = 3
TURN_S = 1.5
"""Longer than the pauses between a turn and the next, so a kill meets most episodes in a turn."""
LEAST_AWAY_S = 1.0
"""A gateway is away for its pause of 0.5 s and the imports of its libraries, seconds."""
AWAY_S_MAX = 60.0
"""A gateway that is away for longer has not been started again."""
GROUPS_AT_ONCE = 4
KILLS_AFTER_TURNS = (8, 40)
"""In the first step and in a later one."""
OUTSIDE = (
    'queues.0.agent=""',
    'queues.0.task_source=""',
    "evaluation.tasks=0",
    f"trainer.steps={STEPS}",
    # An agent outside sends no heartbeats here; its turns renew the lease.
    "episodes.lease_s=30.0",
)


class OutsideAgents:
    """Asks for groups over HTTP, and plays each episode with a fresh client of OpenAI."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self._numbers = itertools.count()
        self.turns_s: list[float] = []

    async def play(self) -> None:
        """Play groups until training has ended; groups that still wait for a slot are left."""
        async with asyncio.TaskGroup() as playing:
            tasks = [playing.create_task(self._play_groups()) for _ in range(GROUPS_AT_ONCE)]
            while not (await self._gateway.read_run()).training_ended:  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()

    async def _play_groups(self) -> None:
        for number in self._numbers:
            try:
                await self._play_group(number)
            except (TrainingEndedError, EpisodeOverError):
                return

    async def _play_group(self, number: int) -> None:
        task = Raw(b'{"number": %d}' % number)
        key = f"outside/{number}"
        group = await self._gateway.request_group(
            GroupRequest(domain="dialogue", idempotency_key=key, task=task, purpose="train")
        )
        while group.state == "requested":
            group = await self._gateway.read_group(group, wait_s=5)
        claims = []
        while claim := await self._gateway.claim(group.group_id):
            claims.append(claim)
        async with asyncio.TaskGroup() as playing:
            for claim in claims:
                playing.create_task(self._play_episode(claim))

    async def _play_episode(self, claim: Claim) -> None:
        try:
            await self._play_turns(claim)
            await self._gateway.finish(claim.episode_id, FinishRequest())
        except EpisodeOverError:
            return
        except openai.APIStatusError as error:
            # Training ended, and the group was cancelled in this turn.
            if error.status_code != HTTPStatus.GONE:
                raise

    async def _play_turns(self, claim: Claim) -> None:
        messages: list[Any] = [{"role": "user", "content": f"You are {claim.episode_id}."}]
        async with AsyncOpenAI(base_url=claim.base_url, api_key=claim.key) as client:
            for turn in range(TURNS):
                began_s = time.monotonic()
                said = await client.chat.completions.create(model="policy", messages=messages)
                self.turns_s.append(time.monotonic() - began_s)
                messages += [
                    {"role": "assistant", "content": said.choices[0].message.content},
                    {"role": "user", "content": f"Go on, {turn}."},
                ]


async def kill_in_turns(run: LaunchedRun, agents: OutsideAgents) -> None:
    """Kill the gateway after so many turns, while others wait for their answers."""
    for turns in KILLS_AFTER_TURNS:
        while len(agents.turns_s) < turns:  # noqa: ASYNC110 - counts what clients were answered
            await asyncio.sleep(0.05)
        await asyncio.sleep(TURN_S / 2)
        os.kill(run.pid_of("gateway", within_s=30), signal.SIGKILL)


async def play_from_outside(run: LaunchedRun) -> OutsideAgents:
    """Play the run by what it printed."""
    said = run.wait_for_line(r"export GATEWAY=(\S+) ADMIN_KEY=\$\(head -n1 (\S+)\)", within_s=90)
    key = await asyncio.to_thread(Path(said[2]).read_text)
    async with aiohttp.ClientSession() as http:
        requests = JsonRequests(http, retry=Retry(deadline_s=AWAY_S_MAX))
        agents = OutsideAgents(GatewayClient(requests, url=said[1], admin_key=key))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(agents.play())
            tasks.create_task(kill_in_turns(run, agents))
    return agents


def test_openai_clients_with_default_retries_play_a_run_whose_gateway_is_killed_in_their_turns(
    kafka_bootstrap, new_run_id, tmp_path
):
    run_id = new_run_id()
    with stand_in_engine(latency_s=TURN_S, tokens=16) as engine_url:
        run = LaunchedRun(
            tmp_path, {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": engine_url}
        )
        try:
            run.start(DIALOGUE, f"run={run_id}", *OUTSIDE)
            try:
                agents = asyncio.run(play_from_outside(run))
            except* GatewayError as errors:
                raise AssertionError(run.story()) from errors
            run.wait_for_end(within_s=180)
            assert run.left_behind() == []
        finally:
            run.close()
    killed = re.findall(r"s  (\S+) was killed by SIGKILL;", run.output())
    assert killed == ["gateway"] * len(KILLS_AFTER_TURNS)
    # The turns in flight waited for the restart, and no client gave up.
    assert max(agents.turns_s) > TURN_S + LEAST_AWAY_S
    log = accounts(kafka_bootstrap, run=run_id, blobs=str(run.blobs(run_id)))
    log.assert_exactly_once()
    assert list(log.surviving_steps()) == list(range(STEPS))
    report = run.report(run_id)
    held = {guarantee for guarantee, holds in report["guarantees"].items() if holds}
    # The stand-in's log-probabilities are noise, so G5 cannot hold.
    assert held == {"G1", "G2", "G3", "G4"}, report["guarantees_checked"]
