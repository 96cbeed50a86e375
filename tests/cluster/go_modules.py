"""Programs of others, compiled from their Go modules.

`python -m tests.cluster.go_modules` compiles those that are not there: once, about 20 minutes of
one core and 3 GB of Go's downloads.
"""

import json
import subprocess
import sys
from pathlib import Path

from msgspec import Struct

from tests.cluster.programs import FOLDER, SOURCE, go_build, missing_for_server


class GoModule(Struct, frozen=True, kw_only=True):
    """One version of a module.

    Attributes:
        sum: Of its files, as Go writes it; its own go.sum has those of what it needs.
        packages: Below `cmd`; each is a program.
    """

    path: str
    version: str
    sum: str
    packages: tuple[str, ...]

    def program(self, package: str) -> Path:
        """Where the program of a package is, once it is compiled."""
        return FOLDER / f"{self.path.split('/')[2]}-{package}-{self.version}"

    def is_compiled(self) -> bool:
        """Whether all its programs are there."""
        return all(self.program(each).is_file() for each in self.packages)

    def source(self) -> Path:
        """The folder of its files, downloaded if it is not there; AssertionError if they differ."""
        done = subprocess.run(
            ["go", "mod", "download", "-json", f"{self.path}@{self.version}"],
            cwd=SOURCE,
            capture_output=True,
            check=True,
        )
        module = json.loads(done.stdout)
        assert module["Sum"] == self.sum, f"{self.path} {self.version} has the sum {module['Sum']}"
        return Path(module["Dir"])

    def compile(self) -> None:
        """Put its programs where the tests look for them."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        for package in self.packages:
            if not (program := self.program(package)).is_file():
                go_build(f"cmd/{package}", source=self.source(), program=program)


KEDA = GoModule(
    path="github.com/kedacore/keda/v2",
    version="v2.21.0",
    sum="h1:R6z2HZvstK4RLUMxroNACzBj74xGxt3kG59b5Xc+Xps=",
    packages=("operator", "adapter"),
)
"""Its operator, and the server of the metrics that an autoscaler reads."""

ROUTER = GoModule(
    path="github.com/cloudnativelabs/kube-router/v2",
    version="v2.1.0",
    sum="h1:xWsptKtmZ44L+NjwFKoFAFlVdxCz8fka9A/eYJe95Ok=",
    packages=("kube-router",),
)
"""Enforces network policies by rules of the kernel."""

if __name__ == "__main__":
    if lacking := missing_for_server():
        sys.exit(f"test-cluster: {lacking}")
    for module in (KEDA, ROUTER):
        module.compile()
