"""What does a run keep to its end, what does it hold for a while, and does either grow with time?

A run at 1,000,000 completions a day, in less time: the clock is a variable that moves by 86.4 ms
with each completion, so snapshots, heartbeats, audits, trims and sweeps come after as many
completions as they would. Real are the tasks of reward, merger and scheduler with their settings,
the wire bytes of every record, and the auditor: its audit, its trim and its sweep of the blobs. The
log is the one in memory, blobs are files. What gateway, agents, graders, lanes and trainer write
is written by `retention_outside.py`, with their structs and their commits.

Each case runs for N completions and, as a fresh run, for 4 N. Kept to the end are the topics that
nothing trims; all else is held. Bytes are those of keys, values and headers, before the broker
compresses them, and of the blobs as they are stored.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measurement import Measurement, arguments
from retention_outside import COMPLETIONS_A_DAY, WORKLOADS, Workload
from retention_run import SWEEP_GRACE_S, Retained, retained
from retention_state import measure_state

from forgemq_contracts import topics

DAYS = 30
LONGER = 4
Report = Callable[[str, float, str], None]


def measure(workload: Workload, report: Report, *, has_topics: bool) -> None:
    """Run the workload once, and once for longer; add the rows of the longer run."""
    short, long = _run(workload, times=1), _run(workload, times=LONGER)
    kept = long.kept_bytes / long.completions
    report("completions", long.completions, "")
    report("kept_bytes_per_completion", kept, "bytes")
    report("kept_growth", kept / (short.kept_bytes / short.completions), "x")
    report("written_bytes_per_completion", long.written_bytes / long.completions, "bytes")
    report("held_bytes_max", long.held_bytes_max, "bytes")
    report("held_growth", long.held_bytes_max / short.held_bytes_max, "x")
    report("blob_bytes_written_per_completion", long.blob_bytes / long.completions, "bytes")
    report("blob_bytes_max", long.blob_bytes_max, "bytes")
    if short.blob_bytes:
        report("blob_growth", long.blob_bytes_max / short.blob_bytes_max, "x")
    report("kept_30_days", _scaled_gb(long, long.kept_bytes), "GB")
    report("written_30_days", _scaled_gb(long, long.written_bytes + long.blob_bytes), "GB")
    for service, size in long.snapshot_bytes.items():
        report(f"snapshot_bytes_max {service}", size, "bytes")
    if has_topics:
        for topic in topics.OF_RUN:
            _report_topic(topic, long, report)


def _scaled_gb(run: Retained, size_bytes: int) -> float:
    """GB in 30 days, of what these completions have left."""
    return size_bytes / run.completions * COMPLETIONS_A_DAY * DAYS / 1e9


def _report_topic(topic: topics.Topic, run: Retained, report: Report) -> None:
    written = run.written_by_topic.get(topic.name, 0)
    report(f"{topic.name} written a completion", written / run.completions, "bytes")
    if topic.needed_by:
        report(f"{topic.name} held at most", run.held_by_topic.get(topic.name, 0), "bytes")


def _run(workload: Workload, *, times: int) -> Retained:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        return asyncio.run(retained(workload, groups=workload.groups * times, folder=folder))


def main() -> int:
    """Measure all workloads, or those that --case names."""
    options = arguments(__doc__ or "", flags={"topics": "add rows for every topic"})
    measurement = Measurement(
        name="retention",
        question="What does a run keep to its end, and what does it hold for a while?",
        conditions={
            "clock": f"{COMPLETIONS_A_DAY:,} completions a day",
            "grace of the sweep": f"{SWEEP_GRACE_S:.0f} s",
        },
    )
    started_s = time.monotonic()
    for case, workload in WORKLOADS.items():
        if options.case and case not in options.case:
            continue
        measurement.conditions[case] = repr(workload)
        measure(
            workload,
            lambda *row, case=case: measurement.row(case, *row),
            has_topics=options.topics,
        )
    if not options.case or "state" in options.case:
        measure_state(lambda *row: measurement.row("state", *row))
    measurement.conditions["took"] = f"{time.monotonic() - started_s:.0f} s"
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
