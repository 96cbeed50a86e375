"""How long do engines stand still for new weights, and what does the trainer send for it?

`engines_1` to `engines_3`: real engines on a CPU with a Qwen3 of 56 million random parameters, each
generating. A version reaches them by relay, then the next one by broadcast (one gloo group for each
lane), in turns; then versions come through one gloo group of all lanes (`shared`). After each load
a few parameters are read back. All lanes' inference code and the trainer's run in this process;
files go to a folder in memory if the machine has one with room. `stand_ins_4` to `stand_ins_16`:
engines that load nothing, with the demo's model.

`step_to_served_s` is from a step's end, with its file written, until the last engine serves it;
`broadcast_step_to_served_s` and `shared_step_to_served_s` the same by broadcast. `transfer_s` is
until the last lane has all files, `pause_s` the longest pause of an engine by relay, and
`pause_over_transfer` their ratio. `pause_over_broadcast` compares `pause_s` with the pause by
broadcast in the same rounds, and `shared_pause_over_broadcast` the one through the group of all
lanes: a broadcast is nearly all pause, so that its own ratio to the transfer says nothing.
`bytes_sent_over_one_lane` is what the trainer sends by relay over the bytes of one copy;
`broadcast_bytes_sent_over_one_lane` and `shared_bytes_sent_over_one_lane` are what this process
writes for a version by the other two ways, by the kernel's count: a copy for each lane, and a copy
for each level of the binomial tree of Gloo's one group. `shared_form_s` is how long the group takes
to form, while the engines generate.

    make load NAME=weight_update JSON=weight_update.json      # 2 minutes on two cores
    make load NAME=weight_update CASE=engines_3
"""

import asyncio
import shutil
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import torch
from larger_model import larger_model
from measurement import Measurement, parser_of
from real_engines import real_engines
from safetensors.torch import load_file, save_file
from stand_in_answers import Speed
from stand_in_engine import StandInEngine, serving
from weight_lanes import TIMEOUT_S, Lane, Trainer, Update

from forgemq_inference.engine import Engine

_DEMO = Path(__file__).parents[1] / "deploy" / "demo" / "model"
_ENGINES = (1, 2, 3)
_STAND_INS = (4, 8, 16)
_ROUNDS = 3

_MEMORY = Path("/dev/shm")
_FILES_BYTES = 4 << 30
"""Twice eight copies of 222 MB, two of the trainer's and two in each lane, and some room."""


async def measure_engines(measurement: Measurement, cases: Sequence[int], folder: Path) -> None:
    """Rows of the cases with real engines."""
    first, second = _models(folder)
    async with real_engines(first, folder, count=max(cases)) as engines:
        lanes = [Lane(number, engine, folder) for number, engine in enumerate(engines)]
        trainer = Trainer((first, second))
        await trainer.broadcast(lanes)  # Groups are formed, and what is compiled once is.
        await trainer.relay(lanes)
        for count in cases:
            await trainer.broadcast(lanes[:count])  # Forms the groups that are left.
            relays, broadcasts = [], []
            for _ in range(_ROUNDS):
                async with _generating(engines):
                    relays.append(await trainer.relay(lanes[:count]))
                    broadcasts.append(await trainer.broadcast(lanes[:count]))
            shared = []
            async with _generating(engines):
                form_s = await trainer.form_group(lanes[:count])
            for _ in range(_ROUNDS):
                async with _generating(engines):
                    shared.append(await trainer.broadcast_to_all(lanes[:count]))
            name = f"engines_{count}"
            measurement.row(name, "shared_form_s", form_s, "s")
            _rows(measurement, name, relays, size_bytes=trainer.size_bytes)
            pause_rows(measurement, name, relays=relays, broadcasts=broadcasts, shared=shared)
            for way, updates in (("broadcast", broadcasts), ("shared", shared)):
                sent = statistics.median(each.sent_bytes for each in updates) / trainer.size_bytes
                measurement.row(name, f"{way}_bytes_sent_over_one_lane", sent, "x")
        trainer.broadcasts.close()
        trainer.shared.close()
        for lane in lanes:
            lane.relayed.close()


async def measure_stand_ins(measurement: Measurement, count: int, folder: Path) -> None:
    """Rows of one case with engines that load nothing."""
    first, second = folder / "a", folder / "b"
    shutil.copytree(_DEMO, first)
    _perturb(_DEMO, second)
    async with AsyncExitStack() as stack:
        lanes = []
        for number in range(count):
            url = await stack.enter_async_context(serving(StandInEngine(Speed())))
            engine = await stack.enter_async_context(Engine(url))
            lanes.append(Lane(number, engine, folder))
        trainer = Trainer((first, second))
        updates = [await trainer.relay(lanes) for _ in range(_ROUNDS)]
        for lane in lanes:
            lane.relayed.close()
    _rows(measurement, f"stand_ins_{count}", updates, size_bytes=trainer.size_bytes)


