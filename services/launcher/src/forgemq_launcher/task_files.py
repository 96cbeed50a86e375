"""Whether the files of a run's tasks can be played, asked of the agents before anything starts."""

import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from forgemq_contracts.queues import supplied_queues
from forgemq_contracts.read_tasks import ReadTasks
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_contracts.task_files import AskedTasks, FoundTasks
from forgemq_launcher.core.configuration import ConfigurationError

FILES = ("task_file", "held_out_file")
"""Fields of a queue that name a file or folder, or "" for none."""

_READER = "forgemq_agents"
"""Package that reads them; an image of the launcher alone lacks it."""


def found_tasks(
    made: RunConfiguration,
    *,
    source: str,
    environ: Mapping[str, str],
    known: Sequence[ReadTasks] = (),
    is_elsewhere: bool = False,
    agents_python: str = "",
) -> FoundTasks:
    """The tasks in the files of the queues that the run's agents play.

    Args:
        made: The run.
        source: Where the configuration is from, for an error.
        environ: Of the process that reads them.
        known: Tasks of an earlier start, to be compared.
        is_elsewhere: The run is for other machines: files that are not on this one, or that it
            has no agents to read with, are left out.
        agents_python: Plays the agents, and so reads the files; "" for the Python of this process.

    Raises:
        ConfigurationError: naming the field, the file, the line or row and the rule.
    """
    domains = tuple(
        queue.domain
        for queue in _with_files(made)
        if not (is_elsewhere and (_lacks(queue) or not _has_reader()))
    )
    if not domains:
        return FoundTasks()
    question = AskedTasks(configuration=made, domains=domains, known=tuple(known))
    # A process of its own, as services never import one another; its memory is free afterwards.
    ended = subprocess.run(
        [agents_python or sys.executable, "-m", f"{_READER}.check_tasks"],
        input=msgspec.json.encode(question),
        capture_output=True,
        env=dict(environ),
        check=False,
    )
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"ended with status {ended.returncode}"
        raise ConfigurationError(f"{source}: the agents cannot read its files of tasks: {last}")
    found = msgspec.json.decode(ended.stdout, type=FoundTasks)
    if found.refusal:
        raise ConfigurationError(f"{source}: {found.refusal}")
    return found


def unread_here(made: RunConfiguration) -> tuple[str, ...]:
    """The domains whose files of tasks no package on this machine can read."""
    return () if _has_reader() else tuple(queue.domain for queue in _with_files(made))


def _with_files(made: RunConfiguration) -> list[Queue]:
    """The queues that the run's agents play from files."""
    return [queue for queue in supplied_queues(made) if queue.task_file]


def _has_reader() -> bool:
    return importlib.util.find_spec(_READER) is not None


def _lacks(queue: Queue) -> bool:
    """Whether a file that the queue names is not on this machine."""
    return any(path and not Path(path).exists() for path in (getattr(queue, f) for f in FILES))
