"""`python -m forgemq_agents import FILE --domain D`: imports finished conversations into a run."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import aiohttp

from forgemq_agents.admin_key import admin_key_of
from forgemq_agents.conversation_import import (
    TAKEN_MAX,
    ConversationImport,
    FileRefusedError,
    Imported,
    check_file,
)
from forgemq_agents.core.conversations import ConversationError
from forgemq_agents.episode_player import EpisodePlayer
from forgemq_agents.errors import GatewayError
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.lease_thread import LeaseThread
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_agents.settings import ImportSettings
from forgemq_agents.trained_conversations import TrainedConversations
from forgemq_settings.environment import SettingsError, parse
from forgemq_telemetry.causes import causes
from forgemq_telemetry.regular_calls import called_every
from forgemq_telemetry.telemetry import Telemetry

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
TOLD_EVERY_S = 10.0
"""A run takes in some tens of conversations a second: a large file takes half an hour."""
READ_TIMEOUT_S = 60.0
"""No request of an import waits for a completion: all but long polls take milliseconds."""


def run_import(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Import a file; returns the exit status.

    0: every conversation is in the run. 1: the gateway refused or was away, or a group was lost.
    2: settings, the domain, a line or a row; nothing was imported. 130: stopped by a signal.
    """
    options = _parser().parse_args(arguments)
    try:
        own = {"FORGEMQ_AGENTS_" + name.upper() for name in ImportSettings.__struct_fields__}
        given = {name: value for name, value in environ.items() if name in own}
        settings = parse(ImportSettings, prefix="FORGEMQ_AGENTS_", environ=given)
        admin_key_of(
            settings, telemetry=Telemetry(service="agents")
        )  # Refused here, and not after the file is read.
        count = check_file(options.file)
    except (SettingsError, FileRefusedError, OSError) as error:
        return _refuse(str(error), EXIT_REFUSED)
    status = EXIT_INTERRUPTED
    try:
        status = asyncio.run(_import(options.file, options.domain, settings=settings, count=count))
    except* (GatewayError, ConversationError) as errors:
        status = _refuse(str(causes(errors)[0]), EXIT_FAILED)
    except* asyncio.CancelledError:
        _refuse("stopped at once: repeat it, to end the groups that it leaves open", status)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forgemq_agents")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    made = commands.add_parser("import", help="import finished conversations into a run")
    made.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="one conversation a line, JSON; or Parquet of an export",
    )
    made.add_argument("--domain", required=True, help="of the run; the conversations belong to it")
    return parser


def _refuse(text: str, status: int) -> int:
    sys.stderr.write(f"import: {text}\n")
    return status


async def _import(path: Path, domain: str, *, settings: ImportSettings, count: int) -> int:
    retry = Retry(deadline_s=settings.retry_deadline_s, read_timeout_s=READ_TIMEOUT_S)
    telemetry = Telemetry(service="agents")
    admin_key = admin_key_of(settings, telemetry=telemetry)
    async with AsyncExitStack() as beside, aiohttp.ClientSession() as http:
        requests = JsonRequests(http, retry=retry)
        gateway = GatewayClient(requests, url=settings.gateway_url, admin_key=admin_key)
        run, training = await gateway.read_run(), None
        if domain not in run.domains:
            known = ", ".join(run.domains)
            return _refuse(
                f"--domain: there is no domain {domain!r}; there are {known}", EXIT_REFUSED
            )
        if domain in run.supervised_domains:
            leases = LeaseThread(url=settings.gateway_url, admin_key=admin_key, retry=retry)
            player = EpisodePlayer(
                gateway=gateway,
                requests=requests,
                leases=await beside.enter_async_context(leases),
                environ={},
                telemetry=telemetry,
            )
            training = TrainedConversations(gateway, player=player)
        made = ConversationImport(gateway, domain=domain, training=training)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, made.stop)
        _print(f"{path}: {count} conversations, all good")
        with tell_done(made, count=count):
            done = await made.run(path)
        return _say(done, domain=domain, count=count)


@contextmanager
def tell_done(
    made: ConversationImport, *, count: int, every_s: float = TOLD_EVERY_S
) -> Iterator[None]:
    """Print every so often, while the block runs, how many conversations are done."""
    with called_every(every_s, lambda: _print(f"{made.done} of {count} are done")):
        yield


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _say(made: Imported, *, domain: str, count: int) -> int:
    done = made.added + made.known
    _print(f"{done} of {count} are in {domain}: {made.added} added, {made.known} there already")
    if made.unused:
        _print(f"{made.unused} were not used: training ended before it had room for them")
    for lost in made.lost:
        _print(f"lost: {lost}")
    if made.is_full:
        others = count - done - made.unused - len(made.lost)
        _refuse(f"the run is full and has not got the other {others:,}: {TAKEN_MAX}", EXIT_FAILED)
    if made.lost or made.is_full:
        return EXIT_FAILED
    return EXIT_OK if done + made.unused == count else EXIT_INTERRUPTED
