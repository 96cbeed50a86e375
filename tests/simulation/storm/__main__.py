"""Runs seeds of the storm and prints what they found; `make storm SEEDS=n` calls it.

Exit status: 0 if no schedule found a defect, 1 otherwise.
"""

import argparse
import dataclasses
import functools
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tests.simulation.storm.cases import CASES
from tests.simulation.storm.claims import Played, run_claims_seed
from tests.simulation.storm.grading import Graded, run_grading_seed
from tests.simulation.storm.points import FAULTS, run_edge_point
from tests.simulation.storm.schedule import run_seed

EDGES: Mapping[str, Callable[[int], Graded | Played]] = {
    "grading": run_grading_seed,
    "claims": run_claims_seed,
    **{case: functools.partial(run_edge_point, case) for case in FAULTS},
}
"""Cases that are no transform over a script, by name."""

DRAWN = (*CASES, "grading", "claims")
"""Cases whose schedules are drawn from their seed; the others run if they are named."""

_PROGRESS_EVERY = 500


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make storm")
    parser.add_argument("--seeds", type=int, default=100, help="of each case")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", choices=(*CASES, *EDGES), help="only this one")
    parser.add_argument("--stop", action="store_true", help="at the first defect")
    chosen = parser.parse_args(arguments)
    cases = [chosen.case] if chosen.case else DRAWN
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    defects = 0
    for case in cases:
        defects += run_case(case, seeds, stops=chosen.stop)
        if defects and chosen.stop:
            break
    say(f"{len(cases) * len(seeds)} schedules, {defects} with a defect")
    return 1 if defects else 0


def run_case(name: str, seeds: range, *, stops: bool) -> int:
    """Run these seeds; print each defect with its seed, and what the schedules went through."""
    began_s, sums, defects = time.process_time(), Counter[str](), 0
    for seed in seeds:
        try:
            sums.update(counts_of(name, seed))
        except Exception as error:  # noqa: BLE001 - printed with its seed, the next one runs
            defects += 1
            say(f"DEFECT {name} seed {seed}\n{''.join(traceback.format_exception(error))}")
            if stops:
                break
        if (seed + 1) % _PROGRESS_EVERY == 0:
            say(f"{name}: seed {seed} done")
    cpu_s = time.process_time() - began_s
    counts = ", ".join(f"{what} {count:,}" for what, count in sums.items())
    say(f"{name}: {len(seeds)} schedules, {defects} with a defect, {cpu_s:.1f} s CPU; {counts}")
    return defects


def counts_of(name: str, seed: int) -> dict[str, int]:
    """Run one schedule; returns how often what happened."""
    if name in EDGES:
        return dataclasses.asdict(EDGES[name](seed))
    outcome = dataclasses.asdict(run_seed(CASES[name], seed))
    tasks = outcome.pop("tasks")
    return outcome | {
        what: sum(task[what] for task in tasks) for what in ("inputs", "ticks", "batches")
    }


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
