"""Looks after everything that changes by time alone: silent lanes, deadlines, leases, gauges.

The end of an abandoned episode is a record, whose write may take as long as the log needs: it is
written beside the ticks, one pass at a time.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from forgemq_gateway.abandoned import Abandoned
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.operations import Operations

# Far below the seconds that holds, leases and lapses last, and cheap enough for 10,000 episodes.
TICK_S = 0.25

STALL_S = 2.5
"""A tick that is so late stood still with its process: no agent could be heard meanwhile."""


async def keep_ticking(
    context: GatewayContext,
    *,
    dispatcher: Dispatcher,
    operations: Operations,
    is_ready: Callable[[], bool] = lambda: True,
) -> None:
    """Tick until cancelled; no lease lapses while the gateway is not ready for requests."""
    abandoned = Abandoned(operations, context=context)
    standstill = context.standstill
    standstill.tick()
    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(abandoned.end_due())
        reading = tasks.create_task(standstill.catch_up())
        while True:
            await _next_tick(context)
            standstill.tick()
            if standstill.is_behind and reading.done():
                reading = tasks.create_task(standstill.catch_up())
            if not is_ready():
                context.registry.renew_leases(context.clock.now_s())
            dispatcher.tick()
            if ending.done():
                ending = tasks.create_task(abandoned.end_due())
            _measure(context, dispatcher=dispatcher, operations=operations)


async def _next_tick(context: GatewayContext) -> None:
    """Wait for the next tick; all leases start again after a stop of the process."""
    clock = context.clock
    due_s = clock.now_s() + TICK_S
    await asyncio.sleep(TICK_S)
    late_s = clock.now_s() - due_s
    if late_s > STALL_S:
        context.telemetry.event("stood_still", seconds=round(late_s, 3))
        context.registry.renew_leases(clock.now_s())


def _measure(context: GatewayContext, *, dispatcher: Dispatcher, operations: Operations) -> None:
    telemetry, registry = context.telemetry, context.registry
    operations.held_bytes = registry.size_bytes()
    telemetry.gauge("gateway.history_bytes", operations.held_bytes)
    measure_groups(context)
    for lane, in_flight in dispatcher.attempts.in_flight().items():
        telemetry.gauge("gateway.in_flight", in_flight, lane=lane)


def measure_groups(context: GatewayContext) -> None:
    """Count the groups that this gateway serves, so that the sum over all gateways is the run's.

    Every gateway knows all groups, but of the others' groups not which episodes are claimed.
    """
    telemetry = context.telemetry
    if not telemetry.is_exporting:
        return
    own = [
        group
        for group_id, group in context.registry.groups.items()
        if context.gateways.serves(group_id)
    ]
    admitted = [group for group in own if group.state == "admitted"]
    telemetry.gauge("gateway.groups", len(own))
    telemetry.gauge("gateway.groups_unclaimed", sum(not each.episodes for each in admitted))
    open_episodes = Counter({queue.domain: 0 for queue in context.configuration.queues})
    for group in admitted:
        # Agents play no episode of callers of an endpoint in use, however many more there are.
        if not group.closed and group.facts.source != "live":
            open_episodes[group.facts.domain] += group.facts.group_size - len(group.finished)
    for domain, count in open_episodes.items():
        telemetry.gauge("gateway.episodes_open", count, domain=domain)
