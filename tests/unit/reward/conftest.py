"""The service's polls wait on the loop's time; while a grader works, time passes."""

from tests.autojump import pytest_asyncio_loop_factories  # noqa: F401 - a hook
