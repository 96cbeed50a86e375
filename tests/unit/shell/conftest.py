"""The shell's tests wait on the loop's time only, so they run on the autojump loop."""

from tests.autojump import pytest_asyncio_loop_factories  # noqa: F401 - a hook
