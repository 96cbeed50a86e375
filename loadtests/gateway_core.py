"""What does one event cost the gateway's core, when ten times as much is open?

The gateway decides on one core for all agents of a run, so what happens a hundred times a second
must not look at all that is open. Each case runs an event with N and with 10 N open;
`cost_10n_over_n` is CPU time of this one thread over itself. Two cases also run the plain way,
which looks at everything, in the same run: `over_plain` is the plain way's time over the gateway's.

- choose: a lane for a request whose episode has N turns, with 100 lanes; plain: a walk of the turns
  for each lane
- heartbeat_held: a heartbeat while no lane takes requests and N turns wait for one
- tick: four times a second, with N turns in flight on 100 lanes
- leases_and_bytes: four times a second, with N open episodes
- change: of one group, with N groups for which an agent waits; plain: every one looks again
- forget_retired: one of N retired groups that a start has read, until the newest are left; plain: a
  dict whose oldest key is deleted
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from measurement import Measurement, arguments

from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.completions import TurnPart
from forgemq_contracts.episodes import OpenedEpisode, Sampling
from forgemq_contracts.groups import AdmittedGroup, RetiredGroup
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.change_signal import ChangeSignal
from forgemq_gateway.core.attempts import Attempts, Moment
from forgemq_gateway.core.digests import EMPTY_PATH
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.lane_caches import cached_tokens
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.plans import Prepared
from forgemq_gateway.core.registry import RETIRED_STATUSES_MAX, Registry
from forgemq_gateway.core.replies import Reply

LANES = 100
GROUP_SIZE = 16
REPEATS = 5
AT = Moment(now_s=1.0, wall_ms=1000)


def cpu_us(event: Callable[[], object], *, count: int) -> float:
    """Microseconds of CPU of one event: the least of some repeats, as others use the machine."""
    times = []
    for _ in range(REPEATS):
        begun_s = time.process_time()
        for _ in range(count):
            event()
        times.append((time.process_time() - begun_s) / count * 1e6)
    return min(times)


def heartbeat(lane: int, *, is_serving: bool = True) -> ReportedEngine:
    """A lane that serves the base weights, or is only there."""
    return ReportedEngine(
        lane=lane,
        epoch=1,
        url="",
        is_serving=is_serving,
        lineage=1,
        version=0,
        running=0,
        queued=0,
        reported_ms=0,
    )


def live_lanes() -> Lanes:
    """All lanes, heard of just before `AT`."""
    lanes = Lanes()
    for lane in range(LANES):
        lanes.report(heartbeat(lane), heard_s=AT.now_s)
    return lanes


def last_turn(turns: int) -> KnownCompletion:
    """The last completion of an episode with so many, all on lane 0."""
    parent: KnownCompletion | None = None
    for number in range(turns):
        parent = KnownCompletion(
            request_id=f"{number:032x}",
            offset=number,
            sequence=number,
            parent=parent,
            shared_tokens=2 * number,
            context=pack_ids([1]),
            output=pack_ids([2]),
            context_tokens=2 * number + 1,
            path=EMPTY_PATH,
            reply=Reply(),
            tools_digest="",
            lane=0,
            epoch=1,
            sampled_end="stop",
            engine_s=0.0,
            cached_tokens=0,
            after_offset=-1,
            taken_ms=0,
            finished_ms=0,
            temperature=1.0,
        )
    assert parent is not None
    return parent


def choose(turns: int) -> float:
    """One choice, as `Attempts` asks for it."""
    lanes, parent = live_lanes(), last_turn(turns)
    tokens = 2 * turns

    def event() -> None:
        lanes.choose(
            context_tokens=tokens,
            cached=lambda: cached_tokens(parent, shared=tokens, emptied={}),
            now_s=AT.now_s,
        )

    return cpu_us(event, count=20)


def choose_plainly(turns: int) -> float:
    """The walks alone, one for each lane."""
    parent, tokens = last_turn(turns), 2 * turns

    def walk(lane: int) -> int:
        node: KnownCompletion | None = parent
        limit = tokens
        while node is not None and limit > 0:
            if (node.lane, node.epoch) == (lane, 1):
                return limit
            limit = min(limit, node.shared_tokens)
            node = node.parent
        return 0

    return cpu_us(lambda: [walk(lane) for lane in range(LANES)], count=5)


def opened(group: int, index: int) -> OpenedEpisode:
    """An episode's first attempt."""
    return OpenedEpisode(
        episode_id=f"g-{group:x}.{index}.0",
        group_id=f"g-{group:x}",
        index=index,
        attempt=0,
        key_sha256="0" * 64,
        sampling=Sampling(),
        history="append_only",
        lease_s=60,
        opened_ms=0,
    )


def prepared(number: int) -> Prepared:
    """A short request without a parent."""
    return Prepared(
        parent=None,
        shared_tokens=0,
        context=pack_ids([1]),
        context_tokens=1,
        sampling=Sampling(),
        part=TurnPart(sequence=0, protocol="chat_completions", body_digest=str(number)),
    )


