"""Gateways in memory, with a scheduler and a trainer that need no time."""

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from tests.autojump import pytest_asyncio_loop_factories  # noqa: F401 - a hook
from tests.memory_gateway import Group, MemoryGateway
from tests.memory_gateway_http import refused, served


class WholeRun:
    """Admits `slots` training groups at once, retires a group that has ended, and counts steps.

    Training ends with `groups_to_train` retired groups; groups that wait for a slot then stay.
    """

    def __init__(self, *, slots: int, groups_to_train: int, steps: int) -> None:
        self.slots, self.groups_to_train, self.steps = slots, groups_to_train, steps
        self.open_max = 0
        self.trained = 0
        self.outstanding_max = 0

    def __call__(self, gateway: MemoryGateway) -> None:
        groups = gateway.in_order()
        self.open_max = max(self.open_max, sum(g.open_count for g in groups))
        for group in groups:
            if group.state == "admitted" and len(group.ended) == group.size:
                gateway.retire(group.group_id, "evaluated" if is_eval(group) else "trained")
        training = [g for g in groups if not is_eval(g)]
        outstanding = [g for g in training if g.state != "retired"]
        self.outstanding_max = max(self.outstanding_max, len(outstanding))
        trained = self.trained = len(training) - len(outstanding)
        is_last = trained >= self.groups_to_train
        gateway.train(self.steps if is_last else min(trained, self.steps - 1), is_last=is_last)
        self._admit(gateway, is_over=is_last)

    def _admit(self, gateway: MemoryGateway, *, is_over: bool) -> None:
        for group in gateway.in_order():
            admitted = [g for g in gateway.in_order() if g.state == "admitted" and not is_eval(g)]
            has_slot = len(admitted) < self.slots and not is_over
            if group.state == "requested" and (is_eval(group) or has_slot):
                gateway.admit(group.group_id)


def is_eval(group: Group) -> bool:
    return group.request.purpose == "eval"


@pytest.fixture
async def memory_gateway() -> AsyncIterator[Callable[..., Any]]:
    """Starts gateways; their addresses are in `url`, what a run saw in `scheduler`."""
    async with AsyncExitStack() as started:

        async def start(
            *,
            group_size: int = 2,
            steps: int = 4,
            groups_to_train: int = 4,
            slots: int = 2,
        ) -> MemoryGateway:
            run = WholeRun(slots=slots, groups_to_train=groups_to_train, steps=steps)
            gateway = MemoryGateway(group_size=group_size, steps=steps, scheduler=run)
            return await started.enter_async_context(served(gateway))

        yield start


@pytest.fixture
def refusal() -> Callable[..., web.Response]:
    return refused


@pytest.fixture
def kept_signal_handlers() -> Iterator[None]:
    """Each environment of verifiers sets handlers of its own; afterwards they are as before."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
