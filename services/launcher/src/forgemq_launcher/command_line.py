"""The command line tool `forgemq`; thin over the launcher's modules."""

import argparse
import asyncio
import importlib.util
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from forgemq_bus.broker import BrokerError
from forgemq_bus.errors import AccessError, BlobError, LogError, PartitionCountError
from forgemq_launcher import exit_status
from forgemq_launcher.arguments import options_of
from forgemq_launcher.asked_run import (
    check_paths,
    configured,
    folder_named,
    folder_of_run,
    names_run,
    new_folder,
    resolved,
)
from forgemq_launcher.core.configuration import (
    ConfigurationError,
    name_of,
    next_run,
)
from forgemq_launcher.display.lines import say, terminal
from forgemq_launcher.placement import DEVICE, device_of
from forgemq_launcher.run_folder import (
    NotOnLogError,
    RunFolderError,
    names_taken,
    run_folders,
)
from forgemq_launcher.run_setup import RunSetup
from forgemq_launcher.settings import LauncherSettings
from forgemq_launcher.upkeep.services import TRANSFORMS
from forgemq_settings.environment import SettingsError, parse
from forgemq_settings.hidden_process import hide_process
from forgemq_shell.started_run import RunNotStartedError, UnreadableRunError

PROGRAM = "forgemq"
"""As the distribution installs it."""


def main() -> None:
    """Run the tool and exit with its status."""
    hide_process()
    # Broker clients log every retry; the tool prints what finally failed, once.
    logging.getLogger().addHandler(logging.NullHandler())
    # The tool is an entry point like a service's __main__: it reads the environment once.
    environ = dict(os.environ)  # noqa: TID251
    try:
        console, refusals = terminal(), terminal(is_stderr=True)
        status = run_tool(sys.argv[1:], environ=environ, console=console, refusals=refusals)
    except KeyboardInterrupt:  # Of a command that has nothing to put in order.
        sys.exit(exit_status.INTERRUPTED)
    except OSError as error:  # A full disk, or a path that cannot be read or written.
        # If it is the output itself, the interpreter else tries once more and makes the status 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"{PROGRAM}: {error}")
    sys.exit(status)


def run_tool(
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str],
    console: Console,
    refusals: Console | None = None,
) -> int:
    """Run one command; returns the exit status.

    Args:
        arguments: Behind `forgemq`.
        environ: The settings are read from it.
        console: Gets what the command prints.
        refusals: Gets the line that says why a command was refused or failed; None: as `console`.

    Raises:
        OSError: a path cannot be read or written; it may be the output, which then can say nothing.
    """
    options = options_of(arguments)
    said = console if refusals is None else refusals
    try:
        settings = parse(LauncherSettings, prefix="FORGEMQ_LAUNCHER_", environ=environ)
        return _command(options, settings=settings, environ=environ, console=console)
    except (ConfigurationError, RunFolderError, SettingsError) as error:
        say(said, f"forgemq: {error}")
        return exit_status.REFUSED
    except (AccessError, PartitionCountError, UnreadableRunError) as error:
        say(said, f"forgemq: broker: {error}")
        return exit_status.REFUSED
    except BlobError as error:
        say(said, f"forgemq: blobs: {error}")
        say(said, "FORGEMQ_BLOBS names where this machine reaches the run's blobs")
        return exit_status.REFUSED
    except NotOnLogError as error:
        say(said, f"forgemq: {error}")
        return exit_status.FAILED
    except (LogError, BrokerError, RunNotStartedError) as error:
        say(said, f"forgemq: broker: {error}")
        return exit_status.FAILED


def _command(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    # Imported here: `forgemq runs` and a refused file need no broker client.
    from forgemq_launcher.commands.run_list import list_runs

    runs = Path(settings.runs)
    match options.command:
        case "run" | "eval":
            start = _eval if options.command == "eval" else _run
            return start(options, settings=settings, environ=environ, console=console)
        case "create":
            return _create(options, environ=environ, console=console)
        case "resolve" | "plan" | "new-head" | "merge":
            from forgemq_launcher.commands.without_run import without_run

            return without_run(options, environ=environ, console=console)
        case "runs":
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


def _run(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise SettingsError(
            "FORGEMQ_LAUNCHER_TENSORBOARD: install forgemq-telemetry[tensorboard], or leave it off"
        )
    folder, made = folder_of_run(options, runs=Path(settings.runs), environ=environ)
    device = device_of(made, environ)
    environ = {**environ, DEVICE: device}
    with folder.locked():
        say(console, f"run {folder.run} in {folder.path}")
        if options.resume:
            say(console, f"it goes on with its own configuration: {options.file} is not read")
        budget = made.trainer.memory_budget_bytes / 1e9
        say(console, f"trainer on {device}, trainer.memory_budget_bytes {budget:.1f} GB")
        setup = RunSetup(
            folder=folder,
            configuration=made,
            settings=settings,
            environ=environ,
            is_resumed=bool(options.resume),
            resume_command=resume_command(sys.argv[0], file=options.file, run=folder.run),
        )
        return _play(setup, console)


def resume_command(called: str, *, file: Path, run: str) -> str:
    """What continues a run in the folder in which it was started; `called` is how the tool was."""
    program = called if Path(called).name == PROGRAM else PROGRAM
    return shlex.join([program, "run", str(file), "--resume", run])


def _eval(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    from forgemq_launcher.judged_domain import DEFAULT_NAME, judged_document

    runs = Path(settings.runs)
    values, source = judged_document(options)
    name = name_of(values, default=DEFAULT_NAME)
    is_named = names_run(options.overrides)
    run = name if is_named else next_run(f"{name}-eval", taken=names_taken(runs))
    made = configured(values, source=source, run=run)
    check_paths(made, source=source, trains=False)
    folder, made = new_folder(made, runs=runs, is_named=is_named, is_evaluation=True)
    with folder.locked():
        say(console, f"evaluation {folder.run} in {folder.path}, domain as in {source}")
        setup = RunSetup(
            folder=folder,
            configuration=made,
            settings=settings,
            environ=environ,
            samples=options.samples,
        )
        return _play(setup, console)


def _play(setup: RunSetup, console: Console) -> int:
    from forgemq_launcher.app import RunningRun

    async def play() -> int:
        return await RunningRun(setup, console).play()

    return asyncio.run(play())


def _create(options: argparse.Namespace, *, environ: Mapping[str, str], console: Console) -> int:
    from forgemq_launcher.commands import creation

    run = environ.get("FORGEMQ_RUN", "")
    # A file or a setting that is refused is refused before the broker is asked for anything.
    made = resolved(options, taken=[], run=run)
    check_paths(made, source=str(options.file))
    blobs, told = creation.blobs_address(environ), partial(say, console)
    asyncio.run(creation.wait_for_named_broker(environ, say=told))
    if not run and not names_run(options.overrides):
        made = asyncio.run(creation.take_number(made, environ))
    started = asyncio.run(creation.create_run(made, environ, blobs=blobs, say=told))
    say(console, creation.next_commands(started, kafka=environ["FORGEMQ_KAFKA"]))
    return exit_status.OK
