"""One real SGLang server for the whole test session, and its return to the base weights."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forgemq_settings.ports import free_port
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.server import EngineServer

ENGINE_MODEL = Path(__file__).parents[1] / "deploy" / "demo" / "model"
START_TIMEOUT_S = 600.0
WEIGHT_GROUP_TIMEOUT_S = 4.0


ONE_OR_TWO_PROCESSES = [1, pytest.param(2, marks=pytest.mark.long)]
"""What tests of an engine with parts of its own are played on."""


def engine_options(**others: Any) -> EngineOptions:
    """A CPU engine that gives up on a process group after 4 s."""
    return EngineOptions(weight_group_timeout_s=WEIGHT_GROUP_TIMEOUT_S, **others)


def processes_of(url: str) -> int:
    """Of an engine that is up; each is a rank of a group that new weights come over."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as response:
        return int(json.load(response)["tp_size"])


@contextmanager
def started_engine(
    folder: Path,
    options: EngineOptions,
    *,
    model: Path = ENGINE_MODEL,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Address of an engine with its logs in a folder; it serves until the block ends."""
    server = EngineServer(
        str(model), folder, port=free_port(), options=options, inherited=environment
    )
    server.start()
    try:
        server.wait_healthy(timeout_s=START_TIMEOUT_S)
        yield server.url
    finally:
        server.stop()


@pytest.fixture(scope="session")
def engine_model() -> Path:
    """The model behind `engine_url`."""
    return ENGINE_MODEL


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real engine; FORGEMQ_TEST_ENGINE names one that is running already.

    Its start takes 12-155 s, in the setup of the first test that asks for it.
    """
    if running := os.environ.get("FORGEMQ_TEST_ENGINE"):
        yield running
        return
    with started_engine(tmp_path_factory.mktemp("engine"), engine_options()) as url:
        yield url


@pytest.fixture
def base_engine_url(engine_url: str, engine_model: Path) -> str:
    """The session's engine on its base weights, idle, not paused and named 0.0."""
    reset_engine(engine_url, engine_model)
    return engine_url


def reset_engine(url: str, model: Path) -> None:
    """Bring an engine back to a model's weights under the name 0.0."""
    post = engine_post(url)
    post("/end_weight_update", {}, (200, 400))
    post("/continue_generation", {}, (200,))
    post("/abort_request", {"abort_all": True}, (200,))
    post("/pause_generation", {"mode": "retract"}, (200,))
    body = {"model_path": str(model), "weight_version": "0.0", "flush_cache": True}
    post("/update_weights_from_disk", body, (200,))
    post("/continue_generation", {}, (200,))


def engine_post(url: str) -> Callable[[str, dict[str, object], tuple[int, ...]], None]:
    """Asks an engine for something; the tuple has the statuses that are expected."""

    def post(path: str, body: dict[str, object], accepted: tuple[int, ...]) -> None:
        request = urllib.request.Request(
            url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status = response.status
        except urllib.error.HTTPError as error:
            with error:
                status = error.code
        assert status in accepted, f"{path}: HTTP {status}"

    return post
