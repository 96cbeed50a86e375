"""Prints a tag that stands for all that an image is made from: equal tags are equal images.

Usage: fingerprint.py IMAGE. A change elsewhere in the workspace, or of another package of the lock,
leaves the tag as it is.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import pins

ROOT = Path(__file__).parents[2]
IMAGES = Path(__file__).parent
MODEL = "demo-model"
LETTERS = 16


def main(image: str) -> int:
    """Print the tag; returns 1 if there is no such image."""
    with tempfile.TemporaryDirectory() as folder:
        if image == MODEL:
            sources = [ROOT / "deploy/demo/Dockerfile", *tracked("deploy/demo/model")]
        elif (parts := parts_of(image, Path(folder))) is None:
            return 1
        else:
            sources = parts
        digest = hashlib.sha256()
        for path in sources:
            name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
            digest.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    sys.stdout.write(f"files-{digest.hexdigest()[:LETTERS]}\n")
    return 0


def parts_of(image: str, folder: Path) -> list[Path] | None:
    """All files that the image of a service is made from; None if there is no such image."""
    sources = [IMAGES / "Dockerfile", IMAGES / "pins.py"]
    for name in ("tools", image):
        lock, contents = ROOT / "requirements.lock", IMAGES / "contents.toml"
        if pins.main(lock, contents, name, folder / name):
            return None
        sources += sorted((folder / name).iterdir())
    return sources + tracked(*(folder / image / "folders").read_text().split())


def tracked(*folders: str) -> list[Path]:
    """The files of these folders that Git has or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard", "--", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in sorted(listed.stdout.split("\0")) if (ROOT / name).is_file()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
