"""Callers of a live key beside a run that trains, while one of its two gateways is killed."""

import asyncio
import os
import re
import signal
import subprocess
from hashlib import sha256
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.integration.launched_run import DIALOGUE, FORGEMQ, ROOT, LaunchedRun
from tests.integration.run_log import accounts
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(400)]

KEY = "the-key-of-an-application-in-use"
CONVERSATIONS = 12
TURNS = 3
STEPS = 20
"""The run is up for longer than the conversations take."""
LIVE = (
    f'live=[{{name="desk", domain="dialogue", key_sha256="{sha256(KEY.encode()).hexdigest()}", '
    "idle_s=5.0}]"
)


async def converse(client: AsyncOpenAI, number: int) -> set[str]:
    """One conversation; returns the episodes that answered it."""
    messages: list[Any] = [{"role": "user", "content": f"I am caller {number}."}]
    episodes = set()
    for turn in range(TURNS):
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=messages, extra_headers={"x-forgemq-session": f"caller-{number}"}
        )
        episodes.add(raw.headers["x-forgemq-episode"])
        messages += [
            {"role": "assistant", "content": raw.parse().choices[0].message.content},
            {"role": "user", "content": f"Go on, {turn}."},
        ]
    return episodes


async def call(url: str, run: LaunchedRun) -> list[set[str]]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=8) as client:
        talking = [asyncio.create_task(converse(client, each)) for each in range(CONVERSATIONS)]
        await asyncio.sleep(1.0)
        os.kill(run.pid_of("gateway", within_s=30), signal.SIGKILL)
        is_in_turns = not any(each.done() for each in talking)
        episodes = list(await asyncio.gather(*talking))
    assert is_in_turns
    return episodes


def test_live_conversations_are_recorded_once_and_never_trained_though_a_gateway_is_killed(
    kafka_bootstrap, new_run_id, tmp_path
):
    run_id = new_run_id()
    with stand_in_engine(latency_s=0.3, tokens=16) as engine_url:
        environ = {
            "FORGEMQ_KAFKA": kafka_bootstrap,
            "FORGEMQ_ENGINE_URL": engine_url,
            "FORGEMQ_LAUNCHER_GATEWAYS": "2",
        }
        run = LaunchedRun(tmp_path, environ)
        try:
            run.start(DIALOGUE, f"run={run_id}", f"trainer.steps={STEPS}", LIVE)
            said = run.wait_for_line(r"starting \d+ services; gateway: ([^, ]+)", within_s=90)
            episodes = asyncio.run(call(said[1], run))
            run.wait_for_end(within_s=240)
            shown = subprocess.run(
                [str(FORGEMQ), "inspect", run_id],
                cwd=ROOT,
                env=run.environ | {"COLUMNS": "160"},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout
        finally:
            run.close()
    ids = {episode.split(".")[0] for each in episodes for episode in each}
    assert [len(each) for each in episodes] == [1] * CONVERSATIONS
    assert len(ids) == CONVERSATIONS
    report = run.report(run_id)
    [live] = report["live"]
    assert (live["domain"], live["tally"]["episodes"]) == ("dialogue", 0)
    # A group that the kill left without an episode is taken by a later conversation, or stays open.
    assert live["ended"] >= CONVERSATIONS
    assert set(re.findall(r"(g-[\w-]+) . live ", shown)) >= ids
    held = {guarantee for guarantee, holds in report["guarantees"].items() if holds}
    # The stand-in's log-probabilities are noise, so G5 cannot hold.
    assert held == {"G1", "G2", "G3", "G4"}, report["guarantees_checked"]
    log = accounts(kafka_bootstrap, run=run_id, blobs=str(run.blobs(run_id)))
    recorded = {group.group_id for group in log.admitted if group.source == "live"}
    taken = {group.group_id for step in log.scheduled for group in step.groups}
    reasons = {group.group_id: group.reason for group in log.retired}
    assert recorded >= ids
    assert not recorded & taken
    assert {reasons[group_id] for group_id in ids} == {"evaluated"}
