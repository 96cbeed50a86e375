"""What a step writes to the log and to the blob store, by topic.

Every record is a struct of the contracts in its wire form, with contents of the length that real
ones have. So the bytes change with the contracts. Left out is what grows with seconds and not with
steps, which is heartbeats and journals.
"""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topic import Topic
from forgemq_launcher.plan.episode_records import PlannedQueue, episode_records
from forgemq_launcher.plan.group_records import group_records, step_records
from forgemq_shell.records import emit_of


class TopicBytes(Struct, frozen=True, kw_only=True):
    """What a step writes to a topic: keys, values and headers, before the broker compresses them.

    Attributes:
        topic: Its name.
        records: Of a step.
        inline_bytes: On the log.
        blob_bytes: In the blob store, before compression.
        is_kept: They stay for the life of the run; else until no reader needs them.
    """

    topic: str
    records: int
    inline_bytes: int
    blob_bytes: int
    is_kept: bool


class _Books:
    """Sums of records and bytes by topic."""

    def __init__(self, inline_bytes_max: int) -> None:
        self._inline_bytes_max = inline_bytes_max
        self.records: Counter[str] = Counter()
        self.inline: Counter[str] = Counter()
        self.blobs: Counter[str] = Counter()

    def add(self, topic: Topic, record: Struct, *, times: int) -> None:
        emit = emit_of(Output(topic=topic.name, partition=0, record=record))
        frame = len(emit.key) + sum(len(name) + len(value) for name, value in emit.headers)
        is_blob = len(emit.value) > self._inline_bytes_max
        self.records[topic.name] += times
        self.inline[topic.name] += times * (frame + (0 if is_blob else len(emit.value)))
        self.blobs[topic.name] += times * len(emit.value) if is_blob else 0


def step_bytes(
    planned: Sequence[PlannedQueue],
    configuration: RunConfiguration,
    *,
    weights_bytes: int,
    head_bytes: int = 0,
) -> tuple[TopicBytes, ...]:
    """What a step writes, by topic, in the order of the registry.

    Args:
        planned: The queues.
        configuration: Of the run.
        weights_bytes: Of one published version.
        head_bytes: Of the draft head that is published with it; 0 without one.
    """
    books = _Books(configuration.log.inline_bytes_max)
    for each in planned:
        groups = each.queue.groups_per_step
        for topic, record in group_records(each):
            books.add(topic, record, times=groups)
        for topic, record in episode_records(each):
            books.add(topic, record, times=groups * each.queue.group_size)
    for topic, record in step_records(
        planned, configuration, weights_bytes=weights_bytes, head_bytes=head_bytes
    ):
        books.add(topic, record, times=1)
    return tuple(
        TopicBytes(
            topic=topic.name,
            records=books.records[topic.name],
            inline_bytes=books.inline[topic.name],
            blob_bytes=books.blobs[topic.name],
            is_kept=not topic.needed_by or configuration.log.keep_for_replay,
        )
        for topic in topics.OF_RUN
        if books.records[topic.name]
    )
