"""`forgemq plan`: whether a run fits its machines and about how long a step takes; starts nothing.

What the trainer would do is asked of the trainer itself, in a process of its own.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.trainer_plan import PlanAnswer, PlanQuestion
from forgemq_launcher import exit_status
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.display.lines import say
from forgemq_launcher.display.plan_lines import plan_lines
from forgemq_launcher.plan.episodes import EpisodesError
from forgemq_launcher.plan.findings import notes, reasons
from forgemq_launcher.plan.machines import Machines, MachinesError, gpu_named
from forgemq_launcher.plan.report import PlanReport
from forgemq_launcher.plan.run_plan import Ask, PlanError, PlannedRun, plan_of


def plan_run(
    options: argparse.Namespace,
    configuration: RunConfiguration,
    *,
    is_budget_named: bool,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    """Print the plan; returns the exit status: OK if the run fits, FAILED if not.

    Raises:
        ConfigurationError: an option or the model's config.json cannot be used.
    """
    config = config_file(options, configuration)
    try:
        run = PlannedRun(
            configuration=configuration,
            config=config.read_bytes(),
            machines=machines_of(options),
            is_budget_named=is_budget_named,
            episode=options.episode,
        )
        with _trainer(environ) as ask:
            plan = plan_of(run, ask)
    except (MachinesError, EpisodesError) as error:
        raise ConfigurationError(str(error)) from error
    except PlanError as error:
        raise ConfigurationError(f"{config}: {error}") from error
    found = reasons(run, plan)
    report = PlanReport(
        fits=not found,
        reasons=found,
        notes=notes(run, plan),
        machines=run.machines,
        config=str(config),
        plan=plan,
    )
    if options.json:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
        say(console, text)
    else:
        for line in plan_lines(report):
            say(console, line)
    return exit_status.OK if report.fits else exit_status.FAILED


def config_file(options: argparse.Namespace, configuration: RunConfiguration) -> Path:
    """The model's config.json: as named, of model.path, or beside the run's file.

    The last describes the model that the file names, and is not read if an override names another.

    Raises:
        ConfigurationError: there is none.
    """
    places: list[Path] = [options.config or Path(configuration.model.path) / "config.json"]
    is_overridden = any(
        each.partition("=")[0].strip() == "model.path" for each in options.overrides
    )
    if not options.config and not is_overridden:
        places.append(options.file.parent / "config.json")
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        named = "--config" if options.config else "model.path"
        listed = " and no ".join(map(str, places))
        raise ConfigurationError(
            f"{named}: there is no {listed}; --config names the config.json of the model"
        )
    return found


def machines_of(options: argparse.Namespace) -> Machines:
    """The machines that the arguments name.

    Raises:
        MachinesError: the table has no such GPU, or a CPU lacks the size of its memory.
    """
    gpu = gpu_named(options.gpu)
    if gpu is None and options.host_memory is None:
        raise MachinesError("--host-memory: must be given with --gpu cpu, in GB")
    usual_host_bytes, usual_disk_bytes = (0, 0) if gpu is None else (gpu.host_bytes, gpu.disk_bytes)
    return Machines(
        gpu=options.gpu,
        gpus=0 if gpu is None else options.gpus,
        nodes=options.nodes,
        host_bytes=_bytes_of(options.host_memory, usual=usual_host_bytes),
        disk_bytes=_bytes_of(options.disk, usual=usual_disk_bytes),
        utilisation=options.utilisation,
        bandwidth_share=options.bandwidth_share,
    )


def _bytes_of(gigabytes: float | None, *, usual: int) -> int:
    return usual if gigabytes is None else int(gigabytes * 1e9)


@contextmanager
def _trainer(environ: Mapping[str, str]) -> Iterator[Ask]:
    """A process of the trainer that answers questions; it starts with the first one."""
    decoder: msgspec.json.Decoder[PlanAnswer] = msgspec.json.Decoder(PlanAnswer)
    process: subprocess.Popen[bytes] | None = None
    with tempfile.TemporaryFile() as errors, ExitStack() as started:

        def ask(question: PlanQuestion) -> PlanAnswer:
            nonlocal process
            if process is None:
                process = started.enter_context(_planner(environ, errors))
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # Its last words follow.
                process.stdin.write(msgspec.json.encode(question) + b"\n")
                process.stdin.flush()
            if line := process.stdout.readline():
                return decoder.decode(line)
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise PlanError(f"the trainer's planner ended: {last or 'without a word'}")

        yield ask


def _planner(environ: Mapping[str, str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "forgemq_trainer.plan"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        # Its answers must not depend on this machine.
        env={**environ, "CUDA_VISIBLE_DEVICES": ""},
    )
