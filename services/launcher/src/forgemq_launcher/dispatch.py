"""Runs one command of `forgemq`, of whose modules it imports only those that the command needs."""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from forgemq_bus.broker import BrokerError
from forgemq_bus.errors import AccessError, BlobError, LogError, PartitionCountError
from forgemq_launcher import exit_status
from forgemq_launcher.arguments import TRANSFORMS, options_of
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.display.lines import say
from forgemq_launcher.run_folder import NotOnLogError, RunFolderError, folder_named, run_folders
from forgemq_launcher.settings import LauncherSettings
from forgemq_settings.environment import SettingsError, parse
from forgemq_shell.started_run import RunNotStartedError, UnreadableRunError


def run_tool(
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str],
    console: Console,
    refusals: Console | None = None,
) -> int:
    """Run what is behind `forgemq`, as `run_command` does; None: refusals are printed as the rest.

    Raises:
        SystemExit: it is no command, or only help.
    """
    said = console if refusals is None else refusals
    return run_command(options_of(arguments), environ=environ, console=console, refusals=said)


def run_command(
    options: argparse.Namespace, *, environ: Mapping[str, str], console: Console, refusals: Console
) -> int:
    """Run the command that these options are of; returns the exit status.

    Args:
        options: As `options_of` gives them.
        environ: The settings are read from it.
        console: Gets what the command prints.
        refusals: Gets the line that says why a command was refused or failed.

    Raises:
        OSError: a path cannot be read or written; it may be the output, which then can say nothing.
    """
    try:
        settings = parse(LauncherSettings, prefix="FORGEMQ_LAUNCHER_", environ=environ)
        return _command(options, settings=settings, environ=environ, console=console)
    except (ConfigurationError, RunFolderError, SettingsError) as error:
        say(refusals, f"forgemq: {error}")
        return exit_status.REFUSED
    except (AccessError, PartitionCountError, UnreadableRunError) as error:
        say(refusals, f"forgemq: broker: {error}")
        return exit_status.REFUSED
    except BlobError as error:
        say(refusals, f"forgemq: blobs: {error}")
        say(refusals, "FORGEMQ_BLOBS names where this machine reaches the run's blobs")
        return exit_status.REFUSED
    except NotOnLogError as error:
        say(refusals, f"forgemq: {error}")
        return exit_status.FAILED
    except (LogError, BrokerError, RunNotStartedError) as error:
        say(refusals, f"forgemq: broker: {error}")
        return exit_status.FAILED


def _command(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    runs = Path(settings.runs)
    match options.command:
        case "run" | "eval" | "create":
            from forgemq_launcher.commands.starting import start_run

            return start_run(options, settings=settings, environ=environ, console=console)
        case "resolve" | "plan" | "new-head" | "merge":
            from forgemq_launcher.commands.without_run import without_run

            return without_run(options, environ=environ, console=console)
        case "runs":
            from forgemq_launcher.commands.run_list import list_runs

            found, lines = run_folders(runs), options.json
            return asyncio.run(list_runs(found, environ, console, as_lines=lines))
        case "replay":
            return _replay(options, environ=environ, console=console, runs=runs)
        case "delete":
            return _delete(options, environ=environ, console=console, runs=runs)
        case "import":
            return _import(options, settings=settings, environ=environ, console=console)
        case "lanes" | "add-lane" | "drain-lane" | "resume-lane" | "remove-lane":
            return _lanes(options, settings=settings, environ=environ, console=console)
        case _:
            return _look(options, environ=environ, console=console, runs=runs)


def _look(
    options: argparse.Namespace, *, environ: Mapping[str, str], console: Console, runs: Path
) -> int:
    """Run a command that reads the log of a run; `stop` asks for its end, `end` writes it."""
    from forgemq_launcher.commands import inspection

    folder = folder_named(options.run, runs=runs)
    match options.command:
        case "audit":
            whole = options.json
            return asyncio.run(inspection.audit(folder, environ, console, as_document=whole))
        case "inspect":
            inspecting = inspection.inspect(
                folder,
                environ,
                console,
                what=options.what,
                as_requests=options.requests,
                as_lines=options.json,
            )
            return asyncio.run(inspecting)
        case "report":
            return asyncio.run(inspection.report(folder, environ, console, to=options.to))
        case "watch":
            from forgemq_launcher.commands.watching import watch

            return asyncio.run(watch(folder, environ, console))
        case "stop":
            from forgemq_launcher.commands.stopping import stop

            why, timeout_s = options.reason, options.timeout
            return asyncio.run(stop(folder, environ, console, detail=why, timeout_s=timeout_s))
        case "resume":
            from forgemq_launcher.commands.resuming import resume

            return asyncio.run(resume(folder, environ, console))
        case "end":
            from forgemq_launcher.commands.ending import end

            return asyncio.run(
                end(folder, environ, console, to=options.to, workloads=options.release)
            )
        case "export":
            # Imported here: only an export needs a tokenizer and Parquet.
            from forgemq_launcher.commands.export import export_run

            return asyncio.run(
                export_run(folder, environ, console, to=options.to, model=options.model)
            )
        case _:
            from forgemq_launcher.commands.dead_letters import dlq

            return asyncio.run(dlq(folder, environ, console, as_lines=options.json))


def _replay(
    options: argparse.Namespace, *, environ: Mapping[str, str], console: Console, runs: Path
) -> int:
    from forgemq_launcher.commands import replay

    services = (options.service,) if options.service else TRANSFORMS
    given = {"--partition": options.partition, "--to": options.to}
    arguments = [f"{name}={value}" for name, value in given.items() if value is not None]
    folder = folder_named(options.run, runs=runs)
    return asyncio.run(
        replay.replay_journals(folder, environ, console, services=services, arguments=arguments)
    )


def _import(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    from forgemq_launcher.commands.import_conversations import import_conversations

    importing = import_conversations(
        folder_named(options.run, runs=Path(settings.runs)),
        environ,
        console,
        host=settings.reached_host,
        file=options.file,
        domain=options.domain,
    )
    return asyncio.run(importing)


def _lanes(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    from forgemq_launcher.commands import lane_changes
    from forgemq_launcher.commands.own_gateway import run_gateway

    folder = folder_named(options.run, runs=Path(settings.runs))
    gateway = run_gateway(folder, environ, host=settings.reached_host)
    match options.command:
        case "lanes":
            return lane_changes.list_lanes(gateway, console)
        case "add-lane":
            return lane_changes.add_lane(
                gateway, console, lane=options.lane, engine_url=options.engine
            )
        case command:
            change = command.removesuffix("-lane")
            return lane_changes.change_lane(gateway, console, change, lane=options.lane)


def _delete(
    options: argparse.Namespace, *, environ: Mapping[str, str], console: Console, runs: Path
) -> int:
    from forgemq_launcher.commands.deletion import asks_terminal, delete_run

    def confirm(question: str) -> bool:
        say(console, question)
        return bool(options.yes) or asks_terminal()

    folder = folder_named(options.run, runs=runs)
    return asyncio.run(delete_run(folder, environ, console, confirm=confirm))
