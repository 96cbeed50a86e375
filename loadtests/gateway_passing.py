"""What it costs a gateway to send a request on: its owner answers at once.

    load --HTTP--> gateway --HTTP--> upstream

The upstream is the one of `gateway_baselines.py`. It stands on the log as a gateway of the run that
owns a group partition, so the gateway under load takes it for the owner of the load's groups.
"""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
from data_path_agents import DOMAIN
from data_path_system import HOST, RunningSystem
from gateway_baselines import Asked, Proxied, measured, upstream

from forgemq_bus.log import Writer
from forgemq_contracts.messages import Output
from forgemq_contracts.ownership import ReportedGateway
from forgemq_contracts.partitions import episode_id, group_id, group_partition
from forgemq_contracts.topics import REPORTED_GATEWAYS
from forgemq_gateway.clock import Clock
from forgemq_gateway.core.gateways import Gateways
from forgemq_gateway.core.keys import AdminKeys
from forgemq_gateway.members import REPORT_EVERY_S
from forgemq_gateway.ownership import Owners
from forgemq_launcher.upkeep.machine import port
from forgemq_shell.records import emit_of

_PARTITION = 0
_START_TIMEOUT_S = 120.0


async def passing_cost(system: RunningSystem, asked: Asked) -> Proxied:
    """What a request through a gateway that owns none of the load's groups costs it."""
    async with (
        upstream(asked.reply) as url,
        _owner(system, url),
        _second_gateway(system) as (process, gateway),
    ):
        return await measured(asked, process=process, url=gateway, key=_key(system))


def _key(system: RunningSystem) -> str:
    """Key of an episode whose group the upstream owns."""
    configuration, keys = (
        system.configuration,
        AdminKeys((system.folder.admin_key(),), run=system.configuration.run),
    )
    for number in itertools.count():
        group = group_id(
            run=configuration.run, domain=DOMAIN, idempotency_key=f"pass_through/{number}"
        )
        if group_partition(group, partitions=configuration.log.group_partitions) == _PARTITION:
            return keys.key_of(episode_id(group=group, index=0, attempt=0))
    raise AssertionError("the numbers have no end")


@asynccontextmanager
async def _owner(system: RunningSystem, url: str) -> AsyncIterator[None]:
    """Let the run's gateways take whatever answers at this URL for the owner of a partition."""
    configuration = system.configuration
    gateways = Gateways(f"{url}#0", url=url, partitions=configuration.log.group_partitions)
    writer = await system.log.writer()
    reporting = asyncio.create_task(_report(writer, gateways, run=configuration.run))
    try:
        await asyncio.sleep(2 * REPORT_EVERY_S)  # Until the others have heard of it.
        owners = Owners(system.log, run=configuration.run, gateways=gateways, clock=Clock())
        await owners.take_over({_PARTITION})
        yield
    finally:
        reporting.cancel()
        await writer.close()


async def _report(writer: Writer, gateways: Gateways, *, run: str) -> None:
    started_ms = time.time_ns() // 1_000_000
    while True:
        record = ReportedGateway(
            run=run,
            gateway=gateways.gateway,
            url=gateways.url,
            started_ms=started_ms,
            reported_ms=time.time_ns() // 1_000_000,
        )
        output = Output(topic=REPORTED_GATEWAYS.name, partition=0, record=record)
        await writer.write(emit_of(output))
        await asyncio.sleep(REPORT_EVERY_S)


@asynccontextmanager
async def _second_gateway(system: RunningSystem) -> AsyncIterator[tuple[int, str]]:
    """Another gateway of the run, until the block ends; yields its process id and its URL."""
    number = port(HOST, wanted=0)
    own = {
        "FORGEMQ_RUN": system.configuration.run,
        "FORGEMQ_KAFKA": system.kafka,
        "FORGEMQ_GATEWAY_ADMIN_KEY": system.folder.admin_key(),
        "FORGEMQ_GATEWAY_PORT": str(number),
    }
    command = (sys.executable, "-m", "forgemq_gateway")
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | own)
    try:
        url = f"http://{HOST}:{number}"
        await until_serving(url)
        yield process.pid, url
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def until_serving(url: str) -> None:
    """Return when the gateway at this URL answers that it serves."""
    async with asyncio.timeout(_START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)
