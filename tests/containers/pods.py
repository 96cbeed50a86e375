"""Runs the pods of an overlay as containers of a Docker engine, as a kubelet would.

A pod is a network of its own, held by a container that sleeps, and the containers in it. What dies
by itself starts again, as in Kubernetes; a container that a test killed is started by the test.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
from docker.errors import NotFound
from docker.models.containers import Container as Running
from docker.models.networks import Network
from docker.types import IPAMConfig, IPAMPool
from docker.types import Mount as DockerMount
from msgspec import Struct

from tests.containers.images import image_of
from tests.containers.manifests import Container, Mount, Overlay, Workload, bytes_of, expanded

GROUP = 65532
TOOL = "forgemq-launcher"
"""The image of what holds a pod's network, and of commands."""

POLL_S = 0.5
FIRST_S_MAX = 600
"""Of a container that runs before those of its pod; that of the run waits for the broker."""

STARTS_MAX = 50
"""Of a container that fails: a kubelet has no limit; both wait longer each time."""


class Changes(Struct, frozen=True, kw_only=True):
    """What a test changes in the pods of the manifests.

    Attributes:
        folders: Folders of this machine in place of volumes, by `<pod>-<name of the volume>`.
        variables: Environment variables to add, by pod/container.
        mounts: Mounts to add, by pod/container.
    """

    folders: Mapping[str, Path] = {}
    variables: Mapping[str, Mapping[str, str]] = {}
    mounts: Mapping[str, tuple[DockerMount, ...]] = {}


class Pod:
    """The running containers of one replica, by name, and how others reach them."""

    def __init__(
        self, workload: Workload, sandbox: Running, *, address: str, aliases: Sequence[str]
    ) -> None:
        self.name = aliases[0]
        self.workload = workload
        self.sandbox = sandbox
        self.address = address
        self.aliases = tuple(aliases)
        self.containers: dict[str, Running] = {}


class PodRunner:
    """Pods on one bridge network; `close` removes everything that it made."""

    def __init__(
        self,
        client: docker.DockerClient,
        overlay: Overlay,
        folder: Path,
        *,
        changes: Changes | None = None,
    ) -> None:
        """Build the images that are missing, and make the network.

        Args:
            overlay: Its workloads can be started.
            folder: Gets the files of config maps and secrets, and the logs at the end.
            changes: None: as the manifests have it.
        """
        self.pods: dict[str, Pod] = {}
        self._client = client
        self._overlay = overlay
        self._folder = folder
        self._changes = Changes() if changes is None else changes
        self._images = {
            name: image_of(name, client) for name in sorted({TOOL, *images_of(overlay)})
        }
        self._prefix = f"forgemq-test-{secrets.token_hex(3)}"
        self.network = network_with_fixed_addresses(self._prefix, client)
        self._volumes: set[str] = set()
        self._making = threading.Lock()

    def start(self, workload: Workload) -> None:
        """Start all replicas; their first containers run to their end here, one after another."""
        for ordinal in range(workload.replicas):
            self._start_pod(workload, ordinal)

    def close(self) -> None:
        """Keep the logs, and remove containers, volumes and the network."""
        (self._folder / "logs").mkdir(exist_ok=True)
        for pod in self.pods.values():
            for name, container in pod.containers.items():
                path = self._folder / "logs" / f"{pod.name}.{name}.log"
                path.write_bytes(container.logs(timestamps=True))
        for container in self._client.containers.list(all=True, filters={"label": self._prefix}):
            with contextlib.suppress(NotFound):
                container.remove(force=True, v=True)
        for volume in self._volumes:
            self._client.volumes.get(volume).remove(force=True)
        self.network.remove()

    def _start_pod(self, workload: Workload, ordinal: int) -> None:
        name = f"{workload.name}-{ordinal}"
        aliases = (name, f"{name}.{workload.governing}", *workload.services)
        endpoint = self._client.api.create_endpoint_config(aliases=aliases)
        sandbox = self._client.containers.create(
            self._images[TOOL],
            name=f"{self._prefix}-{name}",
            entrypoint=["sleep", "infinity"],
            labels=[self._prefix],
            hostname=name,
            network=self._prefix,
            networking_config={self._prefix: endpoint},
        )
        sandbox.start()
        sandbox.reload()
        address = sandbox.attrs["NetworkSettings"]["Networks"][self._prefix]["IPAddress"]
        pod = self.pods[name] = Pod(workload, sandbox, address=address, aliases=aliases)
        fields = {
            "status.podIP": address,
            "metadata.name": name,
            "metadata.labels['apps.kubernetes.io/pod-index']": str(ordinal),
        }
        for container in workload.first:
            started = self._start_container(pod, container, fields)
            status = wait_for_end(started, timeout_s=FIRST_S_MAX)
            assert status == 0, started.logs(tail=30).decode()
        for container in workload.containers:
            self._start_container(pod, container, fields)

    def _start_container(
        self, pod: Pod, container: Container, fields: Mapping[str, str]
    ) -> Running:
        full_name = f"{pod.name}/{container.name}"
        variables = self._overlay.variables(container, fields=fields)
        variables |= self._changes.variables.get(full_name, {})
        rules = {**pod.workload.security, **container.security}
        is_ours = container.image.startswith("forgemq-")
        temporary, mounts = self._mounts(pod, container)
        pod.containers[container.name] = running = self._client.containers.run(
            self._images[container.image],
            detach=True,
            name=f"{self._prefix}-{pod.name}-{container.name}",
            labels=[self._prefix],
            network_mode=f"container:{pod.sandbox.id}",
            entrypoint=list(container.command) or None,
            command=[expanded(each, variables) for each in container.arguments],
            environment=variables,
            # Containers that the manifests leave free are held to the same rules.
            user=str(rules.get("runAsUser", "" if is_ours else 1000)),
            read_only=is_ours or rules.get("readOnlyRootFilesystem", False),
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            group_add=[rules.get("fsGroup", GROUP)],
            mem_limit=container.memory_bytes_max,
            tmpfs=temporary,
            mounts=[*mounts, *self._changes.mounts.get(full_name, ())],
            restart_policy={"Name": "on-failure", "MaximumRetryCount": STARTS_MAX},
        )
        return running

    def _mounts(self, pod: Pod, container: Container) -> tuple[dict[str, str], list[DockerMount]]:
        temporary, mounts = {}, []
        for mount in container.mounts:
            source = pod.workload.volumes[mount.volume]
            if (options := _in_memory(mount, source)) is not None:
                temporary[mount.path] = options
            elif (made := self._mounted(pod, mount, source)) is not None:
                mounts.append(made)
        return temporary, mounts

    def _mounted(self, pod: Pod, mount: Mount, source: dict[str, Any]) -> DockerMount | None:
        """A folder with the files of a config map or secret, else a volume."""
        for key, kind, field in (
            ("configMap", "ConfigMap", "name"),
            ("secret", "Secret", "secretName"),
        ):
            if key in source:
                name = source[key][field]
                data = self._overlay.data(kind, name)
                assert data is not None or source[key].get("optional"), name
                if data is None:
                    return None
                folder = self._folder / f"{kind}-{name}"
                folder.mkdir(exist_ok=True)
                for file, text in data.items():
                    (folder / file).write_text(text)
                return DockerMount(mount.path, str(folder), type="bind", read_only=True)
        if "projected" in source:  # A token for the cluster's API, which is not there.
            return None
        if (instead := self._changes.folders.get(f"{pod.name}-{mount.volume}")) is not None:
            return DockerMount(mount.path, str(instead), type="bind")
        claim = source.get("persistentVolumeClaim", {}).get("claimName")
        name = f"{self._prefix}-{claim or f'{pod.name}-{mount.volume}'}"
        with self._making:
            if name not in self._volumes:
                self._make_volume(name, group=pod.workload.security.get("fsGroup", GROUP))
        return DockerMount(mount.path, name, type="volume", read_only=mount.is_read_only)

    def _make_volume(self, name: str, *, group: int) -> None:
        """Make a volume that belongs to the group, as `fsGroup` has it."""
        self._volumes.add(name)
        self._client.volumes.create(name)
        self._client.containers.run(
            self._images[TOOL],
            entrypoint=["sh", "-c", f"chgrp {group} /volume && chmod 2775 /volume"],
            mounts=[DockerMount("/volume", name, type="volume")],
            user="0",
            remove=True,
        )


