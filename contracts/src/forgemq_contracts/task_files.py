"""What the launcher asks the agents about a run's files of tasks, and what they answer.

Neither is on the log. `python -m forgemq_agents.check_tasks` reads the question as JSON from its
standard input, and writes the answer.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.fields import DomainName
from forgemq_contracts.run import RunConfiguration

TaskField: TypeAlias = Literal["task_file", "held_out_file"]


class ReadTasks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tasks of one file or folder: how many, and a checksum of their values in their order."""

    domain: DomainName
    field: TaskField
    count: Annotated[int, Meta(ge=0, description="Of held-out tasks those that are played.")]
    checksum: str


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
