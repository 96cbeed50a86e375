"""How long after a step do engines have its weights, which are published before they are durable?

The real trainer takes steps on a Qwen3 of 56 million random parameters, on a log in memory, with
its blobs in a folder. One lane takes the files by relay, as an inference process does, and loads
them nowhere. All times are from the end of a step's last update:

- `offered_s`: the record that lanes on the fast path load by, which needs the file alone;
- `received_s`: the lane has all files;
- `durable_s`: the record that names the durable copy, which all other lanes load by;
- `recorded_s`: the step's record, after which the weights would be published if the durable copy
  and the checkpoint came first.

`offered_over_recorded` is the share of the wait that is left. Case `checkpoint_each_step` writes a
checkpoint after every step, `checkpoint_at_the_end` after the last one.

    make load NAME=publishing JSON=publishing.json      # one minute on two cores
"""

import asyncio
import hashlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from larger_model import larger_model
from measurement import Measurement, parser_of
from msgspec import Struct
from msgspec.structs import replace
from stand_in_lane import heartbeat
from tree_workloads import VOCABULARY, Shape, merged_tree, requests

from forgemq_bus.blobs import BlobStore
from forgemq_bus.decoding import decoded_record
from forgemq_bus.log import Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, StartedRun, Trainer
from forgemq_contracts.steps import ScheduledGroup, ScheduledStep, TrainedStep
from forgemq_contracts.trees import MergedTree
from forgemq_contracts.weights import PublishedWeights
from forgemq_shell.records import emit_of
from forgemq_shell.service import Context
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.app import CONSUMES, PRODUCES
from forgemq_trainer.app import main as train
from forgemq_weight_relay import Receiver, WeightsKey

_SHAPE = Shape(rollouts=2, turns=2, prompt=32, act=16, observe=16)
_STEPS = 8
_CASES = {"checkpoint_each_step": 1, "checkpoint_at_the_end": 1000}
_RUN = "publishing"
_POLL_S = 0.005
"""Between two looks at the log: the error of each time."""
_WAIT_S = 120.0


class Times:
    """When each record of each version was seen, and when a lane had its files; monotonic seconds.

    `ended` is when the step's last update ended, which the trainer says when it records the step.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[int, str], float] = {}
        self.all_seen = asyncio.Event()

    def note(self, version: int, what: str, at_s: float | None = None) -> None:
        """Note the first time of it."""
        self.seen.setdefault((version, what), time.monotonic() if at_s is None else at_s)
        if {(_STEPS, each) for each in ("ended", "received", "durable")} <= self.seen.keys():
            self.all_seen.set()

    def since_end(self, version: int, what: str) -> float:
        """Seconds from the step's end."""
        return self.seen[version, what] - self.seen[version, "ended"]


class TimedEvents(io.StringIO):
    """The trainer's event lines; one that says `trained` gives the end of its step."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self._times = times

    def write(self, text: str) -> int:
        """Take in a line."""
        if '"trained"' in text:
            event = json.loads(text)
            ended_s = time.monotonic() - event["saving_s"]
            self._times.note(event["step"] + 1, "ended", ended_s)
        return len(text)


def trees_of(count: int) -> list[MergedTree]:
    """One small tree for each step; they differ by name."""
    tree = merged_tree(requests(_SHAPE))
    return [replace(tree, group_id=f"g-{number}") for number in range(count)]


def scheduled(step: int, tree: MergedTree) -> ScheduledStep:
    """The step that trains this tree alone."""
    tokens = len(tree.tokens) // 4
    group = ScheduledGroup(
        group_id=tree.group_id,
        domain="load",
        queue_index=0,
        partition=0,
        tree_sha256=hashlib.sha256(topics.encode(tree)).hexdigest(),
        tree_tokens=tokens,
        loss_tokens=len(tree.entry_token) // 4,
        attention_pairs=tokens * tokens,
        version_min=0,
        staleness=step,
        request_tokens=tokens,
        append_tokens=tokens,
    )
    is_last = step == _STEPS - 1
    return ScheduledStep(step=step, groups=(group,), staleness_bound=99, is_last=is_last)


async def _write(log: MemoryLog, records: Sequence[tuple[topics.Topic, Struct]]) -> None:
    writer = await log.transaction_writer("load")
    outputs = [
        emit_of(Output(topic=topic.name, partition=0, record=record), headers=())
        for topic, record in records
    ]
    await writer.commit(outputs=outputs, group="load", positions={})


async def _follow(log: MemoryLog, times: Times) -> None:
    """Note when each publication and each step's record is on the log."""
    places = [Place(topic.name, 0) for topic in (topics.PUBLISHED_WEIGHTS, topics.TRAINED_STEPS)]
    reader = await log.reader(dict.fromkeys(places, 0))
    while True:
        for record in await reader.read(timeout_s=_POLL_S, records_max=100):
            found = decoded_record(record)
            if isinstance(found, TrainedStep):
                times.note(found.step + 1, "recorded")
            elif isinstance(found, PublishedWeights):
                times.note(found.version, "durable" if found.is_durable else "offered")


