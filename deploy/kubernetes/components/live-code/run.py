"""Runs a service from a copy of the image's code, and starts it again on SIGHUP.

    python run.py IMAGE COPY [ARGUMENT...]

IMAGE holds the packages and the file `module`, which names what to start. COPY, which is in
PYTHONPATH, is made of it unless it is there: a root that is read-only takes no changed file, and a
volume does. SIGTERM goes to the service, and its exit status is this one's.
"""

import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def copied(image: Path, copy: Path) -> Path:
    """The copy, which is whole even if making it was interrupted before."""
    if not copy.is_dir():
        draft = copy.with_name(f"{copy.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(image, draft)
        draft.rename(copy)
    return copy


def run(command: Sequence[str]) -> int:
    """Run the command until it ends by itself or is asked to; its exit status."""
    again = stopped = False
    child = subprocess.Popen(command)

    def pass_on(number: int, _: object) -> None:
        nonlocal again, stopped
        stopped = stopped or number != signal.SIGHUP
        again = not stopped
        child.terminate()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    status = child.wait()
    while again:
        again = False
        child = subprocess.Popen(command)
        if stopped:  # Asked meanwhile, when the one before had ended.
            child.terminate()
        status = child.wait()
    return status if status >= 0 else 128 - status


def main(arguments: Sequence[str]) -> int:
    """Run the service of an image from the copy."""
    image, copy, *given = arguments
    code = copied(Path(image), Path(copy))
    module = (code / "module").read_text().strip()
    return run([sys.executable, "-m", module, *given])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
