"""Sends a gateway fuzzed bodies of every protocol; `make fuzz BODIES=n` calls it.

Exit status: 0 if every answer was one that a client may get and nothing was lost, 1 otherwise.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import uvloop

from tests.fuzz.serving import fuzz
from tests.unit.rendering.folders import write_model_folder

_BODIES_OF_GATEWAY = 5_000
"""Each gateway gets a new log in memory, whose records the collector of cycles looks at too."""

_STALL_S_MAX = 0.1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first body")
    chosen = parser.parse_args(arguments)
    defects, answers = 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="forgemq-fuzz-") as folder:
        model = write_model_folder(Path(folder) / "model")
        end = chosen.first + chosen.bodies
        for first in range(chosen.first, end, _BODIES_OF_GATEWAY):
            count = min(_BODIES_OF_GATEWAY, end - first)
            found = uvloop.run(fuzz(model, first=first, count=count))
            answers.update(found.answers)
            wrong = list(found.defects)
            if found.loop_cpu_s > _STALL_S_MAX:
                wrong.append(
                    f"the event loop worked {found.loop_cpu_s:.3f} s without a look around"
                )
            defects += len(wrong)
            say("".join(f"DEFECT {each}\n" for each in wrong[:20]), end="")
            say(
                f"{first + count} bodies; {found.turns} turns; the event loop was busy for at most "
                f"{found.loop_cpu_s * 1000:.0f} ms of CPU, {found.loop_wall_s * 1000:.0f} ms"
            )
    counts = ", ".join(f"{name}: {count:,}" for name, count in sorted(answers.items()))
    say(f"{chosen.bodies:,} bodies, {defects} defects; {counts}")
    return 1 if defects else 0


def say(text: str, *, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
