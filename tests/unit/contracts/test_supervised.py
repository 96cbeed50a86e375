"""What a run with a supervised domain is refused for, and what it takes."""

from contextlib import nullcontext

import msgspec
import pytest

from forgemq_contracts.curriculum import Curriculum
from forgemq_contracts.distillation import Distillation
from forgemq_contracts.domain_settings import DomainSampling
from forgemq_contracts.lane_engines import LaneEngines, RoleEngines
from forgemq_contracts.loss import Loss
from forgemq_contracts.queues import played_queues, supervised_fractions, supplied_queues
from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.run_changes import check_changes
from forgemq_contracts.run_rules import check
from forgemq_contracts.stages import Stage, StageDomain
from forgemq_contracts.supervised import Supervised

DESK = Queue(domain="desk", task_source="m:f", agent="m:g")
TALKS = Queue(
    domain="talks",
    task_source="",
    agent="",
    group_size=1,
    groups_per_step=4,
    supervised=Supervised(fraction=0.25),
)
SOUND = RunConfiguration(
    run="r",
    seed=0,
    model=Model(path="m"),
    queues=(DESK, TALKS),
    trainer=Trainer(steps=1),
)


def with_talks(**changes: object) -> RunConfiguration:
    return msgspec.structs.replace(SOUND, queues=(DESK, msgspec.structs.replace(TALKS, **changes)))


def test_a_supervised_domain_is_supplied_by_its_file_and_plays_no_evaluation():
    check(SOUND)
    assert supervised_fractions(SOUND) == {"talks": 0.25}
    assert supplied_queues(SOUND) == played_queues(SOUND) == (DESK,)
    filed = with_talks(task_file="talks.jsonl")
    check(filed)
    assert [queue.domain for queue in supplied_queues(filed)] == ["desk", "talks"]
    assert played_queues(filed) == (DESK,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 2}, r"^queues\.talks\.group_size must be 1 .*, got 2"),
        ({"agent": "m:g"}, r"^queues\.talks\.agent must be left out in a supervised domain"),
        ({"task_source": "m:f"}, r"^queues\.talks\.task_source must be left out"),
        ({"outcome": "m:o"}, r"^queues\.talks\.outcome must be left out"),
        ({"held_out_file": "h.jsonl"}, r"^queues\.talks\.held_out_file must be left out"),
        (
            {"curriculum": Curriculum(sampler="oldest")},
            r"^queues\.talks\.curriculum must be left out",
        ),
        (
            {"sampling": DomainSampling(temperature=0.5, max_tokens=64)},
            r"^queues\.talks\.sampling must be left out",
        ),
        ({"supervised": Supervised(fraction=1.0)}, r"fraction: all .* must be below 1, .*got 1$"),
    ],
)
def test_a_supervised_domain_that_is_sampled_compared_or_alone_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check(with_talks(**changes))


def test_a_stage_that_samples_a_supervised_domain_is_refused():
    sampling = DomainSampling(temperature=0.5, max_tokens=64)
    for domain, message in [("desk", ""), ("talks", r"^stages\.0\.domains\.talks\.sampling must")]:
        domains = tuple(
            StageDomain(domain=each, share=0.5, sampling=sampling if each == domain else None)
            for each in ("desk", "talks")
        )
        staged = msgspec.structs.replace(SOUND, stages=(Stage(from_step=0, domains=domains),))
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            check(staged)


def test_supervised_domains_alone_may_have_all_of_the_loss_and_not_more():
    notes = msgspec.structs.replace(TALKS, domain="notes", supervised=Supervised(fraction=0.75))
    check(msgspec.structs.replace(SOUND, queues=(TALKS, notes)))
    more = msgspec.structs.replace(notes, supervised=Supervised(fraction=0.8))
    with pytest.raises(ValueError, match=r"must be at most 1, got 1\.05"):
        check(msgspec.structs.replace(SOUND, queues=(TALKS, more)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "ppo_clip"), ("ratio_cap", 2.0), ("reference_weight", 0.1)],
)
def test_a_loss_of_sampled_tokens_is_refused_by_name_if_none_are_sampled(field, value):
    loss = Loss(**{field: value})
    check(msgspec.structs.replace(SOUND, loss=loss))
    alone = msgspec.structs.replace(SOUND, queues=(TALKS,))
    check(msgspec.structs.replace(alone, loss=Loss(group_tokens=8)))
    with pytest.raises(ValueError, match=rf"^loss\.{field} must be left out if all domains are "):
        check(msgspec.structs.replace(alone, loss=loss))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("distillation", Distillation(url="http://t:1")),
        ("lanes", (LaneEngines(prefill=RoleEngines(), decode=RoleEngines()),)),
    ],
)
def test_what_nobody_tried_beside_a_supervised_domain_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"^{field} must .* if a domain is supervised"):
        check(msgspec.structs.replace(SOUND, **{field: value}))


def test_a_resume_may_change_the_fraction_and_not_whether_a_domain_is_supervised():
    check_changes(SOUND, with_talks(supervised=Supervised(fraction=0.5)))
    with pytest.raises(ValueError, match=r"^queues\.talks\.supervised was .* asked for with it"):
        check_changes(SOUND, with_talks(supervised=None))