def network_with_fixed_addresses(name: str, client: docker.DockerClient) -> Network:
    """A bridge network whose containers can come back under the addresses that they had.

    The engine allows that only where somebody chose the addresses: those that it chose itself for
    a network of this name are given back to it.
    """
    network = client.networks.create(name)
    network.reload()
    subnet = network.attrs["IPAM"]["Config"][0]["Subnet"]
    network.remove()
    pools = [IPAMPool(subnet=subnet)]
    return client.networks.create(name, ipam=IPAMConfig(pool_configs=pools))


def images_of(overlay: Overlay) -> set[str]:
    """Names of all images of an overlay's pods."""
    workloads = overlay.workloads().values()
    return {each.image for one in workloads for each in (*one.first, *one.containers)}


def _in_memory(mount: Mount, source: dict[str, Any]) -> str | None:
    """Options of a mount in memory; None if the volume outlives its containers."""
    if "emptyDir" not in source:
        return None
    limit = source["emptyDir"].get("sizeLimit")
    if limit is None and mount.path != "/tmp":
        return None
    return f"rw,exec,mode=1777{f',size={bytes_of(limit)}' if limit else ''}"


def wait_for_end(container: Running, *, timeout_s: float) -> int:
    """Exit status of a container that does not start again; AssertionError if it goes on."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        container.reload()
        if container.status == "exited":
            return int(container.attrs["State"]["ExitCode"])
        time.sleep(POLL_S)
    raise AssertionError(f"{container.name} did not end within {timeout_s:g} s")


@contextlib.contextmanager
def pod_runner(
    client: docker.DockerClient,
    overlay: Overlay,
    folder: Path,
    *,
    changes: Changes | None = None,
) -> Iterator[PodRunner]:
    """A runner whose pods go when the block ends."""
    runner = PodRunner(client, overlay, folder, changes=changes)
    try:
        yield runner
    finally:
        runner.close()
