"""One small run whose gateways and engines can be ended at each of their points in turn.

Nothing else goes wrong in it: the points before the fault are the same in every schedule.
"""

import random
from typing import Literal

from msgspec.structs import replace

from forgemq_contracts.run import Episodes, LogLayout, Model, Queue, RunConfiguration, Trainer
from tests.simulation.storm.claims import ClaimsSchedule, Played
from tests.simulation.storm.claims_weather import (
    CLAIM_DEADLINE_S,
    GROUP_DEADLINE_S,
    LEASE_S,
    ClaimsWeather,
)
from tests.simulation.storm.faults import NumberedFaults
from tests.simulation.storm.loop import run_virtual
from tests.simulation.storm.schedule import RUN
from tests.simulation.storm.weather import transform_environ

Place = Literal["gateway", "takeover", "engine"]
PLACES: tuple[Place, ...] = ("gateway", "takeover", "engine")
"""Where the points are: one gateway, one and its successor, or the engines."""

CONFIGURATION = RunConfiguration(
    run=RUN,
    seed=0,
    model=Model(path="model"),
    queues=(
        Queue(
            domain="d",
            task_source="",
            agent="",
            group_size=2,
            slots=1,
            groups_per_step=1,
            window=1,
            group_deadline_s=GROUP_DEADLINE_S,
            claim_deadline_s=CLAIM_DEADLINE_S,
        ),
    ),
    trainer=Trainer(steps=1),
    episodes=Episodes(lease_s=LEASE_S, attempts_max=2),
    log=LogLayout(group_partitions=1, lanes=1),
)

TAKEOVER_S = 3.0
"""The first gateway has attempts, turns and finished episodes by then."""

SHARED = LogLayout(group_partitions=3, lanes=1)
"""Of three partitions a second gateway takes the last one, in which the run's only group is."""


def run_claims_numbered(place: Place, faults: NumberedFaults) -> Played:
    """Play the run with faults at numbered points of one place."""
    none = NumberedFaults()
    weather = ClaimsWeather(
        configuration=(
            replace(CONFIGURATION, log=SHARED) if place == "takeover" else CONFIGURATION
        ),
        marker_delay_s=0.0,
        environ=transform_environ(snapshot_every_batches=5, batch_linger_s=0.0),
        gateway_faults=none if place == "engine" else faults,
        transform_faults=none,
        engine_faults=faults if place == "engine" else none,
        processes=(1, 1),
        gateways_s=(TAKEOVER_S,) if place == "takeover" else (),
        has_trimming=False,
    )
    return run_virtual(ClaimsSchedule(weather, random.Random("claims points 5")).run())
