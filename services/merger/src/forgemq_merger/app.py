"""Wiring of the merger: one task for each group partition."""

from collections.abc import Mapping

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import (
    FINISHED_COMPLETIONS,
    MERGED_GROUPS,
    MERGED_TREES,
    MERGER_JOURNAL,
    RETIRED_GROUPS,
    SCORED_GROUPS,
    Topic,
)
from forgemq_merger.core.logic_version import LOGIC_VERSION, SNAPSHOTS_SINCE
from forgemq_merger.core.merger import MergerCore
from forgemq_merger.settings import MergerSettings
from forgemq_settings.environment import parse
from forgemq_shell.service import Context
from forgemq_shell.transform import Transform

CONSUMES: tuple[Topic, ...] = (SCORED_GROUPS, FINISHED_COMPLETIONS, RETIRED_GROUPS)
PRODUCES: tuple[Topic, ...] = (MERGED_TREES, MERGED_GROUPS)


def transform_of(configuration: RunConfiguration, environ: Mapping[str, str]) -> Transform:
    """One core for each group partition."""
    settings = parse(MergerSettings, prefix="FORGEMQ_MERGER_", environ=environ)
    return Transform(
        service="merger",
        inputs=CONSUMES,
        journal=MERGER_JOURNAL,
        make_core=lambda partition: MergerCore(
            partition,
            tree_tokens_max=configuration.trainer.tree_tokens_max,
            has_teacher=configuration.distillation is not None,
        ),
        logic_version=LOGIC_VERSION,
        snapshots_since=SNAPSHOTS_SINCE,
        tick_s=settings.tick_s,
    )


async def main(context: Context) -> None:
    """Merge groups until the context says stop."""
    await transform_of(context.configuration, context.environ).run(context)
