"""What the launcher asks the agents about a run's files of tasks, and what they answer.

`python -m forgemq_agents.check_tasks` reads the question as JSON from its standard input, and
writes the answer. Of both only `ReadTasks` is on the log, in `StartedRun`.
"""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.fields import DomainName
from forgemq_contracts.read_tasks import ReadTasks
from forgemq_contracts.run import RunConfiguration


class AskedTasks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Can the tasks of these domains be played, and are they those that were read before?"""

    configuration: RunConfiguration
    domains: Annotated[tuple[DomainName, ...], Meta(description="Whose files are read.")]
    known: Annotated[
        tuple[ReadTasks, ...], Meta(description="As they were at an earlier start.")
    ] = ()


class FoundTasks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the files have."""

    tasks: tuple[ReadTasks, ...] = ()
    begin_as_known: Annotated[
        tuple[ReadTasks, ...],
        Meta(description="Those of `known` whose tasks are there, ahead of any others."),
    ] = ()
    refusal: Annotated[
        str, Meta(description="Why they cannot be played: field, file, line or row; '': they can.")
    ] = ""
