"""Wiring of the reward service: the group core as a transform, and the grading loop."""

import asyncio
import functools
from collections.abc import Mapping

from forgemq_contracts.domains import rewards_of
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import (
    FINISHED_COMPLETIONS,
    FINISHED_EPISODES,
    GRADED_EPISODES,
    RETIRED_GROUPS,
    REWARD_JOURNAL,
    SCORED_GROUPS,
    Topic,
)
from forgemq_reward.core import RewardCore
from forgemq_reward.core.logic_version import LOGIC_VERSION, SNAPSHOTS_SINCE
from forgemq_reward.grading_loop import GradingLoop
from forgemq_reward.settings import RewardSettings
from forgemq_settings.environment import parse
from forgemq_shell.service import Context
from forgemq_shell.transform import Transform

CONSUMES: tuple[Topic, ...] = (
    FINISHED_EPISODES,
    FINISHED_COMPLETIONS,
    GRADED_EPISODES,
    RETIRED_GROUPS,
)
PRODUCES: tuple[Topic, ...] = (GRADED_EPISODES, SCORED_GROUPS)


def transform_of(configuration: RunConfiguration, environ: Mapping[str, str]) -> Transform:
    """The transform over the group core; it has no settings, so the environment is not read."""
    del environ
    return Transform(
        service="reward",
        inputs=(GRADED_EPISODES, FINISHED_EPISODES, RETIRED_GROUPS),
        journal=REWARD_JOURNAL,
        make_core=functools.partial(_core, configuration),
        logic_version=LOGIC_VERSION,
        snapshots_since=SNAPSHOTS_SINCE,
    )


async def main(context: Context) -> None:
    """Grade episodes and score groups until `context.stop`."""
    settings = parse(RewardSettings, prefix="FORGEMQ_REWARD_", environ=context.environ)
    async with asyncio.TaskGroup() as group:
        group.create_task(transform_of(context.configuration, context.environ).run(context))
        group.create_task(GradingLoop(context, settings).run())


def _core(configuration: RunConfiguration, partition: int) -> RewardCore:
    by_domain = {
        queue.domain: rewards_of(configuration, domain=queue.domain)
        for queue in configuration.queues
    }
    return RewardCore(
        partition=partition,
        rewards=configuration.rewards,
        by_domain=by_domain,
        has_teacher=configuration.distillation is not None,
    )
