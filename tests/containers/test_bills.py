"""`make sbom`: the bill of an image names what is in it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import docker
import msgspec
import pytest

from tests.containers.images import image_of

pytestmark = [pytest.mark.containers, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy/images"


def test_the_bill_of_an_image_has_its_packages_with_the_versions_of_the_lock(tmp_path: Path):
    _, tag = image_of("forgemq-merger", docker.from_env(timeout=120)).split(":")
    command = [sys.executable, IMAGES / "sbom.py", tmp_path, tag, "merger"]
    subprocess.run(command, check=True)
    bill = msgspec.json.decode((tmp_path / "forgemq-merger.cdx.json").read_bytes())
    python = {
        each["name"].lower().replace("_", "-"): each["version"]
        for each in bill["components"]
        if "pkg:pypi/" in each.get("purl", "")
    }
    wanted = tomllib.loads((IMAGES / "contents.toml").read_text())["merger"]
    lock = (ROOT / "requirements.lock").read_text()
    locked = {name: re.search(rf"^{name}==(\S+)", lock, re.MULTILINE)[1] for name in python}
    assert python == locked
    assert sorted(python) == wanted["packages"]
    ours = [each["name"] for each in bill["components"] if "purl" not in each]
    assert len(ours) == len(wanted["folders"])
    (libc,) = (each["purl"] for each in bill["components"] if each["name"] == "libc6")
    assert libc.startswith("pkg:deb/debian/libc6@")


def test_an_image_that_is_not_there_is_named(tmp_path: Path):
    command = [sys.executable, IMAGES / "sbom.py", tmp_path, "no-such-tag", "merger"]
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr == "sbom: no image forgemq-merger:no-such-tag: `make images` builds it\n"
