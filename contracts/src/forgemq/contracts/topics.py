"""The topic registry: the only place a topic's name is written down.

Names are participle + plural noun + major; a record is a fact that happened, never a command.
On the broker a topic of a run is `<run>.<name>`; the two shared topics have no prefix.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from forgemq.contracts.completions import (
    CancelledCompletion,
    DeliveredCompletion,
    FinishedCompletion,
    RequestedCompletion,
)
from forgemq.contracts.episodes import FinishedEpisode, GradedEpisode, OpenedEpisode
from forgemq.contracts.groups import (
    AdmittedGroup,
    MergedGroup,
    RequestedGroup,
    RetiredGroup,
    ScoredGroup,
)
from forgemq.contracts.journal import JournalledBatch
from forgemq.contracts.run import EndedRun, StartedRun
from forgemq.contracts.steps import ScheduledStep, TrainedStep
from forgemq.contracts.trees import MergedTree
from forgemq.contracts.weights import LoadedWeights, PublishedWeights, ReportedEngine

PartitionedBy: TypeAlias = Literal["shared", "run", "queue", "group", "lane"]
Retention: TypeAlias = Literal["run", "needed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic and the one record type it carries.

    Attributes:
        name: On the wire, behind the run's prefix.
        record: The struct every value decodes to.
        key: Field whose text is the record key.
        partitioned_by: What picks the partition; `queue` is the queue's place in the run's
            configuration, `shared` and `run` have one partition.
        is_transactional: Always or never written in transactions.
        producer: The only service that writes it.
        consumers: Services that read it; checked against what they declare.
        retention: `run` keeps everything; `needed` is trimmed below the lowest offset in use.
        has_dlq: Bad records go to `<name>-dlq`.
    """

    name: str
    record: type[msgspec.Struct]
    key: str
    partitioned_by: PartitionedBy
    is_transactional: bool
    producer: str
    consumers: tuple[str, ...]
    retention: Retention = "run"
    has_dlq: bool = True

    @property
    def dlq_name(self) -> str:
        """Where a record that does not decode goes, with its original bytes."""
        return f"{self.name}-dlq"


STARTED_RUNS = Topic(
    name="started-runs-v1",
    record=StartedRun,
    key="run",
    partitioned_by="shared",
    is_transactional=False,
    producer="launcher",
    consumers=(
        "console",
        "gateway",
        "inference",
        "launcher",
        "merger",
        "reward",
        "scheduler",
        "trainer",
    ),
    has_dlq=False,
)
ENDED_RUNS = Topic(
    name="ended-runs-v1",
    record=EndedRun,
    key="run",
    partitioned_by="shared",
    is_transactional=False,
    producer="launcher",
    consumers=("console", "launcher"),
    has_dlq=False,
)
REQUESTED_GROUPS = Topic(
    name="requested-groups-v1",
    record=RequestedGroup,
    key="group_id",
    partitioned_by="queue",
    is_transactional=False,
    producer="gateway",
    consumers=("scheduler", "gateway", "console", "launcher"),
)
ADMITTED_GROUPS = Topic(
    name="admitted-groups-v1",
    record=AdmittedGroup,
    key="group_id",
    partitioned_by="queue",
    is_transactional=True,
    producer="scheduler",
    consumers=("gateway", "console", "launcher"),
)
OPENED_EPISODES = Topic(
    name="opened-episodes-v1",
    record=OpenedEpisode,
    key="episode_id",
    partitioned_by="group",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway",),
)
REQUESTED_COMPLETIONS = Topic(
    name="requested-completions-v1",
    record=RequestedCompletion,
    key="request_id",
    partitioned_by="lane",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway", "inference"),
    retention="needed",
)
CANCELLED_COMPLETIONS = Topic(
    name="cancelled-completions-v1",
    record=CancelledCompletion,
    key="request_id",
    partitioned_by="lane",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway", "inference"),
    retention="needed",
)
FINISHED_COMPLETIONS = Topic(
    name="finished-completions-v1",
    record=FinishedCompletion,
    key="request_id",
    partitioned_by="group",
    is_transactional=False,
    producer="inference",
    consumers=("gateway", "reward", "merger", "console", "launcher"),
    retention="needed",
)
DELIVERED_COMPLETIONS = Topic(
    name="delivered-completions-v1",
    record=DeliveredCompletion,
    key="request_id",
    partitioned_by="group",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway",),
    retention="needed",
)
FINISHED_EPISODES = Topic(
    name="finished-episodes-v1",
    record=FinishedEpisode,
    key="episode_id",
    partitioned_by="group",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway", "reward", "console", "launcher"),
)
GRADED_EPISODES = Topic(
    name="graded-episodes-v1",
    record=GradedEpisode,
    key="episode_id",
    partitioned_by="group",
    is_transactional=False,
    producer="reward",
    consumers=("reward", "console", "launcher"),
)
SCORED_GROUPS = Topic(
    name="scored-groups-v1",
    record=ScoredGroup,
    key="group_id",
    partitioned_by="group",
    is_transactional=True,
    producer="reward",
    consumers=("merger", "console", "launcher"),
)
MERGED_TREES = Topic(
    name="merged-trees-v1",
    record=MergedTree,
    key="group_id",
    partitioned_by="group",
    is_transactional=True,
    producer="merger",
    consumers=("trainer",),
    retention="needed",
)
MERGED_GROUPS = Topic(
    name="merged-groups-v1",
    record=MergedGroup,
    key="group_id",
    partitioned_by="group",
    is_transactional=True,
    producer="merger",
    consumers=("scheduler", "console", "launcher"),
)
SCHEDULED_STEPS = Topic(
    name="scheduled-steps-v1",
    record=ScheduledStep,
    key="step",
    partitioned_by="run",
    is_transactional=True,
    producer="scheduler",
    consumers=("trainer", "console", "launcher"),
)
RETIRED_GROUPS = Topic(
    name="retired-groups-v1",
    record=RetiredGroup,
    key="group_id",
    partitioned_by="group",
    is_transactional=True,
    producer="scheduler",
    consumers=("gateway", "reward", "merger", "console", "launcher"),
)
TRAINED_STEPS = Topic(
    name="trained-steps-v1",
    record=TrainedStep,
    key="step",
    partitioned_by="run",
    is_transactional=True,
    producer="trainer",
    consumers=("scheduler", "trainer", "gateway", "console", "launcher"),
)
PUBLISHED_WEIGHTS = Topic(
    name="published-weights-v1",
    record=PublishedWeights,
    key="version",
    partitioned_by="run",
    is_transactional=False,
    producer="trainer",
    consumers=("inference", "trainer", "console", "launcher"),
)
LOADED_WEIGHTS = Topic(
    name="loaded-weights-v1",
    record=LoadedWeights,
    key="lane",
    partitioned_by="lane",
    is_transactional=False,
    producer="inference",
    consumers=("scheduler", "trainer", "console", "launcher", "inference"),
)
REPORTED_ENGINES = Topic(
    name="reported-engines-v1",
    record=ReportedEngine,
    key="lane",
    partitioned_by="lane",
    is_transactional=False,
    producer="inference",
    consumers=("gateway", "inference", "scheduler", "trainer", "console", "launcher"),
    retention="needed",
)


