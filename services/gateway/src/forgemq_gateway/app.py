"""Wiring of the gateway: log, registry, lanes, routes and the HTTP server."""

import asyncio
import socket

import msgspec
import uvicorn

from forgemq_bus.log import Log
from forgemq_contracts.run import RunConfiguration
from forgemq_gateway.access import Access
from forgemq_gateway.admin_keys import KeyFile
from forgemq_gateway.admin_route import admin_app
from forgemq_gateway.body_memory import BodyMemory
from forgemq_gateway.change_signal import ChangeSignal
from forgemq_gateway.clock import Clock
from forgemq_gateway.composer import Composer
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.attempts import Attempts
from forgemq_gateway.core.held_bytes import HeldBytes
from forgemq_gateway.core.keys import AdminKeys
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.registry import Registry
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.feed import CONSUMES, Feed
from forgemq_gateway.gate import Gate
from forgemq_gateway.handover import Handover
from forgemq_gateway.http_server import (
    allow_connections,
    bound_socket,
    http_server,
    serve_http,
)
from forgemq_gateway.large_work import favour_event_loop
from forgemq_gateway.memory_need import report_memory_shortage
from forgemq_gateway.operations import Operations
from forgemq_gateway.outbox import PRODUCES, Outbox
from forgemq_gateway.ownership import StandingClaim
from forgemq_gateway.protocols import COUNTERS, PROTOCOLS
from forgemq_gateway.router import Router
from forgemq_gateway.settings import GatewaySettings
from forgemq_gateway.ticks import keep_ticking
from forgemq_gateway.turn_route import TurnRoute
from forgemq_gateway.turn_source import TurnSource
from forgemq_rendering import Rendering
from forgemq_settings.environment import parse
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
    rendering = Rendering.load(
        configuration.model.path,
        renderer=configuration.model.renderer,
        history=configuration.episodes.history,
    )
    listener = listener or bound_socket(settings)
    keys = AdminKeys((settings.admin_key,) if settings.admin_key else (), run=configuration.run)
    key_file = KeyFile(settings, keys=keys, host=listener.getsockname()[0], telemetry=telemetry)
    key_file.start()
    writer = await log.writer()
    dead_letters = DeadLetters(log, writer, service="gateway")
    async with asyncio.TaskGroup() as tasks:
        context = GatewayContext(
            configuration=configuration,
            settings=msgspec.structs.replace(settings, admin_key=""),  # Kept as a hash alone.
            registry=Registry(),
            outbox=Outbox(
                writer,
                configuration=configuration,
                dead_letters=dead_letters,
                claim=StandingClaim(log),
            ),
            clock=Clock(),
            changed=ChangeSignal(),
            tasks=tasks,
            telemetry=telemetry,
        )
        report_memory_shortage(context)
        following = tasks.create_task(key_file.follow())
        server = GatewayServer(log, rendering=rendering, keys=keys, context=context)
        await server.run(listener, stop=stop)
        following.cancel()


class GatewayServer:
    """All parts of one gateway, and the tasks that keep them going."""

    def __init__(
        self, log: Log, *, rendering: Rendering, keys: AdminKeys, context: GatewayContext
    ) -> None:
        configuration, settings = context.configuration, context.settings
        self._context = context
        self._ready = asyncio.Event()
        self._half_sent = HeldBytes()
        access = Access(keys=keys, registry=context.registry)
        composer = Composer(rendering, context_tokens_max=configuration.model.context_tokens_max)
        attempts = Attempts(Lanes(), lane_hold_s=settings.lane_hold_s)
        self._dispatcher = Dispatcher(attempts, context=context)
        self._operations = Operations(
            access=access, keys=keys, dispatcher=self._dispatcher, context=context
        )
        self._feed = Feed(
            log,
            dispatcher=self._dispatcher,
            parse=composer.parse,
            context=context,
            ready=self._ready,
        )
        turns = TurnRoute(
            TurnSource(composer, dispatcher=self._dispatcher, context=context),
            access=access,
            composer=composer,
            memory=BodyMemory(
                bytes_max=settings.memory_bytes_max,
                other_bytes=lambda: self._operations.held_bytes + self._half_sent.total,
            ),
            context=context,
        )
        self._router = Router(
            turns,
            models=[name.strip() for name in settings.models.split(",")],
            gate=Gate(access, context=context),
            protocols=PROTOCOLS,
            counters=COUNTERS,
            admin=admin_app(self._operations, access=access),
            access=access,
            ready=self._ready,
            hold_s=settings.restore_hold_s,
        )

    async def run(self, listener: socket.socket, *, stop: asyncio.Event) -> None:
        """Restore, then serve until `stop`, or until another gateway takes the run over."""
        dispatcher, operations = self._dispatcher, self._operations
        bound_url = "http://{}:{}".format(*listener.getsockname()[:2])
        operations.public_url = self._context.settings.public_url or bound_url
        tasks = self._context.tasks
        server = http_server(self._router, half_sent=self._half_sent)
        tasks.create_task(self._end(server, stop))
        serving = tasks.create_task(serve_http(server, listener))
        await self._feed.restore(url=operations.public_url)
        handover = Handover(server, dispatcher=dispatcher, operations=operations)
        ticking = keep_ticking(
            self._context,
            dispatcher=dispatcher,
            operations=operations,
            is_ready=self._ready.is_set,
        )
        owners = [tasks.create_task(each) for each in (self._feed.keep_marks(), ticking)]
        following = tasks.create_task(handover.follow(self._feed, owners=owners))
        self._ready.set()
        self._context.telemetry.event("serving", url=operations.public_url)
        await serving
        stop.set()
        for task in (*owners, following):
            task.cancel()
        handover.check()

    async def _end(self, server: uvicorn.Server, stop: asyncio.Event) -> None:
        await stop.wait()
        server.should_exit = True
        self._operations.answer_long_polls()
