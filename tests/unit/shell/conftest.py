"""The shell's tests wait on the loop's time only, so they run on the autojump loop."""

from collections.abc import AsyncIterator

import pytest

from tests.autojump import pytest_asyncio_loop_factories  # noqa: F401 - a hook
from tests.unit.shell.task_world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.open()
    yield world
    await world.log.close()
