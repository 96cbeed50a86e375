"""How long do engines stand still for new weights, and what does the trainer send for it?

`engines_1` to `engines_3`: real engines on a CPU with a Qwen3 of 56 million random parameters, each
generating. A version reaches them by relay, then the next one by broadcast (one gloo group for each
lane), in turns. All lanes' inference code and the trainer's run in this process; files go to a
temporary folder. `stand_ins_4` to `stand_ins_16`: engines that load nothing, with the demo's model.

`step_to_served_s` is from a step's end, with its file written, until the last engine serves it;
`broadcast_step_to_served_s` the same by broadcast. `transfer_s` is until the last lane has all
files, `pause_s` the longest pause of an engine, and `pause_over_transfer` their ratio.
`bytes_sent_over_one_lane` is what the trainer sends by relay over the bytes of one copy.

    make load NAME=weight_update JSON=weight_update.json      # ten minutes on two cores
"""

import asyncio
import io
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from measurement import Measurement, parser_of
from real_engines import real_engines
from safetensors.torch import load_file, save_file
from stand_in_engine import Speed, StandInEngine, serving
from transformers import AutoConfig, AutoModelForCausalLM

from forgemq_contracts.weights import PublishedWeights, RelayedLane, Rendezvous
from forgemq_inference.core.weights import BASE, Served, WeightsState
from forgemq_inference.durable import copies_in
from forgemq_inference.engine import Engine
from forgemq_inference.pause_clock import PauseClock
from forgemq_inference.relay import RelayedWeights
from forgemq_inference.weight_loader import Loading, WeightLoader
from forgemq_telemetry import Telemetry
from forgemq_trainer.fast_path import FastPaths
from forgemq_trainer.relay_path import RelayPath
from forgemq_trainer.storage.weights import SavedVersion, WeightsFolder, read_weights_folder
from forgemq_trainer.transfer_deadline import TransferDeadline
from forgemq_weight_relay import Hop, WeightsKey

_DEMO = Path(__file__).parents[1] / "deploy" / "demo" / "model"
_ENGINES = (1, 2, 3)
_STAND_INS = (4, 8, 16)
_ROUNDS = 3
_RUN = "weight-update"
_DEADLINE = TransferDeadline(120.0, 2e8)
_TIMEOUT_S = 300.0
_LARGER = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "layer_types": ["full_attention"] * 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


class Lane:
    """One lane's weights, without its requests."""

    def __init__(self, number: int, engine: Engine, folder: Path) -> None:
        self.number = number
        self.engine = engine
        telemetry = Telemetry(service="inference", stream=io.StringIO())
        self.relayed = RelayedWeights(
            folder / f"relay-{number}",
            run=_RUN,
            host="127.0.0.1",
            lane=number,
            telemetry=telemetry,
        )
        self._state = WeightsState(lane=number, epoch=1, served=Served(weights=BASE))
        self._loader = WeightLoader(
            engine,
            self._state,
            copies=copies_in(folder / f"cache-{number}"),
            relayed=self.relayed,
            pauses=PauseClock(),
            durable_timeout_s=_TIMEOUT_S,
            telemetry=telemetry,
        )

    async def load(self, published: PublishedWeights) -> Loading:
        """Bring the engine to a publication.

        Raises:
            RuntimeError: it came from the durable copy.
        """
        self._state.observe(published)
        load = self._state.next_load()
        assert load is not None
        loading = await self._loader.load(load)
        if loading.path != "fast":
            raise RuntimeError(f"lane {self.number} loaded the durable copy")
        return loading


@dataclass(frozen=True, kw_only=True)
class Update:
    """One version on its way to all lanes, in seconds and bytes."""

    served_s: float
    transfer_s: float
    pause_s: float
    sent_bytes: int


