"""The gateway that each test of the suite gets."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.autojump import pytest_asyncio_loop_factories  # noqa: F401 - a hook
from tests.conformance.admin.stages import Caller, memory_stage, real_stage
from tests.unit.rendering.folders import write_model_folder

LEASE_S = 30.0
SHORT_LEASE_S = 0.4


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("admin") / "model")


@pytest.fixture(params=["memory", "real"])
def stage_of(request: pytest.FixtureRequest) -> Callable[..., Any]:
    if request.param == "memory":
        return memory_stage
    model = request.getfixturevalue("model")
    return lambda *, lease_s: real_stage(model, lease_s=lease_s)


@pytest.fixture
async def caller(stage_of: Callable[..., Any]) -> AsyncIterator[Caller]:
    async with stage_of(lease_s=LEASE_S) as stage:
        yield Caller(stage)


@pytest.fixture
async def hasty(stage_of: Callable[..., Any]) -> AsyncIterator[Caller]:
    """A gateway whose leases lapse soon."""
    async with stage_of(lease_s=SHORT_LEASE_S) as stage:
        yield Caller(stage)
