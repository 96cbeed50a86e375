"""What is around a service in one schedule: sizes, settings, delays, trimming and expiry."""

import random
from dataclasses import dataclass, field

from tests.simulation.storm.cases import StormCase


@dataclass(frozen=True, kw_only=True)
class Weather:
    """Everything about a schedule that is not the service's.

    Attributes:
        processes: Of the service, at the same time.
        partitions: Group partitions of the run.
        records: Of the script, for each partition.
        bursts: Numbers of records that are written at once.
        pauses_s: Between two bursts.
        marker_delay_s: Longest delay of a transaction's marker; 0: there is none.
        has_trimming: Whether the run is trimmed beside it.
        has_expiry: Whether the broker forgets committed positions beside it.
        environ: Settings of the service.
    """

    processes: int = 1
    partitions: int = 1
    records: int = 1000
    bursts: tuple[int, ...] = (1, 2, 5, 20)
    pauses_s: tuple[float, ...] = (0.0,)
    marker_delay_s: float = 0.0
    has_trimming: bool = False
    has_expiry: bool = False
    environ: dict[str, str] = field(default_factory=dict)


def drawn_weather(rng: random.Random, case: StormCase) -> Weather:
    """Draw a weather; about half of the schedules have ticks, delays or expiry, most trimming.

    Two snapshots are kept, so trimming begins with the third one: most schedules write it.
    """
    tick_s = rng.choice((0.0, 0.3))
    environ = transform_environ(
        batch_linger_s=rng.choice((0.0, 0.05)),
        batch_records_max=rng.choice((3, 2000)),
        read_records_max=rng.choice((2, 200)),
        snapshot_every_batches=rng.choice((1, 1, 2, 5, 50)),
        snapshot_every_s=rng.choice((1e9, 2.0)),
        ticks_pending_max=rng.choice((2, 120)),
    )
    if case.tick_setting and tick_s:
        environ[case.tick_setting] = str(tick_s)
    return Weather(
        processes=rng.choice((1, 2, 2, 3)),
        partitions=rng.randint(1, case.partitions_max),
        records=rng.choice((8, 20, 40)),
        pauses_s=rng.choice(((0.0,), (0.0, 0.02, 0.4), (0.1, 0.4), (0.4, 3.0))),
        marker_delay_s=rng.choice((0.0, 0.0, 0.02, 0.5)),
        has_trimming=rng.random() < 0.75,
        has_expiry=rng.random() < 0.4,
        environ=environ,
    )


def transform_environ(**settings: float) -> dict[str, str]:
    """Settings of a transform, as a process has them in its environment."""
    known = {"refence_after_s": 0.5, "bad_fraction_max": 1.0, **settings}
    return {f"FORGEMQ_TRANSFORM_{name.upper()}": str(value) for name, value in known.items()}


_ONE_BY_ONE = transform_environ(
    batch_linger_s=0.0, batch_records_max=4, snapshot_every_batches=3, snapshot_every_s=1e9
)
ALONE = Weather(records=12, pauses_s=(0.02,), environ=_ONE_BY_ONE)
"""One process, several records a batch, a snapshot in each third one."""

SHARED = Weather(
    processes=2, records=24, bursts=(3,), pauses_s=(0.7,), has_trimming=True, environ=_ONE_BY_ONE
)
"""Two processes that take over from each other while the run is trimmed."""
