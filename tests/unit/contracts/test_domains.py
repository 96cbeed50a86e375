"""What a queue sets for its domain replaces what the run says, field by field."""

import msgspec
import pytest

from forgemq_contracts.domain_settings import DomainRewards, DomainSampling
from forgemq_contracts.domains import context_tokens_max_of, rewards_of, sampling_of
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.run import Episodes, Model, Queue, Rewards, RunConfiguration, Trainer
from forgemq_contracts.run_rules import check


def run_of(**queue: object) -> RunConfiguration:
    """A run of two domains; the fields are those of `own`."""
    functions = {"task_source": "m:f", "agent": "m:g"}
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m", context_tokens_max=1000),
        queues=(Queue(domain="own", **functions, **queue), Queue(domain="other", **functions)),
        trainer=Trainer(steps=1),
        rewards=Rewards(alpha=0.5, beta=0.25, discount=0.9),
        episodes=Episodes(sampling=Sampling(temperature=0.8, max_tokens=100, stop=("END",))),
    )


def test_what_a_queue_names_is_its_domains_and_the_rest_is_the_runs():
    run = run_of(
        rewards=DomainRewards(alpha=0.0, truncated="mask"),
        sampling=DomainSampling(max_tokens=40, stop=()),
        context_tokens_max=300,
    )
    check(run)
    assert rewards_of(run, domain="own") == Rewards(
        alpha=0.0, beta=0.25, discount=0.9, truncated="mask"
    )
    assert sampling_of(run, domain="own") == Sampling(temperature=0.8, max_tokens=40)
    assert context_tokens_max_of(run, domain="own") == 300
    for domain in ("other", "unknown"):
        assert rewards_of(run, domain=domain) is run.rewards
        assert sampling_of(run, domain=domain) is run.episodes.sampling
        assert context_tokens_max_of(run, domain=domain) == 1000


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        (
            {"context_tokens_max": 1001},
            r"^queues\.own\.context_tokens_max must be at most model\.context_tokens_max, got 1001",
        ),
        (
            {"context_tokens_max": 100},
            r"^queues\.own\.context_tokens_max must be above the max_tokens .* got 100 and 100$",
        ),
        (
            {"sampling": DomainSampling(max_tokens=1000)},
            r"^queues\.own\.context_tokens_max must be above the max_tokens .* got 1000 and 1000$",
        ),
    ],
)
def test_a_limit_that_the_run_cannot_give_is_refused_by_name(queue, message):
    with pytest.raises(ValueError, match=message):
        check(run_of(**queue))


@pytest.mark.parametrize(
    "table", [{"temperature": 0.0}, {"top_p": 0.9}, {"max_tokens": 0}, {"top_k": 5}]
)
def test_a_domain_cannot_sample_what_does_not_train(table):
    """Truncated support is context and no loss (G4), so a queue has no field for it."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, DomainSampling)


@pytest.mark.parametrize("table", [{"discount": 0.0}, {"discount": 1.5}, {"shuffle_returns": True}])
def test_a_wrong_reward_field_of_a_domain_does_not_decode(table):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, DomainRewards)


@pytest.mark.parametrize("stops", [("END", ""), tuple(map(str, range(33)))])
def test_stop_strings_that_no_engine_can_use_are_refused_by_queue(stops):
    with pytest.raises(ValueError, match=r"^queues\.own: sampling\.stop must have at most 32 "):
        check(run_of(sampling=DomainSampling(stop=stops)))
    check(run_of(sampling=DomainSampling(stop=tuple(map(str, range(32))))))
