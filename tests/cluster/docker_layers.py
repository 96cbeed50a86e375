"""Images of a Docker engine in a containerd, without a byte of them copied.

Both keep a layer as a folder for overlayfs. So each layer becomes a snapshot of containerd whose
folder shows the engine's, read-only, and a manifest of its own describes the image.
"""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
from msgspec import Struct

from tests.cluster.enclosure import Enclosure

DRIVER = "overlay2"
"""Docker's storage driver whose layers are such folders."""

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Description(Struct, frozen=True, kw_only=True):
    """What an image is beside its files, in the OCI's words.

    Attributes:
        config: User, variables, command and the like.
        layers: Digest of each, the lowest first.
    """

    architecture: str
    config: Mapping[str, object]
    layers: Sequence[str]

    def encoded(self) -> bytes:
        """The image's configuration."""
        files = {"type": "layers", "diff_ids": list(self.layers)}
        platform = {"architecture": self.architecture, "os": "linux"}
        return json.dumps({**platform, "config": self.config, "rootfs": files}).encode()


class Images:
    """Puts images into the containerd of an enclosure."""

    def __init__(self, inside: Enclosure, *, socket: Path) -> None:
        """Containerd listens on this socket."""
        self._inside = inside
        self._ctr = ("ctr", f"--address={socket}", "--namespace=k8s.io")
        self._shown: set[str] = set()

    def show(self, image: str, *, names: Sequence[str], client: docker.DockerClient) -> None:
        """Let containerd have an image of the Docker engine under these names."""
        found = client.images.get(image).attrs
        data, layers = found["GraphDriver"]["Data"], found["RootFS"]["Layers"]
        folders = [data["UpperDir"], *filter(None, data.get("LowerDir", "").split(":"))]
        parent = ""
        for digest, folder in zip(layers, reversed(folders), strict=True):
            parent = self._show_layer(digest, folder=folder, parent=parent)
        image_of = Description(
            architecture=found["Architecture"], config=found["Config"], layers=layers
        )
        for name in names:
            self._load(archive(image_of, name=name), "--no-unpack")

    def load_program(self, program: Path, *, name: str) -> None:
        """Let containerd have an image that runs this one program, compiled for this machine."""
        layer = tar_of({program.name: program.read_bytes()})
        image = Description(
            architecture=_ARCHITECTURES[platform.machine()],
            config={"Entrypoint": [f"/{program.name}"], "User": "65535:65535"},
            layers=[digest_of(layer)],
        )
        self._load(archive(image, name=name, layers=[layer]))

    def _load(self, image: bytes, *options: str) -> None:
        self._inside.run(*self._ctr, "images", "import", *options, "-", given=image)

    def _show_layer(self, digest: str, *, folder: str, parent: str) -> str:
        """Make the snapshot of a layer, if it is not there; its name, as the OCI chains layers."""
        chain = digest_of(f"{parent} {digest}".encode()) if parent else digest
        if chain not in self._shown:
            snapshots = (*self._ctr, "snapshots")
            above = [parent] if parent else []
            made = self._inside.run(*snapshots, "prepare", "--mounts", f"new-{chain}", *above)
            self._inside.run(*snapshots, "commit", chain, f"new-{chain}")
            place = folder_of(json.loads(made))
            self._inside.run("mount", "--bind", folder, place)
            self._inside.run("mount", "-o", "remount,bind,ro", place)
            self._shown.add(chain)
        return chain


def folder_of(mounts: Sequence[Mapping[str, Any]]) -> str:
    """Where a new snapshot keeps its files, by the mounts that would show it."""
    (mount,) = mounts
    for option in map(str, mount["Options"]):
        if option.startswith("upperdir="):
            return option.removeprefix("upperdir=")
    return str(mount["Source"])


def archive(image: Description, *, name: str, layers: Sequence[bytes] = ()) -> bytes:
    """An image as a tar file in the OCI's layout; layers that are there already may be left out."""
    config = image.encoded()
    sizes = [len(layer) for layer in layers] or [0] * len(image.layers)
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": described(config, kind=_CONFIG),
            "layers": [
                {"mediaType": _LAYER, "digest": digest, "size": size}
                for digest, size in zip(image.layers, sizes, strict=True)
            ],
        }
    ).encode()
    named = {"annotations": {"io.containerd.image.name": name}}
    index = {"schemaVersion": 2, "manifests": [described(manifest, kind=_MANIFEST) | named]}
    blobs = {f"blobs/{digest_of(blob).replace(':', '/')}": blob for blob in (config, manifest)}
    blobs |= {f"blobs/{digest_of(layer).replace(':', '/')}": layer for layer in layers}
    layout = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
    return tar_of(layout | {"index.json": json.dumps(index).encode()} | blobs)


def described(blob: bytes, *, kind: str) -> dict[str, object]:
    """The descriptor by which the OCI refers to a blob."""
    return {"mediaType": kind, "digest": digest_of(blob), "size": len(blob)}


def digest_of(blob: bytes) -> str:
    """The digest by which a blob is named."""
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A tar file with these files, which everybody may run."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()
