"""What the agents read in a run's files of tasks, by which two starts of the run are compared."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.fields import DomainName

TaskField: TypeAlias = Literal["task_file", "held_out_file"]


class ReadTasks(Struct, frozen=True, kw_only=True):
    """The tasks of one file or folder: how many, and a checksum of their values in their order."""

    domain: DomainName
    field: TaskField
    count: Annotated[int, Meta(ge=0, description="Of held-out tasks those that are played.")]
    checksum: str
