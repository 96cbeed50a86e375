"""A model folder for all tests of the gateway, and a clock that skips waits."""

from pathlib import Path

import pytest

from tests.autojump import pytest_asyncio_loop_factories  # noqa: F401 - a hook
from tests.unit.rendering.folders import write_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("gateway") / "model")
