"""The Docker engine of this machine, if it has one.

Its client is imported when it is needed: most sessions of tests need none.
"""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import docker

HOW_TO = "no Docker engine answers; on Debian: apt-get install docker.io, then dockerd"
_PROBE_S = 5
"""An engine on a busy machine answers within a second."""


@functools.cache
def docker_answers() -> bool:
    """Whether a Docker engine answers."""
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=_PROBE_S)
    except DockerException:
        return False
    client.close()
    return True


def is_at_hand(image: str, client: "docker.DockerClient") -> bool:
    """Whether the engine has an image, or a registry gave it."""
    from docker.errors import APIError, ImageNotFound

    try:
        client.images.get(image)
    except ImageNotFound:
        try:
            client.images.pull(image)
        except APIError:
            return False
    return True
