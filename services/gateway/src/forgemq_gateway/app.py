"""Wiring of the gateway: log, registry, lanes, routes and the HTTP server."""

import asyncio
import secrets
import socket
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
import uvicorn

from forgemq_bus.errors import LogError
from forgemq_bus.log import Log
from forgemq_contracts.domains import histories_of
from forgemq_contracts.episodes import HistoryPolicy
from forgemq_contracts.run import RunConfiguration
from forgemq_gateway.access import Access
from forgemq_gateway.admin_keys import FollowedKeys
from forgemq_gateway.admin_route import admin_app
from forgemq_gateway.body_memory import BodyMemory
from forgemq_gateway.change_signal import ChangeSignal
from forgemq_gateway.clock import Clock
from forgemq_gateway.composer import Composer
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.attempts import Attempts
from forgemq_gateway.core.forwards import Forwards
from forgemq_gateway.core.gateways import Gateways
from forgemq_gateway.core.held_bytes import HeldBytes
from forgemq_gateway.core.keys import AdminKeys
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.registry import Registry
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.feed_topics import CONSUMES
from forgemq_gateway.fenced_writer import FencedWriter
from forgemq_gateway.forwarding import Forwarder
from forgemq_gateway.gate import Gate, limits_of
from forgemq_gateway.http_server import (
    allow_connections,
    bound_socket,
    http_server,
    peer_socket,
    serve_http,
    url_of,
)
from forgemq_gateway.lane_changes import LaneChanges
from forgemq_gateway.lane_operations import LaneOperations
from forgemq_gateway.large_work import favour_event_loop
from forgemq_gateway.live_traffic import LiveTraffic
from forgemq_gateway.memory_need import report_memory_shortage
from forgemq_gateway.operations import Operations
from forgemq_gateway.outbox import PRODUCES, Outbox
from forgemq_gateway.ownership import ReadBack
from forgemq_gateway.passing import Passing
from forgemq_gateway.replica import Replica
from forgemq_gateway.router import Router
from forgemq_gateway.settings import GatewaySettings, body_bytes_max
from forgemq_gateway.standstill import Standstill
from forgemq_gateway.ticks import keep_ticking
from forgemq_gateway.turn_route import TurnRoute
from forgemq_gateway.turn_source import TurnSource
from forgemq_gateway.whereabouts import Whereabouts
from forgemq_rendering import Rendering
from forgemq_settings.environment import SettingsError, parse
from forgemq_settings.tls import server_certificate
from forgemq_shell.dead_letters import DeadLetters
from forgemq_shell.service import Context
from forgemq_telemetry.telemetry import Telemetry

__all__ = ["CONSUMES", "PRODUCES", "main", "serve"]


async def main(context: Context) -> None:
    """Serve until the context says stop."""
    favour_event_loop()
    allow_connections()
    settings = parse(GatewaySettings, prefix="FORGEMQ_GATEWAY_", environ=context.environ)
    await serve(
        configuration=context.configuration,
        settings=settings,
        log=context.log,
        telemetry=context.telemetry,
        stop=context.stop,
    )


async def serve(
    *,
    configuration: RunConfiguration,
    settings: GatewaySettings,
    log: Log,
    telemetry: Telemetry,
    stop: asyncio.Event,
    listener: socket.socket | None = None,
) -> None:
    """Run one gateway on one log until `stop`; open requests then get a moment to end.

    The caller closes the log. Without a bound `listener` it binds the settings' address.
    """
    renderings = {
        policy: Rendering.load(
            configuration.model.path, renderer=configuration.model.renderer, history=policy
        )
        for policy in histories_of(configuration)
    }
    certificate = server_certificate(
        settings.tls_certificate_file, settings.tls_key_file, prefix="FORGEMQ_GATEWAY_"
    )
    listeners = [listener or bound_socket(settings)]
    peers = peer_socket(settings)
    if peers is not None:
        listeners.append(peers)
    keys = AdminKeys((settings.admin_key,) if settings.admin_key else (), run=configuration.run)
    hosts = {listener.getsockname()[0] for listener in listeners}
    followed = FollowedKeys(settings, keys=keys, hosts=hosts, telemetry=telemetry)
    try:
        followed.start()
    except SettingsError:
        for each in listeners:
            each.close()
        raise
    peer_url = settings.peer_url or url_of(listeners[-1], is_tls=certificate is not None)
    async with asyncio.TaskGroup() as tasks, Forwarder() as forwarder:
        context = await new_context(
            log,
            configuration=configuration,
            settings=settings,
            telemetry=telemetry,
            tasks=tasks,
            # Another process at its address is another gateway: what this one owned is not its.
            gateway=f"{peer_url}#{secrets.token_hex(4)}",
            peer_url=peer_url,
        )
        report_memory_shortage(context)
        following = [tasks.create_task(followed.follow())]
        if certificate is not None:
            following.append(tasks.create_task(certificate.follow(telemetry.event)))
        server = GatewayServer(
            log, renderings=renderings, keys=keys, forwarder=forwarder, context=context
        )
        tls = None if certificate is None else certificate.context
        await server.run(listeners, stop=stop, tls=tls)
        for task in following:
            task.cancel()