def _journal(service: str, partitioned_by: PartitionedBy) -> Topic:
    return Topic(
        name=f"{service}-journal-v1",
        record=JournalledBatch,
        key="sequence",
        partitioned_by=partitioned_by,
        is_transactional=True,
        producer=service,
        consumers=(service,),
        retention="needed",
        has_dlq=False,
    )


REWARD_JOURNAL = _journal("reward", "group")
MERGER_JOURNAL = _journal("merger", "group")
SCHEDULER_JOURNAL = _journal("scheduler", "run")

SHARED: tuple[Topic, ...] = (STARTED_RUNS, ENDED_RUNS)
OF_RUN: tuple[Topic, ...] = (
    REQUESTED_GROUPS,
    ADMITTED_GROUPS,
    OPENED_EPISODES,
    REQUESTED_COMPLETIONS,
    CANCELLED_COMPLETIONS,
    FINISHED_COMPLETIONS,
    DELIVERED_COMPLETIONS,
    FINISHED_EPISODES,
    GRADED_EPISODES,
    SCORED_GROUPS,
    MERGED_TREES,
    MERGED_GROUPS,
    SCHEDULED_STEPS,
    RETIRED_GROUPS,
    TRAINED_STEPS,
    PUBLISHED_WEIGHTS,
    LOADED_WEIGHTS,
    REPORTED_ENGINES,
    REWARD_JOURNAL,
    MERGER_JOURNAL,
    SCHEDULER_JOURNAL,
)
ALL: tuple[Topic, ...] = SHARED + OF_RUN
BY_NAME: dict[str, Topic] = {topic.name: topic for topic in ALL}


def partition_count(topic: Topic, *, group_partitions: int, lanes: int, queues: int) -> int:
    """Number of partitions of a topic in a run with these counts."""
    counts = {
        "shared": 1,
        "run": 1,
        "queue": queues,
        "group": group_partitions,
        "lane": lanes,
    }
    return counts[topic.partitioned_by]


def encode(record: msgspec.Struct) -> bytes:
    """Wire bytes of a record: MessagePack with field names."""
    return _ENCODER.encode(record)


def decode(topic: Topic, value: bytes) -> msgspec.Struct:
    """The record in these wire bytes.

    Raises:
        msgspec.ValidationError: the bytes are no record of this topic, whatever is wrong with them;
            says which field and rule where there is one.
    """
    try:
        return _DECODERS[topic.name].decode(value)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Cut short, text that is no UTF-8, or nested too deep: msgspec lets the last two through.
        raise msgspec.ValidationError(f"no {topic.record.__name__}: {error}") from error


_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {topic.name: msgspec.msgpack.Decoder(topic.record) for topic in ALL}
