"""Steps of a run with stages: what each has, whom it lets begin, and how stale its tokens get."""

import msgspec
import pytest

from forgemq_contracts.groups import RequestedGroup
from forgemq_contracts.mixture import mixture_of
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_contracts.run_rules import check
from forgemq_contracts.stages import Stage, StageDomain
from tests.unit.scheduler.scene import Scene, configuration_of, queue_of

Shares = tuple[int, float, float]
"""First step, share of `a`, share of `b`."""

QUEUES = (
    queue_of(slots=8, per_step=2, window=4, domain="a"),
    queue_of(slots=8, per_step=2, window=4, domain="b"),
)


def run_of(*stages: Shares, steps: int, queues: tuple[Queue, ...] = QUEUES) -> RunConfiguration:
    configuration = msgspec.structs.replace(
        configuration_of(*queues, steps=steps),
        stages=tuple(
            Stage(
                from_step=step,
                domains=(
                    StageDomain(domain="a", share=of_a),
                    StageDomain(domain="b", share=of_b),
                ),
            )
            for step, of_a, of_b in stages
        ),
    )
    check(configuration)
    return configuration


class Played:
    """A run whose groups finish at once, but for one straggler that finishes as late as it can."""

    def __init__(self, configuration: RunConfiguration, *, straggler: int | None = None) -> None:
        self.scene = Scene(configuration)
        self.steps = configuration.trainer.steps
        self.straggler = straggler
        self.trained = 0
        self.merged: set[int] = set()
        self.scene.report(version=0)
        for number in range(10 * self.steps):
            self.scene.request(number, domain="ab"[number % 2])
        while len(self.scene.steps) < self.steps and self.advance():
            pass

    def state(self) -> tuple[int, ...]:
        return len(self.scene.admitted), len(self.scene.steps), self.trained, len(self.merged)

    def advance(self) -> bool:
        before = self.state()
        fresh = set(self.scene.admitted_ids()) - self.merged - {self.straggler}
        for number in sorted(fresh):
            self.merge(number)
        while self.trained < len(self.scene.steps):
            self.scene.train(self.trained)
            self.trained += 1
            self.scene.load(version=self.trained)
        if before == self.state() and self.straggler in self.scene.admitted_ids():
            if self.straggler in self.merged:
                return False
            self.merge(self.straggler)
        return before != self.state()

    def merge(self, number: int) -> None:
        version = {int(g.group_id[2:]): g.version_at_admission for g in self.scene.admitted}
        self.scene.merge(number, version=version[number], domain="ab"[number % 2])
        self.merged.add(number)

    def staleness(self, domain: str) -> int:
        groups = (group for step in self.scene.steps for group in step.groups)
        return max(group.staleness for group in groups if group.domain == domain)


@pytest.mark.parametrize(
    "stages",
    [
        ((0, 0.75, 0.25),),
        ((0, 0.9, 0.1), (4, 0.2, 0.8)),
        ((0, 0.2, 0.8), (3, 1.0, 0.0), (5, 0.375, 0.625)),
    ],
)
@pytest.mark.slow
def test_the_staleness_bound_is_reached_and_never_passed_with_stages(stages):
    """The straggler is each group of a run in turn; none of them retires as stale."""
    configuration = run_of(*stages, steps=24)
    mixture = mixture_of(configuration)
    seen = {"a": 0, "b": 0}
    for straggler in range(60):
        played = Played(configuration, straggler=straggler)
        assert "stale" not in played.scene.ends().values()
        for domain in seen:
            seen[domain] = max(seen[domain], played.staleness(domain))
    assert seen == {"a": mixture.staleness_bound(0), "b": mixture.staleness_bound(1)}


def test_each_step_has_the_groups_of_its_stage_and_names_it():
    played = Played(run_of((0, 0.75, 0.25), (3, 0.5, 0.5), (5, 0.125, 0.875), steps=9))
    domains = [[group.domain for group in step.groups] for step in played.scene.steps]
    assert ["".join(sorted(each)) for each in domains] == [
        *("aaab",) * 3,
        *("aabb",) * 2,
        *("abbb", "bbbb") * 2,
    ]
    assert [step.stage for step in played.scene.steps] == [0, 0, 0, 1, 1, 2, 2, 2, 2]


def test_a_domain_that_a_stage_leaves_out_begins_no_group_that_nobody_will_take():
    """`b` trains in the steps 0 to 2, 2 groups each, and again from step 6 on."""
    played = Played(run_of((0, 0.5, 0.5), (3, 1.0, 0.0), (6, 0.5, 0.5), steps=8))
    of_b = [group for group in played.scene.admitted if group.domain == "b"]
    assert [group.version_at_admission for group in of_b[:6]] == [0] * 6
    assert {group.version_at_admission for group in of_b[6:]} == {6, 7}
    taken = [g.group_id for step in played.scene.steps for g in step.groups if g.domain == "b"]
    assert taken[:6] == [group.group_id for group in of_b[:6]]


def test_a_group_that_trains_nothing_is_replaced_before_its_domain_is_left_out():
    configuration = run_of((0, 0.5, 0.5), (1, 1.0, 0.0), steps=4)
    scene = Scene(configuration)
    scene.report(version=0)
    scene.request(1, 3, 5, 7, domain="b")
    assert scene.admitted_ids() == [1, 3]
    scene.merge(1, not_trainable="zero_variance", domain="b")
    assert scene.admitted_ids() == [1, 3, 5]
    scene.request(0, 2, domain="a")
    scene.merge(0, 2, domain="a")
    scene.merge(3, 5, domain="b")
    assert [sorted(scene.taken(0)), scene.admitted_ids()] == [[0, 2, 3, 5], [1, 3, 5, 0, 2]]


def test_the_stage_of_a_request_is_that_of_its_group():
    scene = Scene(run_of((0, 0.5, 0.5), (4, 0.25, 0.75), steps=8))
    scene.report(version=0)
    scene.feed(
        RequestedGroup(
            group_id="g-1",
            domain="a",
            purpose="train",
            group_size=4,
            task=b"{}",
            idempotency_key="a/1",
            requested_ms=0,
            stage=1,
        )
    )
    assert [group.stage for group in scene.admitted] == [1]
