"""Wiring of the scheduler: one active core for the run, any number of processes standing by."""

from collections.abc import Mapping

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import (
    ADMITTED_GROUPS,
    CLOSED_GROUPS,
    LOADED_WEIGHTS,
    MERGED_GROUPS,
    OF_RUN,
    OPENED_EPISODES,
    REPORTED_ENGINES,
    REQUESTED_GROUPS,
    RETIRED_GROUPS,
    SCHEDULED_STEPS,
    SCHEDULER_JOURNAL,
    TRAINED_STEPS,
    Topic,
)
from forgemq_scheduler.core import SchedulerCore
from forgemq_scheduler.core.logic_version import LOGIC_VERSION, SNAPSHOTS_SINCE
from forgemq_scheduler.settings import SchedulerSettings
from forgemq_settings.environment import parse
from forgemq_shell.service import Context
from forgemq_shell.transform import Transform

CONSUMES: tuple[Topic, ...] = (
    REQUESTED_GROUPS,
    OPENED_EPISODES,
    MERGED_GROUPS,
    TRAINED_STEPS,
    LOADED_WEIGHTS,
    REPORTED_ENGINES,
)
PRODUCES: tuple[Topic, ...] = (
    ADMITTED_GROUPS,
    CLOSED_GROUPS,
    SCHEDULED_STEPS,
    RETIRED_GROUPS,
)

# Dead letters that may be about a group, whichever service wrote them.
DEAD_LETTERS: tuple[Topic, ...] = tuple(
    topic for topic in OF_RUN if topic.has_dlq and topic.partitioned_by != "run"
)


def transform_of(configuration: RunConfiguration, environ: Mapping[str, str]) -> Transform:
    """The core over all partitions of its inputs; the journal has one partition."""
    settings = parse(SchedulerSettings, prefix="FORGEMQ_SCHEDULER_", environ=environ)
    return Transform(
        service="scheduler",
        inputs=CONSUMES,
        journal=SCHEDULER_JOURNAL,
        make_core=lambda _: SchedulerCore(configuration),
        logic_version=LOGIC_VERSION,
        snapshots_since=SNAPSHOTS_SINCE,
        tick_s=settings.tick_s,
        dead_letters=DEAD_LETTERS,
    )


async def main(context: Context) -> None:
    """Schedule until the context says stop."""
    await transform_of(context.configuration, context.environ).run(context)
