"""The ways in which the load test of domains trains them compare."""

import itertools

import msgspec
from domains import DOMAINS, HELD_OUT, STEPS, settings_of, successes

from forgemq_contracts.mixture import mixture_of, staleness_bounds
from forgemq_contracts.run_changes import changes
from tests.unit.episode_files.played import rows
from tests.unit.four_domains.test_four_domains import DOMAINS as OF_THE_RUN
from tests.unit.four_domains.test_four_domains import run_of


def test_one_domain_after_another_trains_as_many_groups_and_no_staler_ones():
    mixed, alone = (run_of(*settings_of(case)) for case in ("mixed", "one_after_another"))
    totals = [
        [mixture_of(run).taken(number, STEPS) for number in range(len(DOMAINS))]
        for run in (mixed, alone)
    ]
    assert totals == [[64] * 4] * 2
    assert {mixture_of(alone).groups(step) for step in range(8)} == {(8, 0, 0, 0)}
    assert mixture_of(alone).groups(31) == (0, 0, 0, 8)
    assert staleness_bounds(mixed) == staleness_bounds(alone)
    assert DOMAINS == OF_THE_RUN


def test_the_control_of_mixing_only_shuffles_returns():
    mixed, control = (run_of(*settings_of(case)) for case in ("mixed", "shuffled"))
    assert [str(change) for change in changes(mixed, control)] == [
        "rewards.shuffle_returns: False -> True"
    ]


def test_a_round_that_a_stop_cut_off_is_in_no_curve():
    """The second round has all tasks but one domain's last ten."""
    episode = rows()[0]
    played = [
        msgspec.structs.replace(
            episode,
            purpose="eval",
            round_name=name,
            domain=domain,
            outcome=1.0 if number < HELD_OUT / 2 else 0.0,
        )
        for name, domain in itertools.product(("start-sampled", "step-8"), DOMAINS)
        for number in range(HELD_OUT)
        if (name, domain) != ("step-8", "bookings") or number < HELD_OUT - 10
    ]
    assert successes(played) == {"start-sampled": dict.fromkeys(DOMAINS, 0.5)}
