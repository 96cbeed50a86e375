"""What `forgemq` can be asked for, and its help."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forgemq_launcher.core.workloads import Workload, workload_of
from forgemq_launcher.plan.machines import BANDWIDTH_SHARE, UTILISATION

PROGRAM = "forgemq"
"""As the distribution installs it."""
PACKAGE = "forgemq-launcher"
"""The distribution whose version the command tells."""
TRANSFORMS = ("reward", "merger", "scheduler")
"""Services with a journal, in the order in which a group passes them."""
STOP_TIMEOUT_S = 600.0
"""In a cluster the pods' grace and the audit of a long log come before the end."""
RUN = "its id, as `forgemq runs` lists it"
COUNT_MAX = 4096
"""Of episodes in one group; GPUs of a node and nodes of a run are fewer."""


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments, parsed; options may stand before, between and behind the others."""
    parser, commands = _parser()
    options, left = parser.parse_known_args(arguments)
    command = commands.choices[options.command]
    if left:  # A positional that may be absent got only what comes before the next option.
        named = argparse.Namespace(command=options.command)
        options = command.parse_intermixed_args(arguments[1:], named)
    if options.command == "run" and options.resume and "=" in options.file.name:
        command.error(f"file: name the run's file before key=value, got {str(options.file)!r}")
    if options.command == "eval":
        files = [each for each in options.overrides if "=" not in each]
        if len(files) > 1:
            parser.error(f"one FILE at most may be given, got {' '.join(files)}")
        options.file = Path(files[0]) if files else None
        options.overrides = [each for each in options.overrides if "=" in each]
    return options


class _TellVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        # Imported here: it takes as long as all the parsers, and no other command needs it.
        from importlib.metadata import version

        sys.stdout.write(f"forgemq {version(PACKAGE)}\n")
        parser.exit()


def _parser() -> tuple[
    argparse.ArgumentParser, "argparse._SubParsersAction[argparse.ArgumentParser]"
]:
    """The parser, and those of its commands by name."""
    parser = argparse.ArgumentParser(
        prog="forgemq",
        description="Agent reinforcement learning over a message queue, on one machine.",
        epilog="Settings: FORGEMQ_KAFKA names a broker, FORGEMQ_ENGINE_URL an engine for each "
        "lane, FORGEMQ_LAUNCHER_RUNS the folder of runs.",
    )
    parser.add_argument("--version", action=_TellVersion, nargs=0, help="tell the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a configuration from start to report, or continue a run",
        description="Bring up engine, broker and services, show the run, and report it at its "
        "end. Exit status: 0 completed and every guarantee held, 1 failed, 2 refused, "
        "130 interrupted.",
    )
    run.add_argument("file", type=Path, help="run configuration, TOML")
    _add_overrides(run)
    run.add_argument(
        "--resume",
        metavar="RUN",
        help="continue this run with its own configuration; FILE is named and not read",
    )
    create = commands.add_parser(
        "create",
        help="create topics and announce the run on FORGEMQ_KAFKA, start nothing",
        description="The run's id is FORGEMQ_RUN or run=ID, else the file's name and the next "
        "number that this broker has not seen. Prints what its services need.",
    )
    create.add_argument("file", type=Path, help="run configuration, TOML")
    _add_overrides(create)
    resolve = commands.add_parser(
        "resolve", help="write the checked configuration as JSON, for agents on another machine"
    )
    resolve.add_argument("file", type=Path, help="run configuration, TOML")
    _add_overrides(resolve)
    resolve.add_argument("--to", type=Path, required=True, metavar="JSON", help="file to write")
    _add_eval(commands)
    _add_plan(commands)
    head = commands.add_parser(
        "new-head",
        help="write a random draft head for a model, for [speculation] in a run's file",
        description="The head has the sizes of the model's own layers; a run trains it.",
    )
    head.add_argument("model", type=Path, metavar="MODEL", help="folder in Hugging Face format")
    head.add_argument("folder", type=Path, metavar="FOLDER", help="made; has no head yet")
    head.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    merge = commands.add_parser(
        "merge",
        help="write a model with an adapter that a run trained in its weights",
        description="The base model is the one that the adapter's adapter_config.json names.",
    )
    merge.add_argument("adapter", type=Path, metavar="ADAPTER", help="e.g. of a run's checkpoint")
    merge.add_argument("folder", type=Path, metavar="FOLDER", help="made; must not exist")
    _add_looks(commands)
    return parser, commands


def _add_overrides(command: argparse.ArgumentParser, example: str = "trainer.steps=10") -> None:
    # With a default argparse does not call them required if another argument is missing.
    command.add_argument(
        "overrides", nargs="*", default=(), metavar="key=value", help=f"e.g. {example}"
    )


def _add_eval(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    judged = commands.add_parser(
        "eval",
        help="judge a model on the held-out tasks of a domain: pass@k, without a trainer",
        usage="forgemq eval MODEL [FILE] --domain D --samples K [key=value ...]",
        description="Plays K episodes of each of the evaluation.tasks held-out tasks with the "
        "domain's own agent and rewards, and writes a table and pass_at_k.json. Exit status: 0 "
        "judged, 1 failed or no episode has an outcome, 2 refused, 130 interrupted.",
    )
    judged.add_argument("model", metavar="MODEL", help="folder in Hugging Face format")
    judged.add_argument(
        "overrides",
        nargs="*",
        default=(),
        metavar="FILE or key=value",
        help="FILE: run configuration, TOML; default: the run that MODEL is a checkpoint of, "
        "run.toml beside MODEL or here, or what key=value says: queues.D.agent=module:function",
    )
    judged.add_argument("--domain", required=True, help="a domain of the file, or verifiers:NAME")
    judged.add_argument("--samples", type=_count, required=True, metavar="K", help="1 to 4096")


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser(
        "plan",
        help="say whether a run fits machines, why not, and how long a step takes; start nothing",
        description="Needs the model's config.json and neither its weights nor a GPU. Exit status: "
        "0 it fits, 1 it does not, 2 refused.",
    )
    plan.add_argument("file", type=Path, help="run configuration, TOML")
    _add_overrides(plan, "trainer.world_size=6")
    plan.add_argument(
        "--gpu", required=True, metavar="NAME", help="h100, h200, b200; cpu: machines without one"
    )
    plan.add_argument("--gpus", type=_count, default=8, metavar="N", help="of a node; default: 8")
    plan.add_argument("--nodes", type=_count, default=1, metavar="N", help="default: 1")
    of_node = "of a node; default: as docs/plan.md says for the GPU"
    plan.add_argument("--host-memory", type=_positive, metavar="GB", help=of_node)
    plan.add_argument("--disk", type=_positive, metavar="GB", help=of_node)
    plan.add_argument(
        "--episode",
        default="",
        metavar="turns=N,prompt=N,sampled=N,observed=N",
        help="a usual episode, in tokens, and task_bytes=N of its task; default: one turn that "
        "fills the context",
    )
    for option, default, peak in (
        ("--utilisation", UTILISATION, "peak FLOP/s"),
        ("--bandwidth-share", BANDWIDTH_SHARE, "bandwidths"),
    ):
        plan.add_argument(
            option, type=_share, default=default, metavar="SHARE", help=f"of {peak}; {default}"
        )
    plan.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="config.json of the model; default: that of model.path, else the one beside FILE",
    )
    plan.add_argument("--json", action="store_true", help="print all numbers as JSON")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= COUNT_MAX:
        raise argparse.ArgumentTypeError(f"must be 1 to {COUNT_MAX}, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    return _number(text, upto=1e9)


def _share(text: str) -> float:
    return _number(text, upto=1.0)


def _number(text: str, *, upto: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= upto:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {upto:g}, got {text!r}")
    return value


def _add_looks(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands about runs that exist."""
    runs = commands.add_parser("runs", help="list the runs")
    runs.add_argument("--json", action="store_true", help="print each as a line of JSON, no table")
    _add_watching(commands)
    audit = commands.add_parser("audit", help="check the guarantees of a run on its log")
    audit.add_argument("run", metavar="RUN", help=RUN)
    audit.add_argument(
        "--json", action="store_true", help="print all that report.json has, as one line of JSON"
    )
    inspect = commands.add_parser("inspect", help="print groups, or every turn of one")
    inspect.add_argument("run", metavar="RUN", help=RUN)
    inspect.add_argument("what", nargs="?", metavar="GROUP|EPISODE", help="default: list groups")
    forms = inspect.add_mutually_exclusive_group()
    forms.add_argument(
        "--requests",
        action="store_true",
        help="of a group or an episode: print each request whole, as JSON lines",
    )
    forms.add_argument(
        "--json",
        action="store_true",
        help="print each group, or each episode with its turns and token ids, as a line of JSON",
    )
    replay = commands.add_parser(
        "replay",
        help="run the journals of a run's transform services again and compare every byte",
        description="Exit status: 0 every byte is the same, 1 one is not, 2 refused: inputs are "
        "gone. A run with log.keep_for_replay = true keeps all of them.",
    )
    replay.add_argument("run", metavar="RUN", help=RUN)
    replay.add_argument("service", nargs="?", choices=TRANSFORMS, help="default: all three")
    replay.add_argument("--partition", type=int, help="of the journal; default: all of them")
    replay.add_argument("--to", metavar="FOLDER", help="write recordings there, replay nothing")
    report = commands.add_parser(
        "report", help="write report.json, report.png and curves.jsonl of a run from its log"
    )
    report.add_argument("run", metavar="RUN", help=RUN)
    report.add_argument(
        "--to", type=Path, metavar="FOLDER", help="default: the run's folder, else RUN-report"
    )
    _add_end(commands)
    delete = commands.add_parser(
        "delete",
        help="remove a run that is down: topics, consumer groups, blobs, weights, its folder",
        description="Shows what it will remove and asks. Exit status: 0 removed, 2 refused.",
    )
    delete.add_argument("run", metavar="RUN", help=RUN)
    delete.add_argument("--yes", action="store_true", help="do not ask")
    _add_import(commands)
    _add_export(commands)
    _add_lanes(commands)
    dlq = commands.add_parser("dlq", help="list records that did not decode")
    dlq.add_argument("run", metavar="RUN", help=RUN)
    dlq.add_argument(
        "--json", action="store_true", help="print every one whole, as JSON lines, and no table"
    )