def attempts_with(turns: int, *, lanes: Lanes) -> Attempts:
    """So many turns that clients wait for, one for each episode."""
    attempts = Attempts(lanes, lane_hold_s=1e6)
    for number in range(turns):
        episode = HeldEpisode(opened(number, 0), lease_until_s=1e9)
        turn = episode.begin(str(number), matched=None, requested_ms=0, deadline_ms=10**9)
        attempts.begin(episode, turn)
        attempts.dispatch(episode, turn, prepared(number), at=AT)
    return attempts


def heartbeat_held(turns: int) -> float:
    """A heartbeat that frees no turn."""
    attempts = attempts_with(turns, lanes=Lanes())
    for lane in range(LANES):
        attempts.restore_lane(heartbeat(lane, is_serving=False), heard_s=AT.now_s)
    report = heartbeat(0, is_serving=False)
    return cpu_us(lambda: attempts.take_report(report, heard_s=AT.now_s, at=AT), count=50)


def tick(turns: int) -> float:
    """A tick that ends and moves nothing."""
    attempts = attempts_with(turns, lanes=live_lanes())
    return cpu_us(lambda: attempts.tick(AT), count=50)


def registry_of(groups: int) -> Registry:
    """Admitted groups with all episodes open."""
    registry = Registry()
    for group in range(groups):
        registry.apply_admitted_group(
            AdmittedGroup(
                group_id=f"g-{group:x}",
                domain="d",
                purpose="train",
                group_size=GROUP_SIZE,
                task=b"{}",
                version_at_admission=0,
                queue_index=group,
            )
        )
        for index in range(GROUP_SIZE):
            registry.apply_opened_episode(opened(group, index), lease_until_s=60.0)
    return registry


def leases_and_bytes(episodes: int) -> float:
    """What a tick asks of the registry, while every lease runs."""
    registry = registry_of(episodes // GROUP_SIZE)
    return cpu_us(lambda: (registry.lapsed(AT.now_s), registry.size_bytes()), count=500)


async def change_us(groups: int, *, notify: Callable[[ChangeSignal], None]) -> float:
    """One change, until everyone that it wakes waits again."""
    registry, signal = registry_of(groups), ChangeSignal()

    async def wait(group_id: str) -> None:
        def look() -> object:
            view = registry.view(group_id)
            return None if view is None or view.state == "admitted" else view

        await signal.until(look, group_id=group_id, timeout_s=600)

    tasks = [asyncio.ensure_future(wait(group_id)) for group_id in registry.groups]
    await asyncio.sleep(0)
    times = []
    for _ in range(REPEATS * 4):
        begun_s = time.process_time()
        notify(signal)
        for _ in range(3):
            await asyncio.sleep(0)
        times.append((time.process_time() - begun_s) * 1e6)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return statistics.median(times)


def change(groups: int) -> float:
    """A change of one group."""
    return asyncio.run(change_us(groups, notify=lambda signal: signal.notify("g-0")))


def change_plainly(groups: int) -> float:
    """The same change, if it concerned everyone."""
    return asyncio.run(change_us(groups, notify=ChangeSignal.notify_all))


def forget_retired(groups: int) -> float:
    """Of one group beyond the newest, after so many were read."""
    registry = Registry()
    for number in range(RETIRED_STATUSES_MAX + groups):
        group_id = f"g-{number:x}"
        registry.apply_retired_group(
            RetiredGroup(group_id=group_id, domain="d", purpose="train", reason="zero_variance")
        )
    begun_s = time.process_time()
    registry.forget_retired()
    return (time.process_time() - begun_s) / groups * 1e6


def forget_retired_plainly(groups: int) -> float:
    """The same with a dict, which looks past all that it has deleted for its oldest key."""
    known = dict.fromkeys(range(RETIRED_STATUSES_MAX + groups))
    begun_s = time.process_time()
    while len(known) > RETIRED_STATUSES_MAX:
        del known[next(iter(known))]
    return (time.process_time() - begun_s) / groups * 1e6


CASES: dict[str, tuple[Callable[[int], float], Callable[[int], float] | None, int]] = {
    "choose": (choose, choose_plainly, 40),
    "heartbeat_held": (heartbeat_held, None, 100),
    "tick": (tick, None, 1000),
    "leases_and_bytes": (leases_and_bytes, None, 1024),
    "change": (change, change_plainly, 64),
    "forget_retired": (forget_retired, forget_retired_plainly, 10_000),
}


def measure(measurement: Measurement, names: Sequence[str]) -> None:
    """Rows of these cases."""
    for name in names:
        ours, plain, size = CASES[name]
        few_us, many_us = ours(size), ours(10 * size)
        measurement.row(name, "cost_us", many_us, "us")
        measurement.row(name, "cost_10n_over_n", many_us / few_us, "x")
        if plain is not None:
            measurement.row(name, "over_plain", plain(10 * size) / many_us, "x")


def main() -> int:
    """Measure all cases."""
    chosen = arguments(__doc__ or "")
    measurement = Measurement(
        name="gateway_core",
        question="What does one event cost the gateway's core, when ten times as much is open?",
        conditions={
            "lanes": str(LANES),
            "10 N": str({n: 10 * size for n, (*_, size) in CASES.items()}),
        },
    )
    measure(measurement, chosen.case or list(CASES))
    return measurement.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
