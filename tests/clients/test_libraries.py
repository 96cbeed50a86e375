"""Clients that are libraries: each program in `programs/` is a plain loop with one tool."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.bench import Check, Client, Launch, Mode, Protocol, Scene
from tests.clients.task import parallel_steps_of, steps_of

pytestmark = pytest.mark.clients
PROGRAMS = Path(__file__).parent / "programs"


def program(name: str, protocol: Protocol, how: str) -> Callable[[Scene], Launch]:
    """The command that runs a program with the Python of its package."""

    def launch(scene: Scene) -> Launch:
        runs = str(scene.installed / "venv/bin/python")
        environment = {"BASE_URL": f"{scene.root}/v1", "KEY": scene.key}
        return Launch((runs, str(PROGRAMS / name), protocol, how), environment)

    return launch


def library(
    name: str,
    package: str,
    file: str,
    protocol: Protocol,
    how: str = "whole",
) -> Client:
    return Client(
        name=f"{name} (Python, {how})",
        package=package,
        protocol=protocol,
        launch=program(file, protocol, how),
        steps=steps_of("shell", "command"),
        parallel_steps=parallel_steps_of("shell", "command"),
    )


MODES_OF_LIBRARIES: tuple[Mode, ...] = ("plain",)
LIBRARIES = [
    library("openai", "sdk_python", "openai_sdk.py", "chat"),
    library("openai", "sdk_python", "openai_sdk.py", "chat", "stream"),
    library("openai", "sdk_python", "openai_sdk.py", "responses"),
    library("openai", "sdk_python", "openai_sdk.py", "responses", "stream"),
]


def identity(client: Client) -> str:
    return f"{client.package}-{client.name}-{client.protocol}"


@pytest.mark.parametrize("mode", MODES_OF_LIBRARIES)
@pytest.mark.parametrize("client", LIBRARIES, ids=identity)
async def test_a_library_does_its_task_on_one_exact_path(client: Client, mode: Mode, check: Check):
    await check(client, mode)
