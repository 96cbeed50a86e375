"""The wall clock of one container, which can jump: libfaketime, and a file that says by how much.

All containers of a machine share its clock, so it is the calls to it that are answered otherwise.
The monotonic clock stays as it is, as it does when a machine's clock is set.
"""

from pathlib import Path

from docker.types import Mount

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
HOW_TO = "no libfaketime, which steps a container's clock; on Debian: apt-get install libfaketime"

READ_AGAIN_S = 1
"""How often a process looks at the file; a look at every call would slow all of them."""

VARIABLES = {
    "LD_PRELOAD": "/faketime/library.so",
    "FAKETIME_TIMESTAMP_FILE": "/faketime/step/seconds",
    "FAKETIME_CACHE_DURATION": str(READ_AGAIN_S),
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    "NO_FAKE_STAT": "1",
}


class SteppedClock:
    """What a container with `VARIABLES` and `mounts` takes for the time.

    Args:
        folder: Has the file; only this clock's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.step(0)

    def step(self, by_s: int) -> None:
        """Be this many seconds ahead of the machine, or behind it."""
        written = self._folder / "seconds.new"
        written.write_text(f"{by_s:+d}\n")
        written.replace(self._folder / "seconds")

    def mounts(self) -> tuple[Mount, ...]:
        """The library and the file, for the container."""
        return (
            Mount("/faketime/library.so", str(LIBRARY), type="bind", read_only=True),
            Mount("/faketime/step", str(self._folder), type="bind", read_only=True),
        )
