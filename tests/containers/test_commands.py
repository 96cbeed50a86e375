"""The commands that an image's packages bring: a person in a pod types them."""

import docker
import pytest

from tests.containers.images import image_of

pytestmark = [pytest.mark.containers, pytest.mark.long, pytest.mark.timeout(900)]


def test_the_command_forgemq_runs_in_the_launchers_image():
    client = docker.from_env(timeout=120)
    image = image_of("forgemq-launcher", client)
    said = client.containers.run(image, ["--help"], entrypoint="forgemq", remove=True)
    assert said.startswith(b"usage: forgemq [-h] [--version] COMMAND ...")
