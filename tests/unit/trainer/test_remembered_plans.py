"""A plan is made once for the trees of a step, however often it is asked for."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from forgemq_trainer.core.remembered_plans import PLANS_MAX, RememberedPlans, tree_form
from forgemq_trainer.core.traffic import GatheredValues, RankGrid, UpdatePlan, plan_update
from forgemq_trainer.core.tree import Forest, read_tree
from tests.unit.trainer.scene import SHAPE, agent_samples, line_of, make_sample, merge, routed


class Planner:
    """Plans for two ranks, and counts how often."""

    def __init__(self, *, budget_bytes: int = 10**9) -> None:
        self.budget_bytes = budget_bytes
        self.count = 0

    def plan(self, forests: Sequence[Forest]) -> UpdatePlan:
        """The plan of an update."""
        self.count += 1
        return plan_update(
            forests,
            shape=SHAPE,
            values=GatheredValues(layers=6000, root=300, head=200, trained=6500),
            grid=RankGrid(shards=2, replicas=1),
            budget_bytes=self.budget_bytes,
            head_chunk=8,
        )


def _bush(seed: int) -> Forest:
    samples = agent_samples(np.random.default_rng(seed), rollouts=3)
    return read_tree(routed(merge(samples), layers=2, top_k=2, experts=4))


def test_trees_with_other_values_have_the_plan_of_the_same_trees() -> None:
    planner = Planner()
    plans, forests = RememberedPlans(planner.plan), [_bush(1), line_of(30), _bush(2)]
    first = plans.of(forests)
    others = [
        replace(
            forest,
            tokens_N=forest.tokens_N + 1,
            entry_start_E=np.zeros(forest.entry_count),
            entry_route_ER=np.zeros((forest.entry_count, 0), dtype=np.int16),
        )
        for forest in forests
    ]
    assert plans.of(others) is first
    assert planner.count == 1
    assert first == planner.plan(others)


def test_a_plan_is_of_these_trees_in_this_order() -> None:
    planner = Planner()
    plans, forests = RememberedPlans(planner.plan), [_bush(1), line_of(30)]
    for asked in (forests, forests[::-1], forests[:1], [_bush(2), line_of(30)]):
        assert plans.of(asked) == planner.plan(asked)
    assert planner.count == 8


def test_a_tree_has_another_form_with_other_branches_entries_or_temperatures() -> None:
    generator = np.random.default_rng(0)

    def line(first_sampled: int, temperature: float) -> Forest:
        sample = make_sample(range(1, first_sampled), range(first_sampled, 9), generator)
        return read_tree(merge([replace(sample, temperature=temperature)]))

    def fork(tokens: int) -> Forest:
        stem = list(range(1, tokens))
        samples = [make_sample([*stem, end], [7], generator) for end in (8, 9)]
        return read_tree(merge(samples))

    forests = [line(4, 1.0), line(5, 1.0), line(4, 0.5), fork(3), fork(4), line_of(8), line_of(9)]
    assert len({tree_form(forest) for forest in forests}) == len(forests)
    assert tree_form(line(4, 1.0)) == tree_form(forests[0])


def test_a_refusal_is_raised_each_time() -> None:
    plans = RememberedPlans(Planner(budget_bytes=1000).plan)
    for _ in range(2):
        with pytest.raises(ValueError, match="needs at most"):
            plans.of([line_of(30)])


@pytest.mark.slow
def test_the_oldest_plan_is_forgotten_first() -> None:
    planner = Planner()
    plans = RememberedPlans(planner.plan)
    for length in range(10, 11 + PLANS_MAX):
        plans.of([line_of(length)])
    assert planner.count == PLANS_MAX + 1
    plans.of([line_of(11)])
    assert planner.count == PLANS_MAX + 1
    plans.of([line_of(10)])
    assert planner.count == PLANS_MAX + 2
