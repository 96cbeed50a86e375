"""The services that the storm runs: their own wiring, and what is written to their inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from forgemq_bus.log import Emit
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_merger import app as merger_app
from forgemq_reward import app as reward_app
from forgemq_scheduler import app as scheduler_app
from forgemq_shell.transform import Transform
from tests.simulation import cases, scheduling_cases
from tests.simulation.counting_core import CountingCore
from tests.simulation.harness import CoreCase


@dataclass(frozen=True, kw_only=True)
class StormCase:
    """One service in the storm.

    Attributes:
        name: Of the case.
        service: Whose transform it is.
        journal: Its journal topic.
        make_transform: Its wiring, from the configuration and the environment.
        script: Input records in order; for partition 0 of their topics.
        configuration: Of the run, for one group partition.
        partitions_max: Tasks that the service can have.
        tick_setting: Environment variable of the time between two ticks; "" if it has none.
    """

    name: str
    service: str
    journal: topics.Topic
    make_transform: Callable[[RunConfiguration, Mapping[str, str]], Transform]
    script: tuple[Emit, ...]
    configuration: RunConfiguration = cases.CONFIGURATION
    partitions_max: int = 2
    tick_setting: str = ""

    def scripts(self, partitions: int, *, records: int) -> tuple[tuple[Emit, ...], ...]:
        """The first so many records, once for each partition."""
        return tuple(
            tuple(msgspec.structs.replace(emit, partition=number) for emit in self.script[:records])
            for number in range(partitions)
        )


def make_counting(_: RunConfiguration, environ: Mapping[str, str]) -> Transform:
    """The counting core; it writes on some ticks too."""
    tick_s = float(environ.get("COUNTING_TICK_S", "0"))
    return Transform(
        service="merger",
        inputs=(topics.SCORED_GROUPS, topics.RETIRED_GROUPS),
        journal=topics.MERGER_JOURNAL,
        make_core=lambda partition: CountingCore(partition=partition, tick_outputs_ms=700),
        logic_version=1,
        tick_s=tick_s,
    )


def _case(
    name: str,
    script: CoreCase,
    make_transform: Callable[[RunConfiguration, Mapping[str, str]], Transform],
    *,
    tick_setting: str = "",
    configuration: RunConfiguration = cases.CONFIGURATION,
) -> StormCase:
    return StormCase(
        name=name,
        service=script.name,
        journal=script.journal,
        make_transform=make_transform,
        script=script.script,
        configuration=configuration,
        partitions_max=1 if script.journal.partitioned_by == "run" else 2,
        tick_setting=tick_setting,
    )


CASES: Mapping[str, StormCase] = {
    case.name: case
    for case in (
        _case("counting", cases.counting(), make_counting, tick_setting="COUNTING_TICK_S"),
        _case("reward", cases.reward(), reward_app.transform_of),
        _case(
            "merger",
            cases.merger(),
            merger_app.transform_of,
            tick_setting="FORGEMQ_MERGER_TICK_S",
        ),
        _case(
            "scheduler",
            cases.scheduler(),
            scheduler_app.transform_of,
            tick_setting="FORGEMQ_SCHEDULER_TICK_S",
        ),
        _case("reward_repeats", scheduling_cases.reward(), reward_app.transform_of),
        _case(
            "scheduler_dead_letters",
            scheduling_cases.scheduler(),
            scheduler_app.transform_of,
            tick_setting="FORGEMQ_SCHEDULER_TICK_S",
            configuration=scheduling_cases.CONFIGURATION,
        ),
    )
}
