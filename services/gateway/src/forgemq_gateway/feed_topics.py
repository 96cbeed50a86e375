"""Which topics a gateway reads: those of the whole run, and those of the partitions it owns."""

from forgemq_contracts import topics

CONSUMES = (
    topics.REQUESTED_GROUPS,
    topics.ADMITTED_GROUPS,
    topics.CLOSED_GROUPS,
    topics.RETIRED_GROUPS,
    topics.TRAINED_STEPS,
    topics.OPENED_EPISODES,
    topics.FINISHED_EPISODES,
    topics.REQUESTED_COMPLETIONS,
    topics.CANCELLED_COMPLETIONS,
    topics.SAMPLED_CHUNKS,
    topics.FINISHED_COMPLETIONS,
    topics.DELIVERED_COMPLETIONS,
    topics.REPORTED_ENGINES,
    topics.OWNED_RUNS,
    topics.REPORTED_GATEWAYS,
    topics.REQUESTED_LANES,
)

GROUPS = (
    topics.REQUESTED_GROUPS,
    topics.ADMITTED_GROUPS,
    topics.RETIRED_GROUPS,
    topics.CLOSED_GROUPS,
)
"""Every gateway knows all groups that are open, also those that another one owns."""

RUN_STAGES = (
    (topics.REQUESTED_GROUPS, topics.ADMITTED_GROUPS, topics.RETIRED_GROUPS, topics.TRAINED_STEPS),
    (topics.CLOSED_GROUPS,),
    (
        topics.REQUESTED_LANES,
        topics.REPORTED_ENGINES,
        topics.OWNED_RUNS,
        topics.REPORTED_GATEWAYS,
    ),
)
"""What every gateway reads at its start and then follows. Each stage needs what earlier stages have
applied; within a stage the order does not matter."""

PARTITION_STAGES = (
    (topics.OPENED_EPISODES,),
    (topics.FINISHED_EPISODES,),
    (topics.FINISHED_COMPLETIONS,),
    (topics.REQUESTED_COMPLETIONS, topics.DELIVERED_COMPLETIONS),
    (topics.CANCELLED_COMPLETIONS,),
)
"""What the owner of a group partition reads when it gains it, in stages as those of the run."""

FOLLOWED = (topics.FINISHED_COMPLETIONS, topics.DELIVERED_COMPLETIONS)
"""What it then follows. It applies its own records when it writes them; deliveries may be those of
the previous owner, which serves until it has read the change."""

FOLLOWED_FROM_NOW = (topics.SAMPLED_CHUNKS,)
"""What it follows from when it gains the partition, in a run with live streams."""

URGENT = frozenset(topic.name for topic in (topics.FINISHED_COMPLETIONS, topics.SAMPLED_CHUNKS))
"""What a client waits for. The rest may come a little later and more records at once: a reader of
its own gathers it, so that no record of the rest makes the broker answer for these."""

COMPLETIONS = frozenset(
    topic.name
    for topic in (
        topics.SAMPLED_CHUNKS,
        topics.FINISHED_COMPLETIONS,
        topics.REQUESTED_COMPLETIONS,
        topics.DELIVERED_COMPLETIONS,
        topics.CANCELLED_COMPLETIONS,
    )
)
"""Restored after groups and ends of episodes: only those of open episodes are of use."""

BY_GROUP = (*GROUPS, *(topic for stage in PARTITION_STAGES for topic in stage))
"""On these topics, all records of a group are written after its first one (`FIRST_RECORDS`)."""
