"""Which stage of a run a step belongs to, as panel and page show it."""

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.stages import stage_at
from forgemq_run_view.state import DomainShare, StageState


def stage_of(configuration: RunConfiguration, *, step: int) -> StageState | None:
    """The stage of this step; None in a run without stages."""
    index = stage_at(configuration.stages, step)
    if index is None:
        return None
    stage = configuration.stages[index]
    return StageState(
        index=index,
        count=len(configuration.stages),
        from_step=stage.from_step,
        shares=tuple(DomainShare(domain=own.domain, share=own.share) for own in stage.domains),
    )
