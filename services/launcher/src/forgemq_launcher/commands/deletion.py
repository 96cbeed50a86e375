"""`forgemq delete`: removes a run from broker, blob store and disk, and says what it removed."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.kafka_removal import KafkaRemoval, RunOnBroker, kafka_removal
from forgemq_contracts.topics import SHARED
from forgemq_launcher import exit_status
from forgemq_launcher.display.lines import say
from forgemq_launcher.run_folder import RunFolder, RunFolderError
from forgemq_shell.connection import kafka_connection
from forgemq_shell.started_run import newest_start

Confirm = Callable[[str], bool]
"""Asks a question; returns whether the answer is yes."""


async def delete_run(
    folder: RunFolder,
    environ: Mapping[str, str],
    console: Console,
    *,
    confirm: Confirm,
) -> int:
    """Delete everything of a run that is down, after a yes, and print what was removed.

    On a broker that FORGEMQ_KAFKA names: the run's topics and consumer groups. A broker in the
    run's own folder goes with the folder.

    Raises:
        RunFolderError: the run is up, or nothing of it is found here.
    """
    if folder.path.is_dir():
        folder.configuration()  # Raises: this folder is no run's, so it is not removed.
        with folder.locked():
            return await _delete(folder, environ, console, confirm=confirm)
    if not environ.get("FORGEMQ_KAFKA"):
        folder.configuration()  # Raises: there is no such run.
    return await _delete(folder, environ, console, confirm=confirm)


def asks_terminal() -> bool:
    """Ask the person at the terminal for a yes; no without one."""
    return sys.stdin.isatty() and input("[y/N] ").strip().lower() in ("y", "yes")


async def _delete(
    folder: RunFolder, environ: Mapping[str, str], console: Console, *, confirm: Confirm
) -> int:
    if not environ.get("FORGEMQ_KAFKA"):
        return await _delete_here(folder, environ, console, confirm=confirm)
    connection = kafka_connection(environ)
    async with kafka_removal(connection) as removal:
        found = await removal.find(folder.run)
        if found.joined:
            raise RunFolderError(
                f"run {folder.run} is up on {connection.bootstrap}: "
                f"{', '.join(found.joined)} have members; stop its services first"
            )
        blobs = environ.get("FORGEMQ_BLOBS") or await _announced_blobs(connection, folder.run)
        if not found.topics + found.groups and not folder.path.is_dir():
            raise RunFolderError(f"run {folder.run} has nothing on {connection.bootstrap}")
        if not confirm(_question(folder, found, connection=connection, blobs=blobs)):
            return _nothing(console)
        # The topics after the blobs: a run that is half deleted is found again by its topics.
        await _delete_blobs(folder, blobs, console)
        await _delete_there(removal, found, console)
    _delete_folder(folder, console)
    return exit_status.OK


async def _delete_here(
    folder: RunFolder, environ: Mapping[str, str], console: Console, *, confirm: Confirm
) -> int:
    blobs = environ.get("FORGEMQ_BLOBS", "")
    elsewhere = f" and its blobs in {blobs}" if blobs else ""
    if not (folder / "kafka" / "ports.json").is_file() and (folder / "logs").is_dir():
        say(
            console,
            f"run {folder.run} has no broker of its own: what it has on another one stays, unless "
            "FORGEMQ_KAFKA names it",
        )
    if not confirm(f"delete run {folder.run}: {folder.path}{elsewhere}?"):
        return _nothing(console)
    await _delete_blobs(folder, blobs, console)
    _delete_folder(folder, console)
    return exit_status.OK


def _question(
    folder: RunFolder, found: RunOnBroker, *, connection: KafkaConnection, blobs: str
) -> str:
    parts = [
        f"{len(found.topics)} topics and {len(found.groups)} consumer groups on "
        f"{connection.bootstrap}"
    ]
    parts += [f"its blobs in {blobs}"] if blobs and not _is_elsewhere(blobs) else []
    parts += [str(folder.path)] if folder.path.is_dir() else []
    return f"delete run {folder.run}: {'; '.join(parts)}?"


async def _delete_there(removal: KafkaRemoval, found: RunOnBroker, console: Console) -> None:
    await removal.delete(found)
    for topic in found.topics:
        say(console, f"removed topic {topic}")
    for group in found.groups:
        say(console, f"removed consumer group {group}")
    shared = ", ".join(topic.name for topic in SHARED)
    say(console, f"its records on {shared} stay: all runs share these topics")


def _is_elsewhere(blobs: str) -> bool:
    """Whether it is a folder of other machines: a pod's mount, say."""
    return "://" not in blobs and not Path(blobs).is_dir()


async def _delete_blobs(folder: RunFolder, blobs: str, console: Console) -> None:
    """Delete blobs outside the run's folder; those inside go with it."""
    if not blobs or blobs == str(folder / "blobs"):
        return
    if _is_elsewhere(blobs):
        say(console, f"there is no folder {blobs} here: its blobs stay where that folder is")
        return
    size_bytes = await BlobStore(blobs, run=folder.run).delete_all()
    if size_bytes:
        say(console, f"removed its blobs and weights in {blobs} ({size_bytes:,} bytes)")
    else:
        say(console, f"found no blobs of it in {blobs}, seen from this machine")


def _delete_folder(folder: RunFolder, console: Console) -> None:
    if folder.path.is_dir():
        folder.remove()
        say(console, f"removed {folder.path}")


async def _announced_blobs(connection: KafkaConnection, run: str) -> str:
    """Blob store of the run's newest start; '' if it was never announced on this broker."""
    log = KafkaLog(connection, run=run)
    try:
        started = await newest_start(log, run)
    finally:
        await log.close()
    return started.blobs if started else ""


def _nothing(console: Console) -> int:
    say(console, "nothing was removed; --yes removes without asking")
    return exit_status.REFUSED
