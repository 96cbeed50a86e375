"""Says how far a command has read the log of a run: that of a long run takes minutes."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from forgemq_bus.kafka import KafkaLog
from forgemq_bus.partitions import partitions_of
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import OF_RUN
from forgemq_telemetry.regular_calls import called_every

TOLD_EVERY_S = 10.0


@asynccontextmanager
async def told_reading(
    log: KafkaLog,
    configuration: RunConfiguration,
    *,
    say: Callable[[str], None],
    every_s: float = TOLD_EVERY_S,
    times: int = 1,
) -> AsyncIterator[None]:
    """Say every so often, while the block runs, how many records it has read of how many.

    Args:
        log: Of the run.
        configuration: Of the run.
        say: Gets a line.
        every_s: Time between two lines.
        times: How often the block reads most of the records.
    """
    places = [place for topic in OF_RUN for place in partitions_of(topic, configuration)]
    first, ends = await log.first_positions(places), await log.end_positions(places)
    # Some offsets are marks of transactions, and no command reads all topics.
    kept = sum(ends[place] - first[place] for place in places)
    again = f", most of which are read {times} times" if times > 1 else ""
    began_s = time.monotonic()

    def tell() -> None:
        say(
            f"run {configuration.run}: {log.records_read:,} records read in "
            f"{time.monotonic() - began_s:.0f} s; its log has about {kept:,}{again}"
        )

    with called_every(every_s, tell):
        yield
