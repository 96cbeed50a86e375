"""Does a reward for completion time make agents work in parallel, by the clock on the wall?

Plays the shop desk with tools that really take their seconds (`shop_desk.real_time`), once with the
reward for speed and once without, and compares the held-out tasks after the last step. The wall
time of an episode has the queueing of its own machine in it, so the two cases are comparable with
each other and with no other machine; completion time has none of it.

    make load NAME=completion_time JSON=completion_time.json    # two runs, one after the other
"""

import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measurement import Measurement, arguments

from forgemq_episode_files.arrow_rows import from_arrow
from forgemq_episode_files.reading import read_rows
from forgemq_episode_files.rows import EpisodeRow

ROOT = Path(__file__).parents[1]
RUN_FILE = "deploy/demo/run.toml"
REAL_TIME = (
    'queues.shop_desk.agent="shop_desk.real_time:play"',
    'queues.shop_desk.speed="shop_desk.real_time:speed"',
)
# Fixed before the first run; without the reward `speed` is measured and weighs nothing.
CASES = {"with_speed": "rewards.beta=1.0", "without_speed": "rewards.beta=0.0"}
SEED = 0
UNITS = {"success_sampled": "share", "parallel_share": "share"}


def forgemq(*command: str) -> None:
    """Run the tool; raises CalledProcessError if it fails."""
    tool = str(Path(sys.executable).with_name("forgemq"))
    subprocess.run([tool, *command], cwd=ROOT, check=True)


def played(case: str) -> list[EpisodeRow]:
    """Every episode of a case's run, which is played unless it was before."""
    name = f"completion-time-{case.replace('_', '-')}"
    folder = ROOT / "runs" / name
    if not (folder / "report.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        forgemq("run", RUN_FILE, f"run={name}", f"seed={SEED}", CASES[case], *REAL_TIME)
    rows = folder / "episodes"
    shutil.rmtree(rows, ignore_errors=True)
    forgemq("export", name, "--to", str(rows))
    files = sorted(rows.glob("*.parquet"))
    return [from_arrow(values) for path in files for values in read_rows(path)]


def results(rows: Sequence[EpisodeRow], *, round_name: str) -> dict[str, float]:
    """What the unmasked episodes of one round took and reached."""
    found = [row for row in rows if row.round_name == round_name and not row.is_masked]
    metrics = [{each.name: each.value for each in row.metrics} for row in found]
    turns = sum(each["calling_turns"] for each in metrics)
    return {
        "wall_s_per_episode": statistics.fmean(each["duration_s"] for each in metrics),
        "completion_s_per_episode": statistics.fmean(
            each.get("alone_s", each["engine_s"]) + each["tool_s"] for each in metrics
        ),
        "tool_s_per_episode": statistics.fmean(each["tool_s"] for each in metrics),
        "parallel_share": sum(each["parallel_turns"] for each in metrics) / max(1.0, turns),
        "success_sampled": statistics.fmean((row.outcome or 0.0) >= 0.5 for row in found),
    }


def main() -> int:
    """Play both cases and print the table."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="completion_time",
        question="Does a reward for completion time make agents work in parallel?",
        conditions={"run": f"{RUN_FILE} with tools that take their seconds, seed {SEED}"},
    )
    for case in CASES:
        rows = played(case)
        for when in ("start", "end"):
            name = case if when == "end" else f"{case}, before"
            for metric, value in results(rows, round_name=f"{when}-sampled").items():
                measurement.row(name, metric, value, UNITS.get(metric, "s"))
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
