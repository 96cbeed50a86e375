"""Commands that make no run and look at none: `resolve`, `plan`, `new-head`, `merge`."""

import argparse
from collections.abc import Mapping

import msgspec
from rich.console import Console

from forgemq_launcher import exit_status
from forgemq_launcher.asked_run import configured, document_in, resolved
from forgemq_launcher.core.configuration import name_of, names_budget
from forgemq_launcher.display.lines import say


def without_run(
    options: argparse.Namespace, *, environ: Mapping[str, str], console: Console
) -> int:
    """Run one of these commands; returns the exit status."""
    match options.command:
        case "resolve":
            return _resolve(options, environ=environ)
        case "plan":
            return _plan(options, environ=environ, console=console)
        case "merge":
            return _merge(options, console=console)
        case _:
            return _new_head(options, console=console)


def _plan(options: argparse.Namespace, *, environ: Mapping[str, str], console: Console) -> int:
    """Plan a run; its model and code may lie on other machines and are not looked at.

    Files of tasks are, if they are on this one.
    """
    from forgemq_launcher.commands.planning import plan_run
    from forgemq_launcher.task_files import found_tasks

    values = document_in(options.file, options.overrides)
    run = name_of(values, default="planned")
    made = configured(values, source=str(options.file), run=run)
    found_tasks(made, source=str(options.file), environ=environ, is_elsewhere=True)
    return plan_run(
        options, made, is_budget_named=names_budget(values), environ=environ, console=console
    )


def _new_head(options: argparse.Namespace, *, console: Console) -> int:
    from forgemq_launcher.commands.new_head import write_new_head

    count = write_new_head(options.model, options.folder, seed=options.seed)
    say(console, f"a head of {count} numbers in {options.folder}")
    return exit_status.OK


def _merge(options: argparse.Namespace, *, console: Console) -> int:
    from forgemq_launcher.commands.merging import merge_adapter

    merged = merge_adapter(options.adapter, options.folder)
    say(console, f"{merged} in {options.folder}")
    return exit_status.OK


def _resolve(options: argparse.Namespace, *, environ: Mapping[str, str]) -> int:
    """Write the configuration; its folders may lie on other machines and are not looked at."""
    made = resolved(options, taken=[], run=environ.get("FORGEMQ_RUN", ""))
    options.to.write_bytes(msgspec.json.encode(made) + b"\n")
    return exit_status.OK
