"""The shell's tests wait on the loop's time alone: none of it has to pass."""

from tests.autojump import pytest_asyncio_loop_factories  # noqa: F401 - a hook
