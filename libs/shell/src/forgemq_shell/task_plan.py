"""What one task of a transform service reads and writes, and under which names."""

from dataclasses import dataclass

from forgemq_bus.log import Place
from forgemq_contracts import topics
from forgemq_shell.transform_settings import TransformSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """What a task reads and writes, fixed for its life.

    Attributes:
        service: Prefix of the transactional id and of the consumer groups with its positions.
        journal: Its partition of the service's journal.
        inputs: Every partition that the task reads.
        tick_s: Seconds between two ticks; 0: the core gets none.
        logic_version: Of the core; written into every journal record.
        settings: Of all transforms.
        snapshots_since: Lowest logic version that goes on from the core's snapshots; 0: its own.
    """

    service: str
    journal: Place
    inputs: tuple[Place, ...]
    tick_s: float
    logic_version: int
    settings: TransformSettings
    snapshots_since: int = 0

    @property
    def transactional_id(self) -> str:
        """Names the owner of the partition: a newer writer with this id fences the older one."""
        return f"{self.service}-{self.journal.partition}"

    @property
    def positions_group(self) -> str:
        """Consumer group of the positions that each batch commits in its transaction."""
        return f"{self.service}-positions"

    @property
    def needed_group(self) -> str:
        """Consumer group of the input positions that a restart needs; set at each snapshot."""
        return topics.needed_group(self.service)
