"""`python -m tests.gpu.record_run RUN`: keep the first steps of a finished run of the demo.

The run was trained on a CPU and kept its log (`log.keep_for_replay`).
"""

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from forgemq_bus.decoding import decoded_record
from forgemq_bus.kept_records import read_all
from forgemq_bus.partitions import partitions_of
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.topics import MERGED_TREES, SCHEDULED_STEPS, TRAINED_STEPS
from forgemq_contracts.trees import MergedTree
from forgemq_launcher.commands.run_on_broker import run_on_broker
from forgemq_launcher.run_folder import RunFolder
from tests.gpu.recorded_run import RecordedRun, write_recorded_run

REPOSITORY = Path(__file__).parents[2]
STEPS = 6
"""Enough for weights that a wrong gradient would have moved elsewhere."""


async def record(folder: RunFolder) -> RecordedRun:
    """The first steps of the run in this folder."""
    scheduled: list[ScheduledStep] = []
    trained: list[TrainedStep] = []
    trees: dict[str, MergedTree] = {}
    async with run_on_broker(folder, os.environ) as (log, started):
        configuration = started.configuration
        for topic in (SCHEDULED_STEPS, TRAINED_STEPS, MERGED_TREES):
            async for records in read_all(log, partitions_of(topic, configuration)):
                for found in map(decoded_record, records):
                    match found:
                        case ScheduledStep() if found.step < STEPS:
                            scheduled.append(found)
                        case TrainedStep() if found.step < STEPS:
                            trained.append(found)
                        case MergedTree():
                            trees[found.group_id] = found
    path = str(Path(configuration.model.path).relative_to(REPOSITORY))
    model = msgspec.structs.replace(configuration.model, path=path)
    wanted = [group.group_id for step in scheduled for group in step.groups]
    return RecordedRun(
        configuration=msgspec.structs.replace(configuration, model=model),
        scheduled=tuple(sorted(scheduled, key=lambda step: step.step)),
        trees=tuple(trees[group_id] for group_id in wanted),
        trained=tuple(sorted(trained, key=lambda step: step.step)),
    )


if __name__ == "__main__":
    write_recorded_run(asyncio.run(record(RunFolder(Path("runs") / sys.argv[1]))))
