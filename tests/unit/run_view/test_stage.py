"""The stage of a step, as panel and page show it."""

from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.stages import Stage, StageDomain
from forgemq_run_view.stage import stage_of
from forgemq_run_view.state import DomainShare, StageState

QUEUES = (
    Queue(domain="a", task_source="m:f", agent="m:g"),
    Queue(domain="b", task_source="m:f", agent="m:g"),
)


def run_of(*stages: Stage) -> RunConfiguration:
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m"),
        queues=QUEUES,
        trainer=Trainer(steps=9),
        stages=stages,
    )


def test_a_step_is_in_the_newest_stage_that_has_begun_with_the_shares_of_that_one():
    run = run_of(
        Stage(from_step=0, domains=(StageDomain(domain="a", share=1.0),)),
        Stage(
            from_step=4,
            domains=(StageDomain(domain="a", share=0.25), StageDomain(domain="b", share=0.75)),
        ),
    )
    first = StageState(index=0, count=2, from_step=0, shares=(DomainShare(domain="a", share=1.0),))
    assert stage_of(run, step=0) == stage_of(run, step=3) == first
    second = stage_of(run, step=4)
    assert second == stage_of(run, step=8)
    assert second is not None
    assert (second.index, second.from_step) == (1, 4)
    assert [(own.domain, own.share) for own in second.shares] == [("a", 0.25), ("b", 0.75)]


def test_a_run_without_stages_has_none():
    assert stage_of(run_of(), step=3) is None
