"""The topic registry: the only file that spells the name of a topic.

A name is participle + plural noun + major: a record is a fact that happened, never a command. On
the broker a topic of a run is `<run>.<name>`; the two shared topics have no prefix.
"""

import msgspec

from forgemq_contracts import completions, groups, weights
from forgemq_contracts.audit import AuditedGroup
from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode, OpenedEpisode
from forgemq_contracts.lane_plan import RequestedLane, lanes_limit
from forgemq_contracts.ownership import OwnedRun, ReportedGateway
from forgemq_contracts.requested_end import RequestedEnd
from forgemq_contracts.run import EndedRun, RunConfiguration, StartedRun
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.topic import Topic as Topic
from forgemq_contracts.topic import journal_topic
from forgemq_contracts.topic import needed_group as needed_group
from forgemq_contracts.trees import MergedTree

STARTED_RUNS = Topic(
    name="started-runs-v1",
    record=StartedRun,
    key="run",
    partitioned_by="shared",
    is_transactional=False,
    producer="launcher",
    consumers=(
        "auditor",
        "console",
        "gateway",
        "inference",
        "launcher",
        "merger",
        "reward",
        "scheduler",
        "trainer",
    ),
)
ENDED_RUNS = Topic(
    name="ended-runs-v1",
    record=EndedRun,
    key="run",
    partitioned_by="shared",
    is_transactional=False,
    producer="launcher",
    consumers=("console", "launcher", "auditor"),
)
REQUESTED_GROUPS = Topic(
    name="requested-groups-v1",
    record=groups.RequestedGroup,
    key="group_id",
    partitioned_by="queue",
    is_transactional=False,
    producer="gateway",
    consumers=("scheduler", "gateway", "console", "launcher", "auditor"),
    dead_letters_by="scheduler",
)
ADMITTED_GROUPS = Topic(
    name="admitted-groups-v1",
    record=groups.AdmittedGroup,
    key="group_id",
    partitioned_by="queue",
    is_transactional=True,
    producer="scheduler",
    consumers=("gateway", "trainer", "console", "launcher", "auditor"),
    dead_letters_by="gateway",
)
CLOSED_GROUPS = Topic(
    name="closed-groups-v1",
    record=groups.ClosedGroup,
    key="group_id",
    partitioned_by="queue",
    is_transactional=True,
    producer="scheduler",
    consumers=("gateway",),
    dead_letters_by="gateway",
)
OWNED_RUNS = Topic(
    name="owned-runs-v1",
    record=OwnedRun,
    key="run",
    partitioned_by="run",
    is_transactional=True,
    producer="gateway",
    consumers=("gateway",),
    needed_by=(needed_group("gateway"),),
    newest_kept=100,
)
REPORTED_GATEWAYS = Topic(
    name="reported-gateways-v1",
    record=ReportedGateway,
    key="gateway",
    partitioned_by="run",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway", "console", "launcher", "auditor"),
    needed_by=(needed_group("gateway"),),
    newest_kept=1000,
)
OPENED_EPISODES = Topic(
    name="opened-episodes-v1",
    record=OpenedEpisode,
    key="episode_id",
    partitioned_by="group",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway", "scheduler"),
    dead_letters_by="gateway",
)
REQUESTED_COMPLETIONS = Topic(
    name="requested-completions-v1",
    record=completions.RequestedCompletion,
    key="request_id",
    partitioned_by="lane",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway", "inference"),
    dead_letters_by="inference",
    needed_by=(needed_group("gateway"),),
)
CANCELLED_COMPLETIONS = Topic(
    name="cancelled-completions-v1",
    record=completions.CancelledCompletion,
    key="request_id",
    partitioned_by="lane",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway", "inference"),
    dead_letters_by="inference",
    needed_by=(needed_group("gateway"),),
)
SAMPLED_CHUNKS = Topic(
    name="sampled-chunks-v1",
    record=completions.SampledChunk,
    key="request_id",
    partitioned_by="group",
    is_transactional=False,
    producer="inference",
    consumers=("gateway",),
    needed_by=(needed_group("gateway"),),
)
FINISHED_COMPLETIONS = Topic(
    name="finished-completions-v1",
    record=completions.FinishedCompletion,
    key="request_id",
    partitioned_by="group",
    is_transactional=False,
    producer="inference",
    consumers=("gateway", "reward", "merger", "trainer", "auditor", "console", "launcher"),
    dead_letters_by="merger",
    needed_by=(
        needed_group("auditor"),
        needed_group("gateway"),
        needed_group("merger"),
        "reward-grading",
    ),
)
DELIVERED_COMPLETIONS = Topic(
    name="delivered-completions-v1",
    record=completions.DeliveredCompletion,
    key="request_id",
    partitioned_by="group",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway",),
    dead_letters_by="gateway",
    needed_by=(needed_group("gateway"),),
)
FINISHED_EPISODES = Topic(
    name="finished-episodes-v1",
    record=FinishedEpisode,
    key="episode_id",
    partitioned_by="group",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway", "reward", "auditor", "console", "launcher"),
    dead_letters_by="reward",
)
GRADED_EPISODES = Topic(
    name="graded-episodes-v1",
    record=GradedEpisode,
    key="episode_id",
    partitioned_by="group",
    is_transactional=False,
    producer="reward",
    consumers=("reward", "console", "launcher", "auditor"),
    dead_letters_by="reward",
)
SCORED_GROUPS = Topic(
    name="scored-groups-v1",
    record=groups.ScoredGroup,
    key="group_id",
    partitioned_by="group",
    is_transactional=True,
    producer="reward",
    consumers=("merger", "auditor", "console", "launcher"),
    dead_letters_by="merger",
)
MERGED_TREES = Topic(
    name="merged-trees-v1",
    record=MergedTree,
    key="group_id",
    partitioned_by="group",
    is_transactional=True,
    producer="merger",
    consumers=("trainer", "auditor", "launcher"),
    dead_letters_by="trainer",
    needed_by=(needed_group("auditor"), needed_group("trainer")),
)
MERGED_GROUPS = Topic(
    name="merged-groups-v1",
    record=groups.MergedGroup,
    key="group_id",
    partitioned_by="group",
    is_transactional=True,
    producer="merger",
    consumers=("scheduler", "console", "launcher", "auditor"),
    dead_letters_by="scheduler",
)
SCHEDULED_STEPS = Topic(
    name="scheduled-steps-v1",
    record=ScheduledStep,
    key="step",
    partitioned_by="run",
    is_transactional=True,
    producer="scheduler",
    consumers=("trainer", "console", "launcher", "auditor"),
    dead_letters_by="trainer",
)
RETIRED_GROUPS = Topic(
    name="retired-groups-v1",
    record=groups.RetiredGroup,
    key="group_id",
    partitioned_by="group",
    is_transactional=True,
    producer="scheduler",
    consumers=("gateway", "reward", "merger", "trainer", "auditor", "console", "launcher"),
    dead_letters_by="reward",
)
AUDITED_GROUPS = Topic(
    name="audited-groups-v1",
    record=AuditedGroup,
    key="group_id",
    partitioned_by="group",
    is_transactional=True,
    producer="auditor",
    consumers=("console", "launcher", "auditor"),
)
TRAINED_STEPS = Topic(
    name="trained-steps-v1",
    record=TrainedStep,
    key="step",
    partitioned_by="run",
    is_transactional=True,
    producer="trainer",
    consumers=("scheduler", "trainer", "gateway", "console", "launcher", "auditor"),
    dead_letters_by="scheduler",
)
PUBLISHED_WEIGHTS = Topic(
    name="published-weights-v1",
    record=weights.PublishedWeights,
    key="version",
    partitioned_by="run",
    is_transactional=False,
    producer="trainer",
    consumers=("inference", "trainer", "console", "launcher", "auditor"),
    dead_letters_by="trainer",
)
OFFERED_BROADCASTS = Topic(
    name="offered-broadcasts-v1",
    record=weights.OfferedBroadcast,
    key="group_name",
    partitioned_by="run",
    is_transactional=False,
    producer="trainer",
    consumers=("inference",),
)
REQUESTED_LANES = Topic(
    name="requested-lanes-v1",
    record=RequestedLane,
    key="lane",
    partitioned_by="run",
    is_transactional=False,
    producer="gateway",
    consumers=("gateway", "inference", "launcher"),
    dead_letters_by="gateway",
)
REQUESTED_ENDS = Topic(
    name="requested-ends-v1",
    record=RequestedEnd,
    key="run",
    partitioned_by="run",
    is_transactional=False,
    producer="launcher",
    consumers=("launcher",),
)
LOADED_WEIGHTS = Topic(
    name="loaded-weights-v1",
    record=weights.LoadedWeights,
    key="lane",
    partitioned_by="lane",
    is_transactional=False,
    producer="inference",
    consumers=("scheduler", "trainer", "console", "launcher", "inference", "auditor"),
    dead_letters_by="scheduler",
)
REPORTED_ENGINES = Topic(
    name="reported-engines-v1",
    record=weights.ReportedEngine,
    key="lane",
    partitioned_by="lane",
    is_transactional=False,
    producer="inference",
    consumers=("gateway", "inference", "scheduler", "trainer", "console", "launcher", "auditor"),
    dead_letters_by="scheduler",
    needed_by=(needed_group("scheduler"),),
    newest_kept=1000,
)
REWARD_JOURNAL = journal_topic("reward", "group")
MERGER_JOURNAL = journal_topic("merger", "group")
SCHEDULER_JOURNAL = journal_topic("scheduler", "run")