async def new_context(
    log: Log,
    *,
    configuration: RunConfiguration,
    settings: GatewaySettings,
    telemetry: Telemetry,
    tasks: asyncio.TaskGroup,
    gateway: str,
    peer_url: str,
    clock: Clock | None = None,
) -> GatewayContext:
    """What all parts of one gateway process share; `gateway` is its id, of no other one."""
    writer = await log.writer()
    partitions = configuration.log.group_partitions
    gateways = Gateways(gateway, url=peer_url, partitions=partitions)
    read_back = ReadBack(log)
    clock = clock or Clock()
    fenced = FencedWriter(log, gateways=gateways, read_back=read_back, tasks=tasks)
    return GatewayContext(
        configuration=configuration,
        settings=msgspec.structs.replace(settings, admin_key=""),  # Kept as a hash alone.
        registry=Registry(),
        gateways=gateways,
        read_back=read_back,
        standstill=Standstill(read_back=read_back, clock=clock),
        outbox=Outbox(
            writer,
            configuration=configuration,
            dead_letters=DeadLetters(log, writer, service="gateway", telemetry=telemetry),
            fenced=fenced,
            read_back=read_back,
        ),
        fenced=fenced,
        clock=clock,
        lane_changes=LaneChanges(configuration.log, telemetry=telemetry),
        changed=ChangeSignal(),
        tasks=tasks,
        telemetry=telemetry,
    )


class GatewayServer:
    """All parts of one gateway, and the tasks that keep them going."""

    def __init__(
        self,
        log: Log,
        *,
        renderings: Mapping[HistoryPolicy, Rendering],
        keys: AdminKeys,
        forwarder: Forwarder,
        context: GatewayContext,
    ) -> None:
        configuration, settings = context.configuration, context.settings
        self._context = context
        self._ready = asyncio.Event()
        self._half_sent = HeldBytes()
        access = Access(
            keys=keys,
            registry=context.registry,
            gateways=context.gateways,
            live=configuration.live,
        )
        composer = Composer(renderings, context_tokens_max=configuration.model.context_tokens_max)
        pool = configuration.pool
        lanes = Lanes(
            pool_tokens_per_s=None if pool is None else pool.fetch_tokens_per_s,
            plan=context.lane_changes.plan,
        )
        self._lane_operations = LaneOperations(lanes, context=context)
        attempts = Attempts(lanes, lane_hold_s=settings.lane_hold_s)
        self._dispatcher = Dispatcher(attempts, context=context)
        self._operations = Operations(
            access=access, keys=keys, dispatcher=self._dispatcher, context=context
        )
        self._replica = Replica(
            log,
            dispatcher=self._dispatcher,
            parse=composer.parse,
            is_gone=forwarder.is_gone,
            context=context,
            ready=self._ready,
        )
        self._memory = BodyMemory(
            bytes_max=settings.memory_bytes_max,
            body_bytes_max=body_bytes_max(
                settings, context_tokens_max=configuration.model.context_tokens_max
            ),
            other_bytes=lambda: self._operations.held_bytes + self._half_sent.total,
        )
        self._turns = TurnRoute(
            TurnSource(composer, dispatcher=self._dispatcher, context=context),
            access=access,
            composer=composer,
            memory=self._memory,
            context=context,
        )
        self._router = self._routed(access, forwarder=forwarder)

    def _routed(self, access: Access, *, forwarder: Forwarder) -> Router:
        """The routes of agents and of the admin API."""
        context = self._context
        settings = context.settings
        return Router(
            self._turns,
            models=settings.models,
            gate=Gate(access, context=context),
            traffic=LiveTraffic(
                access=access,
                openings=self._operations.openings,
                memory=self._memory,
                context=context,
            ),
            admin=admin_app(self._operations, self._lane_operations, access=access),
            access=access,
            passing=Passing(
                forwarder,
                whereabouts=Whereabouts(context=context),
                access=access,
                forwards=Forwards(limits_of(settings, context.configuration)),
                context=context,
            ),
            ready=self._ready,
            standstill=context.standstill,
            hold_s=settings.restore_hold_s,
        )

    async def run(
        self,
        listeners: Sequence[socket.socket],
        *,
        stop: asyncio.Event,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Restore, then serve until `stop`; what this gateway owned goes to the others."""
        dispatcher, operations = self._dispatcher, self._operations
        own_url = url_of(listeners[0], is_tls=tls is not None)
        operations.public_url = self._context.settings.public_url or own_url
        tasks = self._context.tasks
        server = http_server(self._router, half_sent=self._half_sent, tls=tls)
        serving = tasks.create_task(serve_http(server, listeners))
        ending = tasks.create_task(self._end(server, stop))
        working = [tasks.create_task(each) for each in await self._replica.start()]
        working.append(tasks.create_task(self._turns.clients.follow()))
        working.append(
            tasks.create_task(
                keep_ticking(
                    self._context,
                    dispatcher=dispatcher,
                    operations=operations,
                    is_ready=self._ready.is_set,
                )
            )
        )
        ready = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait((ready, serving), return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            self._context.telemetry.event("serving", url=operations.public_url)
        ready.cancel()
        await serving
        for task in (*working, ending):
            task.cancel()

    async def _end(self, server: uvicorn.Server, stop: asyncio.Event) -> None:
        await stop.wait()
        with suppress(LogError):  # The others find out by themselves.
            await self._replica.leave()
        server.should_exit = True
        self._operations.answer_long_polls()
