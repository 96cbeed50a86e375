"""Prints what an image has installed, as JSON: packages of Python and of Debian.

It runs in the image.
"""

import json
import subprocess
import sys
from importlib.metadata import distributions


def main() -> int:
    """Print both lists; the exit status is 0."""
    python = {}
    for found in distributions():
        name, of = found.metadata["Name"], found.metadata
        licence = of["License-Expression"] or ""
        python[name.lower()] = {"name": name, "version": found.version, "licence": licence}
    listed = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package}\t${Version}\t${Architecture}\n"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = (line.split("\t") for line in listed.stdout.splitlines())
    debian = [dict(zip(("name", "version", "architecture"), row, strict=True)) for row in rows]
    json.dump(
        {"python": sorted(python.values(), key=lambda p: p["name"]), "debian": debian}, sys.stdout
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
