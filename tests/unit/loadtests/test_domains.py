"""The two ways in which the load test of domains trains them compare."""

from domains import CASES, DOMAINS, STEPS, settings_of

from forgemq_contracts.mixture import mixture_of, staleness_bounds
from tests.unit.four_domains.test_four_domains import DOMAINS as OF_THE_RUN
from tests.unit.four_domains.test_four_domains import run_of


def test_one_domain_after_another_trains_as_many_groups_and_no_staler_ones():
    mixed, alone = (run_of(*settings_of(case)) for case in CASES)
    totals = [
        [mixture_of(run).taken(number, STEPS) for number in range(len(DOMAINS))]
        for run in (mixed, alone)
    ]
    assert totals == [[64] * 4] * 2
    assert {mixture_of(alone).groups(step) for step in range(8)} == {(8, 0, 0, 0)}
    assert mixture_of(alone).groups(31) == (0, 0, 0, 8)
    assert staleness_bounds(mixed) == staleness_bounds(alone)
    assert DOMAINS == OF_THE_RUN
