"""Stages divide the groups of each step, exactly over time; wrong ones are refused by name."""

from fractions import Fraction
from itertools import accumulate, islice
from math import ceil, floor

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgemq_contracts.domain_settings import DomainSampling
from forgemq_contracts.domains import context_tokens_max_of, sampling_of
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.even_rows import even_rows
from forgemq_contracts.mixture import Mixture, staleness_limits
from forgemq_contracts.run import Episodes, Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.run_changes import check_changes
from forgemq_contracts.run_rules import check
from forgemq_contracts.stages import Stage, StageDomain


def stage_of(from_step: int = 0, **shares: float) -> Stage:
    """A stage with these shares."""
    domains = (StageDomain(domain=domain, share=share) for domain, share in shares.items())
    return Stage(from_step=from_step, domains=tuple(domains))


def run_of(*stages: Stage, **queue: object) -> RunConfiguration:
    """A run of `a` and `b` with 4 and 2 groups a step; the fields are those of `a`."""
    functions = {"task_source": "m:f", "agent": "m:g", "slots": 12, "window": 4}
    queues = (
        Queue(domain="a", **{**functions, "groups_per_step": 4, **queue}),
        Queue(domain="b", **functions, groups_per_step=2),
    )
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m", context_tokens_max=1000),
        queues=queues,
        trainer=Trainer(steps=20),
        episodes=Episodes(sampling=Sampling(max_tokens=100)),
        stages=stages,
    )


def mixture(*stages: Stage) -> Mixture:
    return Mixture(run_of().queues, stages)


@st.composite
def shares(draw: st.DrawFn) -> tuple[list[Fraction], int]:
    """Thousandths that sum to 1, and the groups of a step."""
    count = draw(st.integers(1, 6))
    cuts = sorted(draw(st.lists(st.integers(0, 1000), min_size=count - 1, max_size=count - 1)))
    parts = [after - before for before, after in zip([0, *cuts], [*cuts, 1000], strict=True)]
    return [Fraction(part, 1000) for part in parts], draw(st.integers(1, 40))


@given(shares())
@settings(deadline=None, max_examples=60)
@pytest.mark.slow
def test_every_step_is_full_and_no_domain_is_ever_a_group_off_its_share(drawn):
    parts, groups = drawn
    rates = [part * groups for part in parts]
    sums = [0] * len(rates)
    for steps, row in enumerate(islice(even_rows(rates), 250), start=1):
        assert sum(row) == groups
        sums = [before + number for before, number in zip(sums, row, strict=True)]
        for number, rate, total in zip(row, rates, sums, strict=True):
            assert floor(rate) <= number <= ceil(rate)
            assert abs(total - steps * rate) < 1


def test_shares_of_a_stage_divide_the_groups_of_all_queues():
    mixed = mixture(stage_of(a=0.75, b=0.25), stage_of(4, a=0.25, b=0.75))
    assert [mixed.groups(step) for step in range(8)] == [
        (5, 1),
        (4, 2),
        (5, 1),
        (4, 2),
        (2, 4),
        (1, 5),
        (2, 4),
        (1, 5),
    ]
    assert [mixed.taken(0, step) for step in (0, 2, 4, 5, 8)] == [0, 9, 18, 20, 24]
    assert (mixed.groups_max(0), mixed.groups_max(1)) == (5, 5)
    assert [mixed.stage(step) for step in (0, 3, 4, 1000)] == [0, 0, 1, 1]


def test_without_stages_every_step_has_the_groups_of_each_queue():
    plain = mixture()
    assert plain.groups(0) == plain.groups(7_000_000) == (4, 2)
    assert plain.stage(3) is None
    assert plain.presence_end(0, 3) is None
    assert plain.stage_of_group(0, 100) is None


def test_every_step_has_each_domain_whose_share_is_a_whole_group():
    mixed = mixture(stage_of(a=0.8, b=0.2))
    assert all(min(mixed.groups(step)) >= 1 for step in range(1000))
    assert mixed.taken(1, 1000) == 1200


def test_a_group_belongs_to_the_stage_whose_steps_take_it():
    """`b` trains from step 4 to 7, with 3 groups a step, and again from step 10 on."""
    mixed = mixture(
        stage_of(a=1.0), stage_of(4, a=0.5, b=0.5), stage_of(8, a=1.0), stage_of(10, b=1.0)
    )
    assert [mixed.stage_of_group(1, number) for number in (0, 11, 12, 10_000)] == [1, 1, 3, 3]
    assert [mixed.stage_of_group(0, number) for number in (23, 24, 35, 36)] == [0, 1, 1, 2]
    assert mixed.stage_of_group(0, 48) == 3  # asked for too late: no step takes it
    assert [mixed.presence_end(1, step) for step in (0, 4, 7, 8, 9, 10)] == [0, 8, 8, 8, 9, None]


def slowest(mixed: Mixture, *, queue: int, reach: int, steps: int) -> int:
    """The bound by its definition, for versions below `steps`."""
    groups = [mixed.groups(step)[queue] for step in range(2 * steps)]
    taken = [0, *accumulate(groups)]
    lags = [0]
    for version in range(steps):
        end = mixed.presence_end(queue, version)
        lags += [
            step - version
            for step in range(version, min(2 * steps, end if end is not None else 2 * steps))
            if groups[step] and taken[step] - taken[version] <= reach
        ]
    return max(lags)