def _rows(
    measurement: Measurement, name: str, updates: Sequence[Update], *, size_bytes: int
) -> None:
    sent = statistics.median(each.sent_bytes for each in updates)
    served_s = statistics.median(each.served_s for each in updates)
    transfer_s = statistics.median(each.transfer_s for each in updates)
    measurement.row(name, "copy_bytes", size_bytes, "B")
    measurement.row(name, "bytes_sent_over_one_lane", sent / size_bytes, "x")
    measurement.row(name, "step_to_served_s", served_s, "s")
    measurement.row(name, "transfer_s", transfer_s, "s")


def pause_rows(
    measurement: Measurement,
    name: str,
    *,
    relays: Sequence[Update],
    broadcasts: Sequence[Update],
    shared: Sequence[Update],
) -> None:
    """Rows of the pauses and of the time until a version is served, by each of the three ways."""
    pause_s, broadcast_pause_s, shared_pause_s = (
        statistics.median(each.pause_s for each in updates)
        for updates in (relays, broadcasts, shared)
    )
    transfer_s = statistics.median(each.transfer_s for each in relays)
    broadcast_s = statistics.median(each.served_s for each in broadcasts)
    shared_s = statistics.median(each.served_s for each in shared)
    measurement.row(name, "pause_s", pause_s, "s")
    measurement.row(name, "pause_over_transfer", pause_s / transfer_s, "x")
    measurement.row(name, "pause_over_broadcast", pause_s / broadcast_pause_s, "x")
    measurement.row(name, "broadcast_step_to_served_s", broadcast_s, "s")
    measurement.row(name, "broadcast_pause_s", broadcast_pause_s, "s")
    measurement.row(name, "shared_step_to_served_s", shared_s, "s")
    measurement.row(name, "shared_pause_s", shared_pause_s, "s")
    ratio = shared_pause_s / broadcast_pause_s
    measurement.row(name, "shared_pause_over_broadcast", ratio, "x")


@asynccontextmanager
async def _generating(engines: Sequence[Engine]) -> AsyncIterator[None]:
    """One long request in each engine during the block."""
    sampling = {"temperature": 1.0, "max_new_tokens": 3000, "ignore_eos": True}
    async with asyncio.TaskGroup() as tasks:
        requests = [
            tasks.create_task(
                engine.generate(
                    {"input_ids": [5, 6, 7, number], "sampling_params": sampling},
                    timeout_s=TIMEOUT_S,
                )
            )
            for number, engine in enumerate(engines)
        ]
        await asyncio.sleep(1.0)
        yield
        for request in requests:
            request.cancel()
        for engine in engines:
            await engine.abort_all()


def _files_on() -> Path | None:
    """Where files go: memory, or the machine's temporary folder if there is no room.

    On a disk to which other work writes, pauses and transfers measure that work too.
    """
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _FILES_BYTES
    return _MEMORY if has_room else None


def _models(folder: Path) -> tuple[Path, Path]:
    first, second = folder / "first", folder / "second"
    larger_model(first)
    _perturb(first, second)
    return first, second


def _perturb(model: Path, folder: Path) -> None:
    """The same model with other weights."""
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    changed = {name: value + 0.01 * torch.randn_like(value) for name, value in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> int:
    """Measure the named cases, or all of them."""
    options = parser_of(__doc__ or "").parse_args()
    measurement = Measurement(
        name="weight_update",
        question="How long do engines stand still for new weights, and what is sent for it?",
    )
    measurement.conditions["metrics"] = (
        "by relay; broadcast_: a group for each lane, the default of a run; shared_: one group"
    )
    files_on = _files_on()
    measurement.conditions["files"] = str(files_on or tempfile.gettempdir())

    def is_wanted(case: str) -> bool:
        return not options.case or case in options.case

    for count in _STAND_INS:
        if is_wanted(f"stand_ins_{count}"):
            with tempfile.TemporaryDirectory(dir=files_on) as temporary:
                asyncio.run(measure_stand_ins(measurement, count, Path(temporary)))
    engines = [count for count in _ENGINES if is_wanted(f"engines_{count}")]
    if engines:
        with tempfile.TemporaryDirectory(dir=files_on) as temporary:
            asyncio.run(measure_engines(measurement, engines, Path(temporary)))
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
