"""Writes what one image installs: entries of the lock with their hashes, and the rest of its table.

Usage: pins.py requirements.lock contents.toml IMAGE FOLDER. It runs while an image is built, on a
bare Python. An image installs its own entries alone, so a change of the lock or of another image
rebuilds nothing of it.
"""

import re
import sys
import tomllib
from pathlib import Path


def main(lock: Path, contents: Path, image: str, folder: Path) -> int:
    """Write `packages`, a requirements file, and a file of words for each other key.

    Returns 1 if there is no such image, or if the lock lacks a package.
    """
    entries = {
        re.sub(r"[-_.]+", "-", re.split(r"[=\\[ ]", entry)[0]).lower(): entry
        for entry in re.findall(r"^[A-Za-z0-9].*\n(?:    --hash=.*\n)*", lock.read_text(), re.M)
    }
    images = tomllib.loads(contents.read_text())
    if image not in images:
        sys.stderr.write(f"no image {image!r}: {contents.name} has {', '.join(images)}\n")
        return 1
    lacking = [name for name in images[image]["packages"] if name not in entries]
    if lacking:
        sys.stderr.write(f"{lock.name} has no {', '.join(lacking)}: run `make lock`\n")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    for key, values in images[image].items():
        words = [entries[value] for value in values] if key == "packages" else values
        (folder / key).write_text(("" if key == "packages" else " ").join(words))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
