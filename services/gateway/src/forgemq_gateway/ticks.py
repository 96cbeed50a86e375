"""Looks after everything that changes by time alone: silent lanes, deadlines, leases, gauges."""

import asyncio

from forgemq_gateway.abandoned import Abandoned
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.operations import Operations

# Far below the seconds that holds, leases and lapses last, and cheap enough for 10,000 episodes.
TICK_S = 0.25

STALL_S = 2.5
"""A tick that is so late stood still with its process: no agent could be heard meanwhile."""


async def keep_ticking(
    context: GatewayContext, *, dispatcher: Dispatcher, operations: Operations
) -> None:
    """Tick until cancelled."""
    abandoned = Abandoned(operations, context=context)
    telemetry, registry, clock = context.telemetry, context.registry, context.clock
    while True:
        due_s = clock.now_s() + TICK_S
        await asyncio.sleep(TICK_S)
        late_s = clock.now_s() - due_s
        if late_s > STALL_S:
            telemetry.event("stood_still", seconds=round(late_s, 3))
            registry.renew_leases(clock.now_s())
        dispatcher.tick()
        await abandoned.lapse()
        await abandoned.end_closed()
        operations.held_bytes = registry.size_bytes()
        telemetry.gauge("gateway.history_bytes", operations.held_bytes)
        telemetry.gauge("gateway.groups", len(registry.groups))
        admitted = [group for group in registry.groups.values() if group.state == "admitted"]
        telemetry.gauge("gateway.groups_unclaimed", sum(not each.episodes for each in admitted))
        for lane, in_flight in dispatcher.attempts.in_flight().items():
            telemetry.gauge("gateway.in_flight", in_flight, lane=lane)