@pytest.mark.parametrize(
    "stages",
    [
        (stage_of(a=0.75, b=0.25),),
        (stage_of(a=0.97, b=0.03),),
        (stage_of(a=0.9, b=0.1), stage_of(5, a=0.1, b=0.9)),
        (stage_of(a=0.5, b=0.5), stage_of(7, a=1.0), stage_of(30, a=0.2, b=0.8)),
        (stage_of(b=1.0), stage_of(3, a=0.35, b=0.65), stage_of(40, a=0.05, b=0.95)),
    ],
)
@pytest.mark.slow
def test_the_bound_is_the_largest_lag_that_slots_and_window_allow(stages):
    """N + W - 2 is 14 for both queues; a domain that was left out begins again."""
    mixed = mixture(*stages)
    for queue in (0, 1):
        assert mixed.staleness_bound(queue) == slowest(mixed, queue=queue, reach=14, steps=1200)


def test_a_limit_below_the_bound_is_the_domains():
    run = run_of(stage_of(a=0.75, b=0.25), staleness_max=1)
    assert staleness_limits(run) == {"a": 1, "b": 9}


def test_a_stage_sets_limit_and_sampling_of_its_domain_and_the_queue_the_rest():
    own = StageDomain(
        domain="a",
        share=1.0,
        context_tokens_max=200,
        sampling=DomainSampling(temperature=0.5),
    )
    run = run_of(
        Stage(from_step=0, domains=(own, StageDomain(domain="b", share=0.0))),
        stage_of(3, a=0.5, b=0.5),
        context_tokens_max=500,
        sampling=DomainSampling(max_tokens=40),
    )
    check(run)
    assert context_tokens_max_of(run, domain="a", stage=0) == 200
    assert [context_tokens_max_of(run, domain="a", stage=n) for n in (1, None)] == [500, 500]
    assert sampling_of(run, domain="a", stage=0) == Sampling(temperature=0.5, max_tokens=40)
    assert sampling_of(run, domain="a", stage=1) == Sampling(max_tokens=40)
    assert sampling_of(run, domain="b", stage=0) == Sampling(max_tokens=100)


def with_(**fields: object) -> Stage:
    """A stage that sets these fields of `a`."""
    a = StageDomain(domain="a", share=0.5)
    other = StageDomain(domain="b", share=0.5)
    return Stage(from_step=0, domains=(msgspec.structs.replace(a, **fields), other))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((stage_of(1, a=1.0),), r"^stages\.0\.from_step must be 0: .* got 1$"),
        (
            (stage_of(a=1.0), stage_of(3, b=1.0), stage_of(3, a=1.0)),
            r"^stages\.2\.from_step must be above .* got 3 after 3$",
        ),
        ((stage_of(a=0.5, c=0.5),), r"^stages\.0\.domains\.c must be the domain of a queue: a, b$"),
        ((with_(domain="b"),), r"^stages\.0\.domains\.b must be there once$"),
        (
            (stage_of(a=0.6, b=0.5),),
            r"^stages\.0\.domains: the shares must sum to 1, got 0\.6 \+ 0\.5",
        ),
        (
            (stage_of(a=0.33333, b=0.66667),),
            r"^stages\.0\.domains\.a\.share must be in whole thousandths, got 0\.33333$",
        ),
        ((stage_of(a=1.0),), r"^stages: one must have a share of b above 0"),
        (
            (with_(context_tokens_max=1001),),
            r"^stages\.0\.domains\.a\.context_tokens_max must be at most model\.context_tokens_max",
        ),
        (
            (with_(context_tokens_max=100),),
            r"^stages\.0\.domains\.a\.context_tokens_max must be above the max_tokens",
        ),
    ],
)
def test_wrong_stages_are_refused_by_name(stages, message):
    with pytest.raises(ValueError, match=message):
        check(run_of(*stages))


def test_a_step_may_not_have_more_groups_of_a_queue_than_its_slots():
    with pytest.raises(ValueError, match=r"^queues\.a\.slots \(N\) must be at least 5: .* N=4$"):
        check(run_of(stage_of(a=0.75, b=0.25), slots=4))


def test_difficulty_is_for_task_sources():
    from_file = {"task_source": "", "task_file": "tasks.jsonl"}
    with pytest.raises(ValueError, match=r"^stages\.0\.domains\.a\.difficulty must be left out"):
        check(run_of(with_(difficulty=0.5), **from_file))


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_outside_0_to_1_does_not_decode(share):
    with pytest.raises(msgspec.ValidationError, match=r"share"):
        msgspec.convert({"domain": "a", "share": share}, StageDomain)


def test_stages_stay_as_they_are_when_a_run_is_resumed():
    was = run_of(stage_of(a=0.75, b=0.25))
    now = run_of(stage_of(a=0.5, b=0.5))
    with pytest.raises(
        ValueError, match=r"^stages\.0\.domains\.a\.share was .* the scheduler's journal"
    ):
        check_changes(was, now)
