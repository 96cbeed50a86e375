"""How many records a second does the scheduler's core handle, on one core?

One queue of N = 8,192 slots with W = 2,457 (0.3 N), P = 512 and 100 lanes. The head is a straggler
and 5,700 groups behind the window have finished, which is what the window makes of one slow group.
The clock runs over `SchedulerCore.handle` of decoded records; it is CPU time of this one thread.

`over_decode` compares with decoding the same records from their wire bytes in the same run, so it
says the same on a fast machine and on a slow one.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
from measurement import Measurement, arguments

from forgemq_contracts.groups import MergedGroup, RequestedGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.weights import ReportedEngine
from forgemq_scheduler.core import SchedulerCore

SLOTS = 8192
WINDOW = 2457
LANES = 100
FINISHED_OUTSIDE = SLOTS - WINDOW - 35
REPEATS = 5
RECORDS = 5000
"""Of each kind and repeat: half a second at the slowest."""


def configuration() -> RunConfiguration:
    """A run of one queue."""
    queue = Queue(
        domain="d",
        task_source="",
        agent="",
        slots=SLOTS,
        window=WINDOW,
        groups_per_step=512,
        groups_requested_max=10**6,
    )
    return RunConfiguration(
        run="r", seed=0, model=Model(path="m"), queues=(queue,), trainer=Trainer(steps=10**6)
    )


def requested(number: int) -> RequestedGroup:
    """The request for a group."""
    return RequestedGroup(
        group_id=f"g-{number:x}",
        domain="d",
        purpose="train",
        group_size=16,
        task=b"{}",
        idempotency_key=str(number),
        requested_ms=0,
    )


def merged(number: int) -> MergedGroup:
    """The summary of a group that can train."""
    return MergedGroup(
        group_id=f"g-{number:x}",
        domain="d",
        purpose="train",
        partition=0,
        tree_sha256="0" * 64,
        tree_tokens=10_000,
        loss_tokens=4_000,
    )


def heartbeat(lane: int) -> ReportedEngine:
    """A lane that lives and serves the base weights."""
    return ReportedEngine(
        lane=lane,
        epoch=1,
        url="",
        is_serving=True,
        lineage=1,
        version=0,
        running=3,
        queued=1,
        reported_ms=0,
    )


def message(record: msgspec.Struct) -> Message:
    """The record as the shell hands it over."""
    return Message(topic="", partition=0, offset=0, timestamp_ms=0, record=record)


def handle_all(core: SchedulerCore, records: Iterable[msgspec.Struct]) -> None:
    """Untimed: what must have happened before."""
    for record in records:
        core.handle(message(record))


def started() -> SchedulerCore:
    """All lanes live, all slots taken."""
    core = SchedulerCore(configuration())
    handle_all(core, (heartbeat(lane) for lane in range(LANES)))
    handle_all(core, (requested(number) for number in range(SLOTS)))
    return core


def blocked() -> SchedulerCore:
    """As `started`, with all but 35 of the groups behind the window finished."""
    core = started()
    handle_all(core, (merged(SLOTS - 1 - n) for n in range(FINISHED_OUTSIDE)))
    return core


def decode_s(records: Sequence[msgspec.Struct]) -> float:
    """CPU seconds to decode these records from MessagePack."""
    encoded = [msgspec.msgpack.encode(record) for record in records]
    decoder = msgspec.msgpack.Decoder(type(records[0]))
    begun_s = time.process_time()
    for value in encoded:
        decoder.decode(value)
    return time.process_time() - begun_s


def measure(
    measurement: Measurement,
    case: str,
    prepare: Callable[[], SchedulerCore],
    records: Sequence[msgspec.Struct],
) -> None:
    """Rows of one case, medians over repeats."""
    rates, ratios = [], []
    for _ in range(REPEATS):
        core, messages = prepare(), [message(record) for record in records]
        begun_s = time.process_time()
        for each in messages:
            core.handle(each)
        taken_s = time.process_time() - begun_s
        rates.append(len(records) / taken_s)
        ratios.append(taken_s / decode_s(records))
    measurement.row(case, "records_per_second", statistics.median(rates), "1/s")
    measurement.row(case, "over_decode", statistics.median(ratios), "x")


def main() -> int:
    """Measure all cases."""
    chosen = arguments(__doc__ or "")
    measurement = Measurement(
        name="scheduler",
        question="How many records a second does the scheduler's core handle, on one core?",
        conditions={"N, W, P": f"{SLOTS}, {WINDOW}, 512", "lanes": str(LANES)},
    )
    heartbeats = [heartbeat(number % LANES) for number in range(RECORDS)]
    cases: dict[str, tuple[Callable[[], SchedulerCore], Sequence[msgspec.Struct]]] = {
        "heartbeats": (started, heartbeats),
        "heartbeats_blocked": (blocked, heartbeats),
        "finishes_outside": (started, [merged(SLOTS - 1 - n) for n in range(RECORDS)]),
        "requests_waiting": (started, [requested(SLOTS + n) for n in range(RECORDS)]),
    }
    for name, (prepare, records) in cases.items():
        if not chosen.case or name in chosen.case:
            measure(measurement, name, prepare, records)
    return measurement.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
