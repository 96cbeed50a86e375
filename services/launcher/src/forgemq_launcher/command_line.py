"""The command line tool `forgemq`; thin over the launcher's modules."""

import argparse
import asyncio
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from forgemq_bus.broker import BrokerError
from forgemq_bus.errors import AccessError, LogError
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher import exit_status
from forgemq_launcher.core.configuration import (
    ConfigurationError,
    changed,
    configuration,
    document,
    name_of,
    names_budget,
    next_run,
)
from forgemq_launcher.model_folder import check_model_folder
from forgemq_launcher.placement import DEVICE, device_of, with_budget
from forgemq_launcher.run_folder import RunFolder, RunFolderError, names_taken, run_folders
from forgemq_launcher.settings import LauncherSettings
from forgemq_launcher.upkeep.services import TRANSFORMS
from forgemq_launcher.user_code import check_user_code
from forgemq_settings.environment import SettingsError, parse
from forgemq_shell.started_run import RunNotStartedError

RUN_ID = r"[a-z0-9-]{1,40}"


def main() -> None:
    """Run the tool and exit with its status."""
    # Broker clients log every retry; the tool prints what finally failed, once.
    logging.getLogger().addHandler(logging.NullHandler())
    # The tool is an entry point like a service's __main__: it reads the environment once.
    environ = dict(os.environ)  # noqa: TID251
    sys.exit(run_tool(sys.argv[1:], environ=environ, console=Console()))


def run_tool(arguments: Sequence[str], *, environ: Mapping[str, str], console: Console) -> int:
    """Run one command; returns the exit status."""
    options = _options(arguments)
    try:
        settings = parse(LauncherSettings, prefix="FORGEMQ_LAUNCHER_", environ=environ)
        return _command(options, settings=settings, environ=environ, console=console)
    except (ConfigurationError, RunFolderError, SettingsError) as error:
        _print_plain(console, f"forgemq: {error}")
        return exit_status.REFUSED
    except AccessError as error:
        _print_plain(console, f"forgemq: broker: {error}")
        return exit_status.REFUSED
    except (LogError, BrokerError, RunNotStartedError) as error:
        _print_plain(console, f"forgemq: broker: {error}")
        return exit_status.FAILED
    except OSError as error:  # A full disk, or a path that cannot be read or written.
        _print_plain(console, f"forgemq: {error}")
        return exit_status.FAILED


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments, parsed; `key=value` may come before an option or after it."""
    parser = _parser()
    options, left = parser.parse_known_args(arguments)
    # argparse gives a positional that takes any number only what comes before the next option.
    if [each for each in left if each.startswith("-") or "overrides" not in options]:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        options.overrides += left
    return options


def _print_plain(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


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
        "end. Exit status: 0 completed and every guarantee held, 1 failed, 2 refused, "
        "130 interrupted.",
    )
    run.add_argument("file", type=Path, help="run configuration, TOML")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. trainer.steps=10")
    run.add_argument("--resume", metavar="RUN", help="continue this run")
    create = commands.add_parser(
        "create",
        help="create topics and announce the run on FORGEMQ_KAFKA, start nothing",
        description="The run's id is FORGEMQ_RUN or run=ID, else the file's name and the next "
        "number that this broker has not seen. Prints what its services need.",
    )
    create.add_argument("file", type=Path, help="run configuration, TOML")
    create.add_argument("overrides", nargs="*", metavar="key=value")
    resolve = commands.add_parser(
        "resolve", help="write the checked configuration as JSON, for agents on another machine"
    )
    resolve.add_argument("file", type=Path, help="run configuration, TOML")
    resolve.add_argument("overrides", nargs="*", metavar="key=value")
    resolve.add_argument("--to", type=Path, required=True, metavar="JSON", help="file to write")
    _add_looks(commands)
    return parser


def _add_looks(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands about runs that exist."""
    commands.add_parser("runs", help="list the runs")
    audit = commands.add_parser("audit", help="check the guarantees of a run on its log")
    audit.add_argument("run", metavar="RUN")
    inspect = commands.add_parser("inspect", help="print groups, or every turn of one")
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
    report = commands.add_parser(
        "report", help="write report.json, report.png and curves.jsonl of a run from its log"
    )
    report.add_argument("run", metavar="RUN")
    report.add_argument(
        "--to", type=Path, metavar="FOLDER", help="default: the run's folder, else RUN-report"
    )
    delete = commands.add_parser(
        "delete",
        help="remove a run that is down: topics, consumer groups, blobs, weights, its folder",
        description="Shows what it will remove and asks. Exit status: 0 removed, 2 refused.",
    )
    delete.add_argument("run", metavar="RUN")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    _add_import(commands)
    dlq = commands.add_parser("dlq", help="list records that did not decode")
    dlq.add_argument("run", metavar="RUN")


