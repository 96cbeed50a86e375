"""Writes a bill of materials of each image, in CycloneDX's JSON: what is installed in it.

Usage: sbom.py FOLDER TAG [NAME...]; without names those of contents.toml. The packages are asked of
the image itself; a bill that is not valid is not written.
"""

import sys
import tomllib
import uuid
from datetime import datetime
from pathlib import Path

import docker
import msgspec
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

PROGRAM = Path(__file__).with_name("installed.py").read_text()
CONTENTS = Path(__file__).with_name("contents.toml").read_text()
LABELS = "org.opencontainers.image"


class PythonPackage(msgspec.Struct, frozen=True):
    """A distribution; the licence is an SPDX expression, or "" if the package states none."""

    name: str
    version: str
    licence: str


class DebianPackage(msgspec.Struct, frozen=True):
    """A package of the base image, or of apt."""

    name: str
    version: str
    architecture: str


class Installed(msgspec.Struct, frozen=True):
    """What installed.py prints."""

    python: list[PythonPackage]
    debian: list[DebianPackage]


def main(folder: Path, tag: str, names: list[str]) -> int:
    """Write `<image>.cdx.json` for each image; returns 1 if one is not in the Docker engine."""
    names = names or [name for name in tomllib.loads(CONTENTS) if name != "tools"]
    client = docker.from_env()
    folder.mkdir(parents=True, exist_ok=True)
    for name in (f"forgemq-{each}:{tag}" for each in names):
        try:
            image = client.images.get(name)
        except docker.errors.ImageNotFound:
            sys.stderr.write(f"sbom: no image {name}: `make images` builds it\n")
            return 1
        bill = bill_of(name, image.attrs, installed_in(image.id, client))
        path = folder / f"{name.split(':')[0]}.cdx.json"
        path.write_text(valid_json(bill))
        sys.stdout.write(f"sbom: {path}: {len(bill.components)} packages\n")
    return 0


def installed_in(image: str, client: docker.DockerClient) -> Installed:
    """What an image says that it has installed."""
    container = client.containers.create(
        image, entrypoint=["/venv/bin/python", "-c", PROGRAM], network_mode="none", read_only=True
    )
    try:
        container.start()
        container.wait()
        # Read after the end: while a container ends, its log may lack the last lines.
        return msgspec.json.decode(container.logs(stderr=False), type=Installed)
    finally:
        container.remove(force=True)


def bill_of(name: str, attributes: dict, installed: Installed) -> Bom:
    """The bill of an image; the same image has the same bill, to the byte."""
    labels = attributes["Config"]["Labels"] or {}
    root = Component(
        type=ComponentType.CONTAINER,
        name=name.split(":")[0],
        version=labels.get(f"{LABELS}.version"),
        bom_ref="image",
        properties=[
            Property(name="revision", value=labels.get(f"{LABELS}.revision")),
            Property(name="id", value=attributes["Id"]),
        ],
    )
    components = [python_component(each) for each in installed.python]
    components += [debian_component(each) for each in installed.debian]
    bill = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, attributes["Id"]),
        metadata=BomMetaData(
            component=root, timestamp=datetime.fromisoformat(f"{attributes['Created'][:19]}+00:00")
        ),
        components=components,
    )
    bill.register_dependency(root, components)
    return bill


def python_component(package: PythonPackage) -> Component:
    """A distribution of Python; one of this workspace is in no index, so it has no address."""
    name = package.name.lower().replace("_", "-").replace(".", "-")
    is_ours = name.startswith("forgemq-")
    purl = None if is_ours else PackageURL("pypi", None, name, package.version)
    return Component(
        type=ComponentType.LIBRARY,
        name=package.name,
        version=package.version,
        purl=purl,
        bom_ref=str(purl or name),
        licenses=[LicenseExpression(package.licence)] if package.licence else (),
    )


def debian_component(package: DebianPackage) -> Component:
    """A package of Debian."""
    purl = PackageURL(
        "deb", "debian", package.name, package.version, {"arch": package.architecture}
    )
    return Component(
        type=ComponentType.LIBRARY,
        name=package.name,
        version=package.version,
        purl=purl,
        bom_ref=str(purl),
    )


def valid_json(bill: Bom) -> str:
    """The bill's text; ValueError if CycloneDX's schema refuses it."""
    text = JsonV1Dot6(bill).output_as_string(indent=1)
    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if fault is not None:
        raise ValueError(f"not a bill of CycloneDX 1.6: {fault}")
    return f"{text}\n"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