SHARED: tuple[Topic, ...] = (STARTED_RUNS, ENDED_RUNS)
OF_RUN: tuple[Topic, ...] = (
    REQUESTED_GROUPS,
    ADMITTED_GROUPS,
    CLOSED_GROUPS,
    OWNED_RUNS,
    REPORTED_GATEWAYS,
    OPENED_EPISODES,
    REQUESTED_COMPLETIONS,
    CANCELLED_COMPLETIONS,
    SAMPLED_CHUNKS,
    FINISHED_COMPLETIONS,
    DELIVERED_COMPLETIONS,
    FINISHED_EPISODES,
    GRADED_EPISODES,
    SCORED_GROUPS,
    MERGED_TREES,
    MERGED_GROUPS,
    SCHEDULED_STEPS,
    RETIRED_GROUPS,
    AUDITED_GROUPS,
    TRAINED_STEPS,
    PUBLISHED_WEIGHTS,
    OFFERED_BROADCASTS,
    REQUESTED_LANES,
    REQUESTED_ENDS,
    LOADED_WEIGHTS,
    REPORTED_ENGINES,
    REWARD_JOURNAL,
    MERGER_JOURNAL,
    SCHEDULER_JOURNAL,
)
ALL: tuple[Topic, ...] = SHARED + OF_RUN
BY_NAME: dict[str, Topic] = {topic.name: topic for topic in ALL}
BY_DLQ_NAME: dict[str, Topic] = {topic.dlq_name: topic for topic in ALL if topic.has_dlq}


def partition_count(topic: Topic, configuration: RunConfiguration) -> int:
    """Number of partitions of a topic in this run."""
    counts = dict.fromkeys(("shared", "run"), 1) | {
        "queue": len(configuration.queues),
        "group": configuration.log.group_partitions,
        "lane": lanes_limit(configuration.log),
    }
    return counts[topic.partitioned_by]


def encode(record: msgspec.Struct) -> bytes:
    """Wire bytes of a record: MessagePack with field names."""
    return _ENCODER.encode(record)


def decode(topic: Topic, value: bytes) -> msgspec.Struct:
    """The record in these wire bytes.

    Raises:
        msgspec.ValidationError: The bytes are not a record of this topic; names the field and the
            rule, if one is broken.
    """
    try:
        return _DECODERS[topic.name].decode(value)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Cut short, not UTF-8, or nested too deep: msgspec wraps only the first of these.
        raise msgspec.ValidationError(f"no {topic.record.__name__}: {error}") from error


_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {topic.name: msgspec.msgpack.Decoder(topic.record) for topic in ALL}