class Trainer:
    """Publishes two folders of weights in turns."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [read_weights_folder(folder) for folder in folders]
        self._version = 0
        self._relay = RelayPath(deadline=_DEADLINE)
        self.broadcasts = FastPaths(host="127.0.0.1", backend="gloo", deadline=_DEADLINE)

    @property
    def size_bytes(self) -> int:
        """Of one version's files."""
        folder = self._folders[0].folder
        return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())

    async def relay(self, lanes: Sequence[Lane]) -> Update:
        """Relay the next version to the lanes and let them load it."""
        weights = self._next()
        to = tuple(RelayedLane(lane=lane.number, epoch=1) for lane in lanes)
        published = self._published(weights, relayed_to=to)
        saved = SavedVersion(version=self._version, weights=weights)
        route = tuple(Hop(lane.number, lane.relayed.address) for lane in lanes)
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(
                asyncio.to_thread(self._relay.send, saved, run=_RUN, lineage=1, route=route)
            )
            loads = [tasks.create_task(lane.load(published)) for lane in lanes]
            arrivals = [tasks.create_task(_arrival(lane, self._version)) for lane in lanes]
        return Update(
            served_s=time.monotonic() - started_s,
            transfer_s=max(arrival.result() for arrival in arrivals) - started_s,
            pause_s=max(load.result().paused_s for load in loads),
            sent_bytes=sending.result().sent_bytes,
        )

    async def broadcast(self, lanes: Sequence[Lane]) -> Update:
        """Broadcast the next version into the lanes' engines, one group for each."""
        weights = self._next()
        offers = self.broadcasts.offer({lane.number: 1 for lane in lanes}, prefix=_RUN)
        published = self._published(weights, fast_paths=offers)
        file = weights.folder / "model.safetensors"
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(asyncio.to_thread(self.broadcasts.send, offers, file))
            loads = [tasks.create_task(lane.load(published)) for lane in lanes]
        if any(sending.result().values()):
            raise RuntimeError(f"broadcasts failed: {sending.result()}")
        served_s = time.monotonic() - started_s
        return Update(
            served_s=served_s,
            transfer_s=served_s,
            pause_s=max(load.result().paused_s for load in loads),
            sent_bytes=weights.size_bytes * len(lanes),
        )

    def _next(self) -> WeightsFolder:
        self._version += 1
        return self._folders[self._version % 2]

    def _published(
        self,
        weights: WeightsFolder,
        *,
        fast_paths: tuple[Rendezvous, ...] = (),
        relayed_to: tuple[RelayedLane, ...] = (),
    ) -> PublishedWeights:
        return PublishedWeights(
            lineage=1,
            version=self._version,
            sha256=weights.sha256,
            uri=weights.uri,
            size_bytes=weights.size_bytes,
            fast_paths=fast_paths,
            relayed_to=relayed_to,
            deadline_s=_DEADLINE.of(weights.size_bytes),
        )


async def _arrival(lane: Lane, version: int) -> float:
    """When the lane had all files of a version."""
    receiver = lane.relayed.receiver
    key = WeightsKey(1, version)
    if await asyncio.to_thread(receiver.wait, key, timeout_s=_TIMEOUT_S) is None:
        raise RuntimeError(f"version {version} did not reach lane {lane.number}")
    return time.monotonic()


async def measure_engines(measurement: Measurement, cases: Sequence[int], folder: Path) -> None:
    """Rows of the cases with real engines."""
    first, second = _models(folder)
    async with real_engines(first, folder, count=max(cases)) as engines:
        lanes = [Lane(number, engine, folder) for number, engine in enumerate(engines)]
        trainer = Trainer((first, second))
        await trainer.broadcast(lanes)  # Groups are formed, and what is compiled once is.
        await trainer.relay(lanes)
        for count in cases:
            relays, broadcasts = [], []
            for _ in range(_ROUNDS):
                async with _generating(engines):
                    relays.append(await trainer.relay(lanes[:count]))
                    broadcasts.append(await trainer.broadcast(lanes[:count]))
            name = f"engines_{count}"
            _rows(measurement, name, relays, size_bytes=trainer.size_bytes)
            pause_s = statistics.median(each.pause_s for each in relays)
            transfer_s = statistics.median(each.transfer_s for each in relays)
            measurement.row(name, "pause_s", pause_s, "s")
            measurement.row(name, "pause_over_transfer", pause_s / transfer_s, "x")
            for metric, values in (
                ("broadcast_step_to_served_s", [each.served_s for each in broadcasts]),
                ("broadcast_pause_s", [each.pause_s for each in broadcasts]),
            ):
                measurement.row(name, metric, statistics.median(values), "s")
        trainer.broadcasts.close()
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


@asynccontextmanager
async def _generating(engines: Sequence[Engine]) -> AsyncIterator[None]:
    """One long request in each engine during the block."""
    sampling = {"temperature": 1.0, "max_new_tokens": 3000, "ignore_eos": True}
    async with asyncio.TaskGroup() as tasks:
        requests = [
            tasks.create_task(
                engine.generate(
                    {"input_ids": [5, 6, 7, number], "sampling_params": sampling},
                    timeout_s=_TIMEOUT_S,
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


def _models(folder: Path) -> tuple[Path, Path]:
    first, second = folder / "first", folder / "second"
    shutil.copytree(_DEMO, first)
    config = AutoConfig.from_pretrained(_DEMO, **_LARGER)
    AutoModelForCausalLM.from_config(config).save_pretrained(first)
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

    def is_wanted(case: str) -> bool:
        return not options.case or case in options.case

    for count in _STAND_INS:
        if is_wanted(f"stand_ins_{count}"):
            with tempfile.TemporaryDirectory() as temporary:
                asyncio.run(measure_stand_ins(measurement, count, Path(temporary)))
    engines = [count for count in _ENGINES if is_wanted(f"engines_{count}")]
    if engines:
        with tempfile.TemporaryDirectory() as temporary:
            asyncio.run(measure_engines(measurement, engines, Path(temporary)))
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