async def _report_lane(log: MemoryLog, address: str) -> None:
    while True:
        report = heartbeat(weights_address=address)
        await _write(log, [(topics.REPORTED_ENGINES, report)])
        await asyncio.sleep(0.5)


async def _receive(receiver: Receiver, times: Times) -> None:
    for version in range(1, _STEPS + 1):
        copy = await asyncio.to_thread(
            receiver.wait, WeightsKey(1, version), timeout_s=_WAIT_S * _STEPS
        )
        if copy is not None:
            times.note(version, "received")


@asynccontextmanager
async def _lane(log: MemoryLog, folder: Path, times: Times) -> AsyncIterator[None]:
    """A lane that takes relayed files, during the block."""

    def ignore(*_: object) -> None: ...

    receiver = Receiver(folder, run=_RUN, host="127.0.0.1", on_relayed=ignore, on_broken=ignore)
    tasks = [
        asyncio.create_task(work)
        for work in (
            _report_lane(log, receiver.address),
            _receive(receiver, times),
            _follow(log, times),
        )
    ]
    try:
        yield
    finally:
        receiver.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def configuration_of(base: Path, *, checkpoint_every_steps: int) -> RunConfiguration:
    """The run of a case."""
    return RunConfiguration(
        run=_RUN,
        seed=0,
        model=Model(path=str(base), dtype="float32", context_tokens_max=512),
        queues=(Queue(domain="load", task_source="a:b", agent="a:c", groups_per_step=1, slots=2),),
        trainer=Trainer(
            steps=_STEPS, checkpoint_every_steps=checkpoint_every_steps, checkpoint_share_max=1.0
        ),
        log=LogLayout(group_partitions=1),
    )


async def times_of(base: Path, folder: Path, *, checkpoint_every_steps: int) -> Times:
    """Train all steps of a case."""
    log, times, stop = MemoryLog(run=_RUN), Times(), asyncio.Event()
    configuration = configuration_of(base, checkpoint_every_steps=checkpoint_every_steps)
    used = {*CONSUMES, *PRODUCES}
    counts = {topic.name: topics.partition_count(topic, configuration) for topic in used}
    await log.create_topics(counts | {topic.dlq_name: 1 for topic in CONSUMES})
    trees = trees_of(_STEPS)
    await _write(log, [(topics.MERGED_TREES, tree) for tree in trees])
    blobs = str(folder / "blobs")
    context = Context(
        started=StartedRun(run=_RUN, configuration=configuration, blobs=blobs, started_ms=0),
        log=log.open(),
        blobs=BlobStore(blobs, run=_RUN),
        telemetry=Telemetry(service="trainer", stream=TimedEvents(times)),
        stop=stop,
        environ={
            "FORGEMQ_TRAINER_FOLDER": str(folder / "trainer"),
            "FORGEMQ_TRAINER_FAST_PATH": "relay",
        },
    )
    async with _lane(log, folder / "lane", times):
        training = asyncio.create_task(train(context))
        await asyncio.sleep(2.0)  # Some reports of the lane, so that the trainer has read one.
        await _write(
            log,
            [(topics.SCHEDULED_STEPS, scheduled(step, tree)) for step, tree in enumerate(trees)],
        )
        await asyncio.wait_for(times.all_seen.wait(), _WAIT_S * _STEPS)
        stop.set()
        await training
    return times


def add_rows(measurement: Measurement, case: str, times: Times) -> None:
    """Medians over all versions but the first, which is published after its record."""
    versions = range(3, _STEPS)
    found = {
        what: statistics.median(times.since_end(version, what) for version in versions)
        for what in ("offered", "received", "durable", "recorded")
    }
    for what, seconds in found.items():
        measurement.row(case, f"{what}_s", seconds, "s")
    measurement.row(case, "offered_over_recorded", found["offered"] / found["recorded"], "x")


def main() -> int:
    """Measure the named cases, or both."""
    options = parser_of(__doc__ or "").parse_args()
    measurement = Measurement(
        name="publishing",
        question="What do engines no longer wait for before they have a step's weights?",
        conditions={
            "model": "Qwen3 of 56 million parameters, float32",
            "steps": f"{_STEPS}, the median of versions 3 to {_STEPS - 1}",
        },
    )
    with tempfile.TemporaryDirectory() as name:
        base = larger_model(Path(name) / "base", vocab_size=VOCABULARY)
        for case, every in _CASES.items():
            if not options.case or case in options.case:
                folder = Path(name) / case
                folder.mkdir()
                times = asyncio.run(times_of(base, folder, checkpoint_every_steps=every))
                add_rows(measurement, case, times)
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
