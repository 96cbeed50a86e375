"""Wiring of the agents process: HTTP only, no topics."""

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from pathlib import Path

import aiohttp
import msgspec

from forgemq_agents.admin_key import admin_key_of
from forgemq_agents.episode_player import EpisodePlayer
from forgemq_agents.errors import GatewayError
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.groups import Groups
from forgemq_agents.lease_thread import LeaseThread
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_agents.run import AgentRun
from forgemq_agents.settings import AgentsSettings
from forgemq_agents.task_choice import TaskChoice
from forgemq_agents.user_code import DomainCode, UserCodeError, load_domains
from forgemq_contracts.players import shortage
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import Topic
from forgemq_settings.environment import SettingsError, parse
from forgemq_telemetry.causes import causes
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.telemetry import Telemetry, open_telemetry

CONSUMES: tuple[Topic, ...] = ()
PRODUCES: tuple[Topic, ...] = ()

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
# The gateway is silent while a completion is sampled, and answers by its deadline at the latest.
# The slack is for the answer's way here; a shorter one would ask again for what is on its way.
READ_SLACK_S = 30.0


def run_agents(environ: Mapping[str, str]) -> int:
    """Play the run that the settings name; returns the exit status.

    0: played to the end, or stopped by a signal. 1: the gateway refused or was away for too long.
    2: settings, configuration or user code cannot be used; one line says why.
    """
    telemetry = Telemetry(service="agents")
    try:
        settings = parse(AgentsSettings, prefix="FORGEMQ_AGENTS_", environ=environ)
        measured = parse(TelemetrySettings, prefix="FORGEMQ_TELEMETRY_", environ=environ)
        admin_key_of(
            settings, telemetry=telemetry
        )  # Refused here, and not after the user's code is loaded.
        configuration = read_configuration(settings.configuration)
        domains = load_domains(configuration)
        telemetry = open_telemetry(
            "agents",
            run=configuration.run,
            settings=measured,
            instance=environ.get("FORGEMQ_SERVICE_INSTANCE", ""),
        )
    except (SettingsError, UserCodeError, OSError, msgspec.MsgspecError) as error:
        telemetry.event("refused", error=str(error))
        return EXIT_REFUSED
    try:
        return played(play_run(configuration, settings, domains, environ, telemetry), telemetry)
    finally:
        telemetry.close()


def played(playing: Coroutine[None, None, None], telemetry: Telemetry) -> int:
    """Play to the end or a signal; returns the exit status, and an event tells of a failure."""
    status = EXIT_OK
    try:
        asyncio.run(_run_until_signal(playing))
    except* GatewayError as errors:
        telemetry.event("failed", error=str(causes(errors)[0]))
        status = EXIT_FAILED
    except* UserCodeError as errors:
        telemetry.event("refused", error=str(causes(errors)[0]))
        status = EXIT_REFUSED
    except* SystemExit as errors:
        # Out of a task that the user's code started. Its status would be taken for one of ours.
        left = causes(errors)[0]
        telemetry.event("failed", error=f"code of the run ended this process: {left!r}")
        status = EXIT_FAILED
    return status


def read_configuration(path: str) -> RunConfiguration:
    """Read the run configuration from this JSON file."""
    return msgspec.json.decode(Path(path).read_bytes(), type=RunConfiguration)


async def play_run(
    configuration: RunConfiguration,
    settings: AgentsSettings,
    domains: Mapping[str, DomainCode],
    environ: Mapping[str, str],
    telemetry: Telemetry,
) -> None:
    """Play a run through its gateway, from the round `start` to the round `end`."""
    retry = Retry(
        deadline_s=settings.retry_deadline_s,
        read_timeout_s=configuration.episodes.request_deadline_s + READ_SLACK_S,
    )
    # No limit on connections: episodes at once are bounded already, and long polls would use up
    # a limit that episodes need.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    admin_key = admin_key_of(settings, telemetry=telemetry)
    leases = LeaseThread(url=settings.gateway_url, admin_key=admin_key, retry=retry)
    async with aiohttp.ClientSession(connector=connector) as http, leases:
        requests = JsonRequests(http, retry=retry)
        gateway = GatewayClient(requests, url=settings.gateway_url, admin_key=admin_key)
        groups = Groups(
            gateway=gateway,
            player=EpisodePlayer(
                gateway=gateway,
                requests=requests,
                leases=leases,
                environ=environ,
                telemetry=telemetry,
            ),
            domains=domains,
            configuration=configuration,
        )
        run = AgentRun(
            configuration,
            gateway=gateway,
            groups=groups,
            choices=_choices(configuration, domains, gateway),
            telemetry=telemetry,
            poll_s=settings.poll_s,
        )
        if short := shortage(configuration):
            telemetry.event("few_players", detail=short)
        try:
            await (run.judge(samples=settings.samples) if settings.samples else run.play())
        except asyncio.CancelledError:
            await groups.give_back()
            raise


def _choices(
    configuration: RunConfiguration, domains: Mapping[str, DomainCode], gateway: GatewayClient
) -> dict[str, TaskChoice]:
    """The curricula of the run, by domain."""
    return {
        queue.domain: TaskChoice(
            queue.curriculum,
            domain=queue.domain,
            seed=configuration.seed,
            sampler=sampler,
            pool=domains[queue.domain].pool,
            gateway=gateway,
        )
        for queue in configuration.queues
        if queue.curriculum is not None and (sampler := domains[queue.domain].sampler) is not None
    }


async def _run_until_signal(playing: Coroutine[None, None, None]) -> None:
    """Play until the end or a signal; open episodes are then given back and played again."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(playing)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
