"""Wiring of the scheduler: one active core for the run, any number of processes standing by."""

from forgemq.contracts.run import RunConfiguration
from forgemq.contracts.topics import (
    ADMITTED_GROUPS,
    LOADED_WEIGHTS,
    MERGED_GROUPS,
    REPORTED_ENGINES,
    REQUESTED_GROUPS,
    RETIRED_GROUPS,
    SCHEDULED_STEPS,
    SCHEDULER_JOURNAL,
    TRAINED_STEPS,
    Topic,
)
from forgemq.scheduler.core import SchedulerCore
from forgemq.scheduler.settings import SchedulerSettings
from forgemq.settings.environment import parse
from forgemq.shell.service import Context
from forgemq.shell.transform import Transform

CONSUMES: tuple[Topic, ...] = (
    REQUESTED_GROUPS,
    MERGED_GROUPS,
    TRAINED_STEPS,
    LOADED_WEIGHTS,
    REPORTED_ENGINES,
)
PRODUCES: tuple[Topic, ...] = (ADMITTED_GROUPS, SCHEDULED_STEPS, RETIRED_GROUPS)


def transform_of(configuration: RunConfiguration, *, tick_s: float) -> Transform:
    """The core over all partitions of its inputs; the journal has one partition."""
    return Transform(
        service="scheduler",
        inputs=CONSUMES,
        journal=SCHEDULER_JOURNAL,
        make_core=lambda _: SchedulerCore(configuration),
        tick_s=tick_s,
    )


async def main(context: Context) -> None:
    """Schedule until the context says stop."""
    settings = parse(SchedulerSettings, prefix="FORGEMQ_SCHEDULER_", environ=context.environ)
    await transform_of(context.configuration, tick_s=settings.tick_s).run(context)
