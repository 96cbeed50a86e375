"""Wiring of the console: a Faust stream into the aggregate, the aggregate onto a page; audits."""

import asyncio
import os
import tempfile
from pathlib import Path

import uvicorn
from tokenizers import Tokenizer

from forgemq_bus.log import Place
from forgemq_console.auditing import keep_audited
from forgemq_console.core import GroupView, TokenText, group_view
from forgemq_console.http import web
from forgemq_console.settings import ConsoleSettings
from forgemq_console.stream import stream_app
from forgemq_contracts.topics import AUDITED_GROUPS, FINISHED_COMPLETIONS, Topic
from forgemq_run_view import auditing
from forgemq_run_view.reading import message_of, read_at
from forgemq_run_view.view import TOPICS, RunView
from forgemq_settings.environment import parse
from forgemq_shell.clock import now_ms
from forgemq_shell.connection import kafka_connection
from forgemq_shell.service import Context

CONSUMES: tuple[Topic, ...] = tuple(dict.fromkeys((*TOPICS, *auditing.TOPICS)))
PRODUCES: tuple[Topic, ...] = (AUDITED_GROUPS,)

STOP_GRACE_S = 2


async def main(context: Context) -> None:
    """Serve the page until the context says stop."""
    with tempfile.TemporaryDirectory(prefix="forgemq-console-") as datadir:
        await _shown(context, datadir=Path(datadir))


async def _shown(context: Context, *, datadir: Path) -> None:
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
    token_text = token_text_of(Path(context.configuration.model.path))

    async def read_group(group_id: str, episode_id: str | None) -> GroupView:
        places = [(Place(FINISHED_COMPLETIONS.name, p), at) for p, at in view.places(group_id)]
        return group_view(
            group_id,
            [message_of(record) for record in await read_at(context.log, places)],
            episode_id=episode_id,
            token_text=token_text,
            episodes_max=settings.episodes_shown_max,
        )

    server = uvicorn.Server(
        uvicorn.Config(
            web(view, clock_ms=now_ms, read_group=read_group),
            host=settings.host,
            port=settings.port,
            log_config=None,  # its warnings go the way of every library's
            timeout_graceful_shutdown=STOP_GRACE_S,
        )
    )
    await stream.start()
    try:
        context.telemetry.event("listening", host=settings.host, port=settings.port)
        async with asyncio.TaskGroup() as group:
            audits = group.create_task(keep_audited(context, every_s=settings.audit_every_s))
            await _serve(server, context.stop)
            audits.cancel()
    finally:
        await stream.stop()


async def _serve(server: uvicorn.Server, stop: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as group:
        # `_serve` of uvicorn without its signal handlers: signals belong to the shell.
        serving = group.create_task(server._serve())
        stopping = group.create_task(stop.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        stopping.cancel()


def token_text_of(model: Path) -> TokenText:
    """Text of one token by the model's tokenizer; its number where there is none."""
    path = model / "tokenizer.json"
    if not path.is_file():
        return str
    tokenizer = Tokenizer.from_file(str(path))
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
