"""Wiring of the gateway: log, registry, lanes, routes and the HTTP server."""

import asyncio
import socket

import uvicorn

from forgemq_bus.log import Log
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_gateway.access import Access
from forgemq_gateway.admin_route import admin_app
from forgemq_gateway.chat_route import ChatRoute
from forgemq_gateway.clock import Clock
from forgemq_gateway.composer import Composer
from forgemq_gateway.core.keys import KeyMint
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.registry import Registry
from forgemq_gateway.dispatch import Dispatcher
from forgemq_gateway.door import Door
from forgemq_gateway.feed import CONSUMES, Feed
from forgemq_gateway.operations import Operations
from forgemq_gateway.outbox import Outbox
from forgemq_gateway.pulse import Pulse
from forgemq_gateway.settings import GatewaySettings
from forgemq_gateway.surroundings import Surroundings
from forgemq_gateway.turn_source import TurnSource
from forgemq_rendering import Rendering
from forgemq_settings.environment import parse
from forgemq_shell.dead_letters import DeadLetters
from forgemq_shell.service import Context
from forgemq_telemetry.telemetry import Telemetry

__all__ = ["CONSUMES", "PRODUCES", "main", "serve"]

PRODUCES = (
    topics.REQUESTED_GROUPS,
    topics.OPENED_EPISODES,
    topics.REQUESTED_COMPLETIONS,
    topics.CANCELLED_COMPLETIONS,
    topics.DELIVERED_COMPLETIONS,
    topics.FINISHED_EPISODES,
)

# Leases, deadlines and heartbeats are looked after this often.
_TICK_S = 0.25


async def main(context: Context) -> None:
    """Serve until the context says stop."""
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
    """One gateway on one log.

    Args:
        configuration: Of the run.
        settings: Of this process.
        log: Of the run; the caller closes it.
        telemetry: Of this process.
        stop: Set it to end; open requests get a moment.
        listener: A bound socket to serve on; None binds the settings' address.
    """
    rendering = Rendering.load(
        configuration.model.path,
        renderer=configuration.model.renderer,
        history=configuration.episodes.history,
    )
    listener = listener or _listener(settings)
    writer = await log.writer()
    async with asyncio.TaskGroup() as tasks:
        around = Surroundings(
            configuration=configuration,
            settings=settings,
            registry=Registry(),
            outbox=Outbox(
                writer,
                configuration=configuration,
                dead_letters=DeadLetters(log, writer, service="gateway"),
            ),
            clock=Clock(),
            changed=Pulse(),
            tasks=tasks,
            telemetry=telemetry,
        )
        gateway = Gateway(log, rendering=rendering, around=around)
        await gateway.run(listener, stop=stop)


def _listener(settings: GatewaySettings) -> socket.socket:
    """The bound socket; the event loop sets TCP_NODELAY on what it accepts.

    It does so only where the protocol is named. Without it an answer's body waits for the client to
    acknowledge the head: 40 ms on a connection that is kept.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((settings.host, settings.port))
    return listener


class Gateway:
    """All parts of one gateway process, and the tasks that keep them going."""

    def __init__(self, log: Log, *, rendering: Rendering, around: Surroundings) -> None:
        configuration, settings = around.configuration, around.settings
        self._around = around
        self._ready = asyncio.Event()
        mint = KeyMint(settings.admin_key, run=configuration.run)
        access = Access(admin_key=settings.admin_key, mint=mint, registry=around.registry)
        composer = Composer(rendering, context_tokens_max=configuration.model.context_tokens_max)
        lanes = Lanes(lapse_s=settings.lane_lapse_s)
        self._dispatcher = Dispatcher(lanes, around=around)
        self._operations = Operations(
            access=access, mint=mint, dispatcher=self._dispatcher, around=around
        )
        self._feed = Feed(log, dispatcher=self._dispatcher, parse=composer.parse, around=around)
        chat = ChatRoute(
            TurnSource(composer, dispatcher=self._dispatcher, around=around),
            access=access,
            composer=composer,
            operations=self._operations,
            around=around,
        )
        self._door = Door(
            chat=chat,
            admin=admin_app(self._operations, access=access),
            access=access,
            ready=self._ready,
            hold_s=settings.restore_hold_s,
        )

    async def run(self, listener: socket.socket, *, stop: asyncio.Event) -> None:
        """Restore, then serve until `stop`."""
        host, port = listener.getsockname()[:2]
        self._operations.public_url = self._around.settings.public_url or f"http://{host}:{port}"
        server = uvicorn.Server(_server_configuration(self._door))
        self._around.tasks.create_task(self._end(server, stop))
        serving = self._around.tasks.create_task(_serve_http(server, listener))
        await self._feed.restore()
        following = self._around.tasks.create_task(self._feed.follow())
        marking = self._around.tasks.create_task(self._feed.mark())
        ticking = self._around.tasks.create_task(self._tick())
        self._ready.set()
        self._around.telemetry.event("serving", url=self._operations.public_url)
        await serving
        stop.set()
        for task in (following, marking, ticking):
            task.cancel()

    async def _end(self, server: uvicorn.Server, stop: asyncio.Event) -> None:
        await stop.wait()
        server.should_exit = True
        self._operations.answer_long_polls()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._dispatcher.redispatch()
            await self._operations.lapse()
            self._operations.held_bytes = self._around.registry.size_bytes()
            self._around.telemetry.gauge("gateway.history_bytes", self._operations.held_bytes)
            self._around.telemetry.gauge("gateway.groups", len(self._around.registry.groups))
            for lane, in_flight in self._dispatcher.lanes.in_flight().items():
                self._around.telemetry.gauge("gateway.in_flight", in_flight, lane=lane)


def _server_configuration(door: Door) -> uvicorn.Config:
    return uvicorn.Config(
        door,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=120,
        timeout_graceful_shutdown=5,
        backlog=4096,
    )


async def _serve_http(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until `server.should_exit`; signals stay with the shell, so not `server.serve`."""
    try:
        await server._serve(sockets=[listener])
    except asyncio.CancelledError:
        server.force_exit = True
        await server.shutdown(sockets=[listener])
        raise
