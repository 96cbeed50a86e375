"""The wall clock of one container, which can jump: a library answers the calls for it.

All containers of a machine share its clock, so a library answers the calls for it instead. The
monotonic clock stays as it is, as it does when a machine's clock is set.
"""

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("stepped_clock.c")
FOLDER_INSIDE = "/stepped-clock"
"""Where a container finds the clock's folder."""

VARIABLES = {
    "LD_PRELOAD": f"{FOLDER_INSIDE}/library.so",
    "STEPPED_CLOCK_FILE": f"{FOLDER_INSIDE}/seconds",
}


class SteppedClock:
    """The wall clock that a container with `VARIABLES` reads.

    Args:
        folder: Gets the compiled library and the seconds; for this clock alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._seconds = folder / "seconds"
        self._seconds.write_bytes(bytes(8))
        command = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", SOURCE]
        subprocess.run([*command, "-o", folder / "library.so"], check=True)

    def step(self, by_s: int) -> None:
        """Be this many seconds ahead of the machine, or behind it."""
        with self._seconds.open("r+b") as file:
            file.write(by_s.to_bytes(8, "little", signed=True))
