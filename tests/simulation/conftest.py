"""A simulation waits by the event loop's clock only, so no real time has to pass."""

from tests.autojump import pytest_asyncio_loop_factories  # noqa: F401 - a hook