def _add_import(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    made = commands.add_parser(
        "import",
        help="add finished conversations to a run that is up; they never train",
        description="A line of FILE is one conversation as JSON: OpenAI's chat `messages`, and if "
        "there are any `tools`, `reward` (the outcome), `rewards` by name, `result`, `metadata`. "
        "If one line is wrong nothing is imported; what is in the run already is not added again.",
    )
    made.add_argument("run", metavar="RUN")
    made.add_argument("file", type=Path, metavar="FILE")
    made.add_argument("--domain", required=True, help="a domain of the run")


def _command(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    # Imported here: `forgemq runs` and a refused file need no broker client.
    from forgemq_launcher.commands.inspection import list_runs

    runs = Path(settings.runs)
    match options.command:
        case "run":
            return _run(options, settings=settings, environ=environ, console=console)
        case "create":
            return _create(options, environ=environ, console=console)
        case "resolve":
            return _resolve(options, environ=environ)
        case "runs":
            return list_runs(run_folders(runs), console)
        case "replay":
            return _replay(options, environ=environ, console=console, runs=runs)
        case "delete":
            return _delete(options, environ=environ, console=console, runs=runs)
        case "import":
            return _import(options, settings=settings, environ=environ, console=console)
        case _:
            return _look(options, environ=environ, console=console, runs=runs)


def _look(
    options: argparse.Namespace, *, environ: Mapping[str, str], console: Console, runs: Path
) -> int:
    """Run a command that only reads the log of a run."""
    from forgemq_launcher.commands import inspection

    folder = _folder_of(options.run, runs=runs)
    match options.command:
        case "audit":
            return asyncio.run(inspection.audit(folder, environ, console))
        case "inspect":
            return asyncio.run(inspection.inspect(folder, environ, console, what=options.what))
        case "report":
            return asyncio.run(inspection.report(folder, environ, console, to=options.to))
        case _:
            return asyncio.run(inspection.dlq(folder, environ, console))


def _folder_of(run: str, *, runs: Path) -> RunFolder:
    """The folder of a run that the arguments name; a path is no run id."""
    if not re.fullmatch(RUN_ID, run):
        raise RunFolderError(f"run: an id has up to 40 of a-z, 0-9 and -, got {run!r}")
    return RunFolder(runs / run)


def _replay(
    options: argparse.Namespace, *, environ: Mapping[str, str], console: Console, runs: Path
) -> int:
    from forgemq_launcher.commands import replay

    services = (options.service,) if options.service else TRANSFORMS
    given = {"--partition": options.partition, "--to": options.to}
    arguments = [f"{name}={value}" for name, value in given.items() if value is not None]
    folder = _folder_of(options.run, runs=runs)
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
        _folder_of(options.run, runs=Path(settings.runs)),
        environ,
        console,
        host=settings.host,
        file=options.file,
        domain=options.domain,
    )
    return asyncio.run(importing)


def _delete(
    options: argparse.Namespace, *, environ: Mapping[str, str], console: Console, runs: Path
) -> int:
    from forgemq_launcher.commands.deletion import asks_terminal, delete_run

    def confirm(question: str) -> bool:
        _print_plain(console, question)
        return bool(options.yes) or asks_terminal()

    folder = _folder_of(options.run, runs=runs)
    return asyncio.run(delete_run(folder, environ, console, confirm=confirm))


def _run(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    from forgemq_launcher.app import RunningRun
    from forgemq_launcher.run_setup import RunSetup

    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise SettingsError(
            "FORGEMQ_LAUNCHER_TENSORBOARD: install forgemq-telemetry[tensorboard], or leave it off"
        )
    folder, made = _folder(options, runs=Path(settings.runs), environ=environ)
    device = device_of(made, environ)
    environ = {**environ, DEVICE: device}
    with folder.locked():
        console.print(f"run {folder.run} in {folder.path}", highlight=False, soft_wrap=True)
        budget = made.trainer.memory_budget_bytes / 1e9
        _print_plain(console, f"trainer on {device}, trainer.memory_budget_bytes {budget:.1f} GB")
        setup = RunSetup(folder=folder, configuration=made, settings=settings, environ=environ)

        async def play() -> int:
            return await RunningRun(setup, console).play()

        return asyncio.run(play())


def _folder(
    options: argparse.Namespace, *, runs: Path, environ: Mapping[str, str]
) -> tuple[RunFolder, RunConfiguration]:
    """The folder of the run that the arguments ask for; made if the run is new."""
    if options.resume:
        folder = _folder_of(options.resume, runs=runs)
        made = changed(folder.configuration(), options.overrides, folder=Path.cwd())
        _check_paths(made, source=f"run {folder.run}")
        return folder, made
    made = _resolved(options, taken=names_taken(runs))
    _check_paths(made, source=str(options.file))
    if not names_budget(document(options.file.read_text(), overrides=options.overrides)):
        made = with_budget(made, environ, device=device_of(made, environ))
    folder = RunFolder(runs / made.run)
    folder.make(made)
    return folder, made


def _resolved(
    options: argparse.Namespace, *, taken: Sequence[str], run: str = ""
) -> RunConfiguration:
    """The configuration in the file, overridden and checked.

    Args:
        options: Name the file and the overrides; `run=ID` among them is the run's id.
        taken: Ids that a new run must not get.
        run: The run's id unless an override says it; "" for the file's name and the next number.
    """
    path: Path = options.file
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not a TOML file: {error}") from error
    overrides = [f'run="{run}"'] if run else []
    overrides += options.overrides
    values = document(text, overrides=overrides)
    name = name_of(values, default=path.resolve().parent.name)
    made_id = name if _names_run(overrides) else next_run(name, taken=taken)
    try:
        return configuration(values, run=made_id, folder=Path.cwd())
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _names_run(overrides: Sequence[str]) -> bool:
    return any(each.partition("=")[0].strip() == "run" for each in overrides)


def _check_paths(made: RunConfiguration, *, source: str) -> None:
    """Refuse a model or code that is not on this machine, before it is written down anywhere."""
    try:
        check_model_folder(Path(made.model.path))
        check_user_code(made)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from error


def _create(options: argparse.Namespace, *, environ: Mapping[str, str], console: Console) -> int:
    from forgemq_launcher.commands.creation import (
        announced_runs,
        blobs_address,
        create_run,
        next_commands,
    )

    run = environ.get("FORGEMQ_RUN", "")
    # A file or a setting that is refused is refused before the broker is asked for anything.
    made = _resolved(options, taken=[], run=run)
    _check_paths(made, source=str(options.file))
    blobs = blobs_address(environ)
    if not run and not _names_run(options.overrides):
        made = _resolved(options, taken=asyncio.run(announced_runs(environ)))
    started = asyncio.run(create_run(made, environ, blobs=blobs))
    _print_plain(console, next_commands(started, kafka=environ["FORGEMQ_KAFKA"]))
    return exit_status.OK


def _resolve(options: argparse.Namespace, *, environ: Mapping[str, str]) -> int:
    """Write the configuration; its folders may lie on other machines and are not looked at."""
    made = _resolved(options, taken=[], run=environ.get("FORGEMQ_RUN", ""))
    options.to.write_bytes(msgspec.json.encode(made) + b"\n")
    return exit_status.OK
