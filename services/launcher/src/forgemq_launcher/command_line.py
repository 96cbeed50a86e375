"""The command line tool `forgemq`; thin over the launcher's modules."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from forgemq_bus.broker import BrokerError
from forgemq_bus.errors import AccessError, LogError
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.configuration import (
    ConfigurationError,
    configuration,
    document,
    name_of,
    next_run,
)
from forgemq_launcher.model_folder import check_model_folder
from forgemq_launcher.run_folder import RunFolder, RunFolderError, run_folders
from forgemq_launcher.services import TRANSFORMS
from forgemq_launcher.settings import LauncherSettings
from forgemq_settings.environment import SettingsError, parse

EXIT_FAILED = 1
EXIT_REFUSED = 2


def main() -> None:
    """Run the tool and exit with its status."""
    # Clients log every retry of theirs; what finally fails is said once, by the tool itself.
    logging.getLogger().addHandler(logging.NullHandler())
    # The tool is an entry point like a service's __main__: it reads the environment once.
    environ = dict(os.environ)  # noqa: TID251
    sys.exit(run_tool(sys.argv[1:], environ=environ, console=Console()))


def run_tool(arguments: Sequence[str], *, environ: Mapping[str, str], console: Console) -> int:
    """Run one command; returns the exit status, 2 where arguments or settings are refused."""
    options = _parser().parse_args(arguments)
    try:
        settings = parse(LauncherSettings, prefix="FORGEMQ_LAUNCHER_", environ=environ)
        return _command(options, settings=settings, environ=environ, console=console)
    except (ConfigurationError, RunFolderError, SettingsError) as error:
        console.print(f"forgemq: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_REFUSED
    except AccessError as error:
        console.print(f"forgemq: broker: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_REFUSED
    except (LogError, BrokerError) as error:
        console.print(f"forgemq: broker: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forgemq",
        description="Agent reinforcement learning over a message queue, on one machine.",
        epilog="Settings: FORGEMQ_KAFKA names a broker, FORGEMQ_ENGINE_URL an engine for each "
        "lane, FORGEMQ_LAUNCHER_RUNS the folder of runs.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a configuration from start to report, or continue a run",
        description="Bring up engine, broker and services, show the run, and report it at its "
        "end. Exit status: 0 completed and every guarantee held, 1 not so, 2 refused, 130 "
        "interrupted.",
    )
    run.add_argument("file", type=Path, help="run configuration, TOML")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. trainer.steps=10")
    run.add_argument("--resume", metavar="RUN", help="continue this run with its configuration")
    create = commands.add_parser(
        "create", help="create topics and announce the run on FORGEMQ_KAFKA, start nothing"
    )
    create.add_argument("file", type=Path, help="run configuration, TOML")
    create.add_argument("overrides", nargs="*", metavar="key=value")
    resolve = commands.add_parser(
        "resolve", help="write the checked configuration as JSON, for agents on another machine"
    )
    resolve.add_argument("file", type=Path, help="run configuration, TOML")
    resolve.add_argument("overrides", nargs="*", metavar="key=value")
    resolve.add_argument("--to", type=Path, required=True, metavar="JSON", help="file to write")
    commands.add_parser("runs", help="list the runs")
    audit = commands.add_parser("audit", help="check the guarantees of a run on its log")
    audit.add_argument("run", metavar="RUN")
    inspect = commands.add_parser("inspect", help="print groups, or what was said in one")
    inspect.add_argument("run", metavar="RUN")
    inspect.add_argument("what", nargs="?", metavar="GROUP|EPISODE", help="default: list groups")
    replay = commands.add_parser(
        "replay",
        help="run the journals of a run's transform services again and compare every byte",
        description="Exit status: 0 every byte is the same, 1 one is not, 2 refused: inputs are "
        "gone. A run with log.keep_for_replay = true keeps all of them.",
    )
    replay.add_argument("run", metavar="RUN")
    replay.add_argument("service", nargs="?", choices=TRANSFORMS, help="default: all three")
    replay.add_argument("--partition", type=int, help="of the journal; default: all of them")
    replay.add_argument("--to", metavar="FOLDER", help="write recordings there, replay nothing")
    dlq = commands.add_parser("dlq", help="list records that did not decode")
    dlq.add_argument("run", metavar="RUN")
    return parser


def _command(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    # Imported here: `forgemq runs` and a refused file need no broker client.
    from forgemq_launcher import looking, replaying

    runs = Path(settings.runs)
    match options.command:
        case "run":
            return _run(options, settings=settings, environ=environ, console=console)
        case "create":
            return _create(options, environ=environ, console=console)
        case "resolve":
            return _resolve(options)
        case "runs":
            return looking.list_runs(run_folders(runs), console)
        case "audit":
            return asyncio.run(looking.audit(RunFolder(runs / options.run), environ, console))
        case "inspect":
            folder = RunFolder(runs / options.run)
            return asyncio.run(looking.inspect(folder, environ, console, what=options.what))
        case "replay":
            services = (options.service,) if options.service else TRANSFORMS
            folder = RunFolder(runs / options.run)
            given = {"--partition": options.partition, "--to": options.to}
            arguments = [f"{name}={value}" for name, value in given.items() if value is not None]
            return asyncio.run(
                replaying.replay(folder, environ, console, services=services, arguments=arguments)
            )
        case _:
            return asyncio.run(looking.dlq(RunFolder(runs / options.run), environ, console))


def _run(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    from forgemq_launcher.app import Launch, RunningRun

    folder, made = _folder(options, runs=Path(settings.runs))
    with folder.locked():
        console.print(f"run {folder.run} in {folder.path}", highlight=False, soft_wrap=True)
        launch = Launch(folder=folder, configuration=made, settings=settings, environ=environ)

        async def play() -> int:
            return await RunningRun(launch, console).play()

        return asyncio.run(play())


def _folder(options: argparse.Namespace, *, runs: Path) -> tuple[RunFolder, RunConfiguration]:
    """The folder of the run that the arguments ask for, made where the run is new."""
    if options.resume:
        if options.overrides:
            raise ConfigurationError("a resumed run keeps its configuration: give no key=value")
        folder = RunFolder(runs / options.resume)
        return folder, folder.configuration()
    made = _configuration(options, taken=[each.run for each in run_folders(runs)])
    folder = RunFolder(runs / made.run)
    folder.make(made)
    return folder, made


def _configuration(options: argparse.Namespace, *, taken: Sequence[str]) -> RunConfiguration:
    """The configuration in the file, overridden and checked against this machine's folders."""
    made = _resolved(options, taken=taken)
    try:
        _check_paths(made)
    except ConfigurationError as error:
        raise ConfigurationError(f"{options.file}: {error}") from error
    return made