def _add_watching(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands that show a run, end it, or announce it again."""
    watch = commands.add_parser(
        "watch",
        help="show a run that is up or over, here or elsewhere, until it ends",
        description="The panel of `forgemq run`, from the run's log; plain lines if the output is "
        "no terminal. Ctrl-C leaves the run alone. Exit status: as the run ended: 0 completed and "
        "every guarantee held, 1 failed, 130 interrupted; 1 also once nobody reads the output; 2 "
        "refused.",
    )
    watch.add_argument("run", metavar="RUN", help=RUN)
    stop = commands.add_parser(
        "stop",
        help="ask a run that is up to end early, and wait until it has",
        description="As Ctrl-C of `forgemq run`, from anywhere: what is trained stays, open groups "
        "stay open, and the run can be continued. `forgemq run` or `forgemq end` of the run takes "
        "the request and writes a report. Exit status: 0 the run is over, 1 not in time, 2 "
        "refused.",
    )
    stop.add_argument("run", metavar="RUN", help=RUN)
    stop.add_argument("--reason", default="", metavar="TEXT", help="kept in the run's end")
    stop.add_argument(
        "--timeout",
        type=_positive,
        default=STOP_TIMEOUT_S,
        metavar="SECONDS",
        help=f"longest wait for the end; default: {STOP_TIMEOUT_S:g}",
    )
    resume = commands.add_parser(
        "resume",
        help="announce a run again that was stopped or failed, start nothing",
        description="For a run whose services a cluster or a person keeps up, on FORGEMQ_KAFKA: "
        "with its configuration as it is. They go on where they were once they are started.",
    )
    resume.add_argument("run", metavar="RUN", help=RUN)


def _add_end(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    end = commands.add_parser(
        "end",
        help="wait until a run without a launcher is played, then write its end and its report",
        description="For a run whose services a cluster or a person keeps up. Exit status: 0 every "
        "guarantee held, 1 one did not, 2 refused, 130 stopped by a signal.",
    )
    end.add_argument("run", metavar="RUN", help=RUN)
    end.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="for the report")
    end.add_argument(
        "--release",
        type=_workloads,
        default=(),
        metavar="KIND/NAME,...",
        help="in a pod: give up the pods of these deployments, statefulsets and scaledobjects of "
        "its namespace once the run is played, and stay until a signal",
    )


def _workloads(text: str) -> tuple[Workload, ...]:
    try:
        return tuple(map(workload_of, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _add_import(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    imported = commands.add_parser(
        "import",
        help="add finished conversations to a run that is up",
        description="A line of FILE is one conversation as JSON: OpenAI's chat `messages`, and if "
        "there are any `tools`, `reward` (the outcome), `rewards` by name, `result`, `metadata`, "
        "`turns`. FILE may also be a Parquet file of `forgemq export`, or a folder of such files. "
        "If one line or row is wrong nothing is imported; what is in the run is not added again.",
    )
    imported.add_argument("run", metavar="RUN", help=RUN)
    imported.add_argument(
        "file", type=Path, metavar="FILE", help="JSON lines, Parquet, or a folder"
    )
    imported.add_argument("--domain", required=True, help="a domain of the run")


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    exported = commands.add_parser(
        "export",
        help="write the episodes of a run as Parquet files, a row each",
        description="Messages, token ids, log-probabilities, weight versions, rewards, advantages, "
        "ends and fork reasons of every scored episode, for `datasets.load_dataset` and `forgemq "
        "import`. The run may be up. Exit status: 0 all is written, 1 some turns are not kept any "
        "more, 2 refused.",
    )
    exported.add_argument("run", metavar="RUN", help=RUN)
    exported.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="for the files")
    exported.add_argument(
        "--model", type=Path, metavar="FOLDER", help="with the tokenizer; default: the run's model"
    )


def _add_lanes(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands about the engines of a run that is up."""
    lanes = commands.add_parser("lanes", help="list the engines of a run that is up")
    lanes.add_argument("run", metavar="RUN", help=RUN)
    added = commands.add_parser(
        "add-lane",
        help="let a run that is up have another engine",
        description="Without --engine the launcher that holds the run starts SGLang itself. The "
        "run has room for log.lanes_max engines.",
    )
    added.add_argument("run", metavar="RUN", help=RUN)
    added.add_argument("--engine", default="", metavar="URL", help="address of an SGLang server")
    added.add_argument("--lane", type=int, metavar="N", help="default: the lowest that is free")
    drained = commands.add_parser(
        "drain-lane", help="give a lane no further request; it finishes those that it has"
    )
    resumed = commands.add_parser("resume-lane", help="give a drained lane requests again")
    removed = commands.add_parser(
        "remove-lane", help="end a lane's processes; what they do not finish goes to other lanes"
    )
    for changed in (drained, resumed, removed):
        changed.add_argument("run", metavar="RUN", help=RUN)
        changed.add_argument(
            "lane", type=int, metavar="N", help="its number, as `forgemq lanes` lists it"
        )
