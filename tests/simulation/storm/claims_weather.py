"""What is around the agents of a schedule: the run, its faults, and the number of processes."""

import random
from dataclasses import dataclass

from msgspec.structs import replace

from forgemq_contracts.run import (
    Episodes,
    LogLayout,
    Model,
    Queue,
    RunConfiguration,
    Trainer,
)
from forgemq_contracts.run_rules import check
from tests.simulation.storm.faults import Faults, NumberedFaults, SeededFaults
from tests.simulation.storm.schedule import RUN
from tests.simulation.storm.weather import transform_environ

LEASE_S = 4.0
GROUP_DEADLINE_S = 20.0
CLAIM_DEADLINE_S = 25.0
"""Longer than the latest agent of a group needs, with the longest pause of a gateway."""


def drawn_configuration(rng: random.Random) -> RunConfiguration:
    """A run of a few steps with one queue."""
    groups = rng.randint(1, 2)
    configuration = RunConfiguration(
        run=RUN,
        seed=0,
        model=Model(path="model"),
        queues=(
            Queue(
                domain="d",
                task_source="",
                agent="",
                group_size=rng.randint(2, 3),
                slots=groups + 1,
                groups_per_step=groups,
                window=2,
                group_deadline_s=GROUP_DEADLINE_S,
                claim_deadline_s=CLAIM_DEADLINE_S,
            ),
        ),
        trainer=Trainer(steps=2),
        episodes=Episodes(lease_s=LEASE_S, attempts_max=rng.randint(2, 3)),
        log=LogLayout(group_partitions=rng.randint(1, 4), lanes=2),
    )
    rewards = replace(configuration.rewards, truncated=rng.choice(("grade", "zero", "mask")))
    configuration = replace(configuration, rewards=rewards)
    check(configuration)
    return configuration


@dataclass(frozen=True, kw_only=True)
class ClaimsWeather:
    """What is around the agents of one schedule.

    Attributes:
        marker_delay_s: Longest delay of a transaction's marker; 0: there is none.
        gateway_faults: Of all gateways.
        transform_faults: Of the scheduler and the reward core.
        engine_faults: Of all lanes.
        processes: Of the scheduler and of the reward core.
        gateways_s: When further gateways take the run over.
        has_trimming: Whether the run is trimmed, and positions may be forgotten, beside it.
    """

    configuration: RunConfiguration
    marker_delay_s: float
    environ: dict[str, str]
    gateway_faults: Faults
    transform_faults: Faults
    engine_faults: Faults
    processes: tuple[int, int]
    gateways_s: tuple[float, ...]
    has_trimming: bool


def drawn_weather(rng: random.Random) -> ClaimsWeather:
    """Draw a weather; in some, several gateways stand still while they write."""
    has_pauses = rng.random() < 0.3
    gateways, latest_s = (3, 10.0) if has_pauses else (rng.choice((0, 1, 3)), 60.0)
    return ClaimsWeather(
        configuration=drawn_configuration(rng),
        marker_delay_s=rng.choice((0.0, 0.0, 0.02, 0.5)),
        environ=transform_environ(
            snapshot_every_batches=rng.choice((1, 5, 50)), batch_linger_s=rng.choice((0.0, 0.05))
        ),
        gateway_faults=drawn_pauses(rng) if has_pauses else drawn_faults(rng),
        transform_faults=drawn_faults(rng),
        engine_faults=NumberedFaults(),
        processes=(rng.choice((1, 2)), rng.choice((1, 2))),
        gateways_s=tuple(rng.uniform(1.0, latest_s) for _ in range(gateways)),
        has_trimming=True,
    )


def drawn_pauses(rng: random.Random) -> Faults:
    """Gateways stand still with a promise on its way, until others have taken over from them."""
    return SeededFaults(
        rng,
        probability=0.3,
        faults_max=6,
        kinds=("pause",),
        points=("promise", "written"),
        pause_s=(4.0, 6.0),
    )


def drawn_faults(rng: random.Random) -> Faults:
    """Draw how many faults there are, and how soon."""
    return SeededFaults(
        rng, probability=rng.choice((0.002, 0.01, 0.05)), faults_max=rng.choice((0, 2, 6, 12))
    )
