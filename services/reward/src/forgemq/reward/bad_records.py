"""A record of an episode that does not decode fails its group, so that the group's slot ends."""

from collections.abc import Sequence

from forgemq.bus.log import Record
from forgemq.contracts import topics
from forgemq.contracts.groups import ScoredGroup
from forgemq.contracts.messages import Output
from forgemq.contracts.run import RunConfiguration
from forgemq.shell.failed_group import failed_group, if_valid


class FailedGroups:
    """Turns a bad episode record into the failure of its group; pure.

    The key of finished-episodes and graded-episodes is the episode id, and its head is the group
    id.
    """

    def __init__(self, configuration: RunConfiguration) -> None:
        self._configuration = configuration

    def __call__(self, record: Record, reason: str) -> Sequence[Output]:
        """The failed group, or nothing where the key tells none."""
        if record.topic not in (topics.FINISHED_EPISODES.name, topics.GRADED_EPISODES.name):
            return ()
        failed = failed_group(record, reason, configuration=self._configuration)
        scored = ScoredGroup(
            group_id=record.key.decode(errors="replace").rsplit(".", 2)[0],
            domain=failed.domain,
            purpose=failed.purpose,
            episodes=(),
            not_trainable="failed",
            detail=failed.detail,
        )
        return if_valid(
            Output(topic=topics.SCORED_GROUPS.name, partition=record.partition, record=scored)
        )
