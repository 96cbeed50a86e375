"""The release that this code is compatible with: what it froze, and its code from the history.

`contracts/released/previous.toml` names it; docs/compatibility.md says how it moves.
"""

import io
import json
import re
import subprocess
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

ROOT = Path(__file__).parents[1]
RELEASED = ROOT / "contracts" / "released"


class Release(Struct, frozen=True, kw_only=True):
    """Code that services can be started from, in this environment's packages.

    Attributes:
        name: previous or present.
        root: Of its tree.
    """

    name: str
    root: Path

    def python_path(self) -> str:
        """PYTHONPATH by which its packages come before those that are installed."""
        packages = ["contracts", *self._packages("libs"), *self._packages("services")]
        return ":".join(str(self.root / each / "src") for each in packages)

    def logic_version(self, service: str) -> int:
        """Logic version of a service's core."""
        path = f"services/{service}/src/forgemq_{service}/core/logic_version.py"
        found = re.search(r"^LOGIC_VERSION = (\d+)$", (self.root / path).read_text(), re.MULTILINE)
        assert found, path
        return int(found[1])

    def _packages(self, folder: str) -> list[str]:
        paths = (each.parent for each in sorted((self.root / folder).glob("*/pyproject.toml")))
        return [str(each.relative_to(self.root)) for each in paths]


PRESENT = Release(name="present", root=ROOT)


def previous() -> dict[str, str]:
    """Tag or commit of the previous release as `revision`, and its file of `contracts`."""
    return tomllib.loads((RELEASED / "previous.toml").read_text())


def previous_contracts() -> dict[str, Any]:
    """What the previous release froze."""
    frozen: dict[str, Any] = json.loads((RELEASED / previous()["contracts"]).read_text())
    return frozen


def previous_revision() -> str:
    """Tag or commit of the previous release."""
    return previous()["revision"]


def previous_file(path: str) -> bytes:
    """A file of the previous release; skips the test if this clone's history lacks it."""
    revision = previous_revision()
    return _git("show", f"{revision}:{path}", revision=revision)


def previous_release(folder: Path, *, revision: str | None = None) -> Release:
    """The previous release's tree, unpacked; skips the test if this clone's history lacks it."""
    revision = revision or previous_revision()
    parts = ("contracts", "libs", "services", "tests")
    archive = _git("archive", revision, *parts, revision=revision)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
        tree.extractall(folder, filter="data")
    return Release(name="previous", root=folder)


def _git(*arguments: str, revision: str) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no history with the previous release, {revision}: {error}")