def _resolved(options: argparse.Namespace, *, taken: Sequence[str]) -> RunConfiguration:
    """The configuration in the file, overridden and checked; with a run id nobody has."""
    path: Path = options.file
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    values = document(text, overrides=options.overrides)
    name = name_of(values, default=path.resolve().parent.name)
    # A file's name begins the ids of its runs; `run=ID` on the command line is the id itself.
    is_exact = any(each.partition("=")[0].strip() == "run" for each in options.overrides)
    run = name if is_exact else next_run(name, taken=taken)
    try:
        return configuration(values, run=run, folder=Path.cwd())
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _check_paths(configuration: RunConfiguration) -> None:
    check_model_folder(Path(configuration.model.path))
    for path in configuration.code_paths:
        if not Path(path).is_dir():
            raise ConfigurationError(f"code_paths: {path} is no folder")


def _create(options: argparse.Namespace, *, environ: Mapping[str, str], console: Console) -> int:
    from forgemq_launcher.topics_of_run import create

    made = _configuration(options, taken=[])
    asyncio.run(create(made, environ))
    console.print(f"run {made.run} is announced", highlight=False)
    return 0


def _resolve(options: argparse.Namespace) -> int:
    """Folders are not looked at: they are those of the machines that the services run on."""
    options.to.write_bytes(msgspec.json.encode(_resolved(options, taken=[])) + b"\n")
    return 0
