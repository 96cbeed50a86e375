"""Wiring of the console: a Faust stream into the aggregate, the aggregate onto a page."""

import asyncio
import os
import socket
import tempfile
from collections.abc import Coroutine
from pathlib import Path

import uvicorn

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaLog
from forgemq_bus.kafka_runs import runs_on_broker
from forgemq_bus.log import Log
from forgemq_console.access import Application, ConsoleKeys, guarded
from forgemq_console.group_reading import group_reader, token_text_of
from forgemq_console.http import web
from forgemq_console.other_runs import Broker, OtherRuns
from forgemq_console.runs_http import add_runs
from forgemq_console.settings import ConsoleSettings
from forgemq_console.stream import stream_app
from forgemq_contracts.run import StartedRun
from forgemq_contracts.topics import Topic
from forgemq_run_view.view import TOPICS, RunView
from forgemq_settings.environment import parse
from forgemq_settings.tls import ServerCertificate, server_certificate
from forgemq_shell.clock import now_ms
from forgemq_shell.connection import kafka_connection
from forgemq_shell.service import Context

CONSUMES: tuple[Topic, ...] = TOPICS
PRODUCES: tuple[Topic, ...] = ()

STOP_GRACE_S = 2
"""Pages ask every second, so open connections are no reason to wait longer."""


async def main(context: Context) -> None:
    """Serve the page until the context says stop."""
    with tempfile.TemporaryDirectory(prefix="forgemq-console-") as datadir:
        await show_run(context, datadir=Path(datadir))


async def show_run(context: Context, *, datadir: Path) -> None:
    """Follow the run and serve what it adds up to until the context says stop."""
    settings = parse(ConsoleSettings, prefix="FORGEMQ_CONSOLE_", environ=context.environ)
    view = RunView(context.started)
    stream = stream_app(
        kafka_connection(context.environ),
        run=context.started.run,
        start_id=f"{now_ms()}-{os.getpid()}",
        view=view,
        blobs=context.blobs,
        datadir=datadir,
        on_bad=lambda text: context.telemetry.event("record_skipped", reason=text),
    )
    read_group = group_reader(
        context.log,
        view,
        token_text=token_text_of(Path(context.configuration.model.path)),
        episodes_max=settings.episodes_shown_max,
    )
    sockets = inherited_sockets(settings)
    hosts = [each.getsockname()[0] for each in sockets] if sockets else [settings.host]
    keys = ConsoleKeys(settings, hosts=hosts, telemetry=context.telemetry)
    certificate = certificate_of(settings)
    runs = OtherRuns(context.log, _broker(context), episodes_max=settings.episodes_shown_max)
    page = web(view, clock_ms=now_ms, read_group=read_group)
    add_runs(page, runs, clock_ms=now_ms)
    application = guarded(page, keys)
    server = page_server(application, settings, certificate=certificate)
    await stream.start()
    try:
        context.telemetry.event("listening", host=settings.host, port=settings.port)
        following = None if certificate is None else certificate.follow(context.telemetry.event)
        await serve(server, context.stop, sockets=sockets, following=following)
    finally:
        await stream.stop()
        await runs.close()


def _broker(context: Context) -> Broker:
    """How the logs of other runs on the console's broker are opened."""
    connection = kafka_connection(context.environ)

    def open_log(started: StartedRun) -> Log:
        address = context.environ.get("FORGEMQ_BLOBS") or started.blobs
        return KafkaLog(connection, run=started.run, blobs=BlobStore(address, run=started.run))

    return Broker(open_log=open_log, present=lambda: runs_on_broker(connection))


def certificate_of(settings: ConsoleSettings) -> ServerCertificate | None:
    """The certificate that the settings name; None if the page is served plainly.

    Raises:
        SettingsError: it cannot be used.
    """
    return server_certificate(
        settings.tls_certificate_file, settings.tls_key_file, prefix="FORGEMQ_CONSOLE_"
    )


def page_server(
    application: Application, settings: ConsoleSettings, *, certificate: ServerCertificate | None
) -> uvicorn.Server:
    """A server of this application at the settings' address; without a certificate it is plain."""
    return uvicorn.Server(
        uvicorn.Config(
            application,
            host=settings.host,
            port=settings.port,
            log_config=None,  # Its warnings go the way of every library's.
            timeout_graceful_shutdown=STOP_GRACE_S,
            ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
        )
    )


def inherited_sockets(settings: ConsoleSettings) -> list[socket.socket] | None:
    """The socket that a supervisor bound, so that nobody else has the port; None without one."""
    return [socket.socket(fileno=settings.listener_fd)] if settings.listener_fd >= 0 else None


async def serve(
    server: uvicorn.Server,
    stop: asyncio.Event,
    *,
    sockets: list[socket.socket] | None = None,
    following: Coroutine[None, None, None] | None = None,
) -> None:
    """Answer requests at these sockets, or at the server's own address, until the event is set.

    Meanwhile `following` runs.
    """
    async with asyncio.TaskGroup() as group:
        beside = [] if following is None else [group.create_task(following)]
        # uvicorn's `serve` would take over the signals, which belong to the shell.
        serving = group.create_task(server._serve(sockets=sockets))
        stopping = group.create_task(stop.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        for each in (stopping, *beside):
            each.cancel()
