"""A scored group that does not decode fails, so that its slot ends."""

from collections.abc import Sequence

from forgemq.bus.log import Record
from forgemq.contracts import topics
from forgemq.contracts.groups import MergedGroup
from forgemq.contracts.messages import Output
from forgemq.contracts.run import RunConfiguration
from forgemq.shell.failed_group import failed_group, if_valid


class FailedGroups:
    """Turns a bad record of scored-groups into a merged group that cannot train; pure.

    The key is the group id. A bad record of finished-completions fails no group: its key names only
    the request, and no completion came out of it, so the gateway gives the turn to a lane again.
    A score that names it none the less becomes a failed group in the merger's core.
    """

    def __init__(self, configuration: RunConfiguration) -> None:
        self._configuration = configuration

    def __call__(self, record: Record, reason: str) -> Sequence[Output]:
        """The failed group, or nothing where the key tells none."""
        if record.topic != topics.SCORED_GROUPS.name:
            return ()
        failed = failed_group(record, reason, configuration=self._configuration)
        merged = MergedGroup(
            group_id=record.key.decode(errors="replace"),
            domain=failed.domain,
            purpose=failed.purpose,
            partition=record.partition,
            not_trainable="failed",
            detail=failed.detail,
        )
        return if_valid(
            Output(topic=topics.MERGED_GROUPS.name, partition=record.partition, record=merged)
        )
