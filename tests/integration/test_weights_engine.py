"""New weights into a real SGLang server, from a real publisher in another process."""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.weights import RelayedLane, Rendezvous
from tests.engine_fixture import processes_of
from tests.lane_scene import LaneScene, create_topics
from tests.relay_sender import relay

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CONTEXT = [10, 20, 30, 40, 50, 60]


@asynccontextmanager
async def serving_scene(url: str, model: Path) -> AsyncIterator[LaneScene]:
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(log, model=model, engine_url=url)
    async with scene.serving():
        await scene.report(is_serving=True)
        yield scene


@pytest.fixture(scope="module")
def trained(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(engine_model, tmp_path_factory.mktemp("trained"), seed=1)


def perturbed(model: Path, folder: Path, *, seed: int) -> Path:
    """The same model with other weights."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    torch.manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    changed = {name: value + 0.05 * torch.randn_like(value) for name, value in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Publisher:
    """A publisher's process; see weight_publisher.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def offer(self) -> tuple[Rendezvous, ...]:
        return msgspec.json.decode(await self._line(), type=tuple[Rendezvous, ...])

    async def send(self) -> None:
        await self._write("go")

    async def result(self) -> dict[str, str]:
        return json.loads(await self._line())  # type: ignore[no-any-return]

    async def next_folder(self, folder: Path) -> None:
        await self._write(str(folder))

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            return await self._process.stdout.readline()

    async def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()


@asynccontextmanager
async def publisher(
    folder: Path, mode: str, *, ranks: int = 1, backend: str = "gloo"
) -> AsyncIterator[Publisher]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.integration.weight_publisher", str(folder), mode, str(ranks), backend),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Publisher(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def sending(folder: Path | str, engine_url: str) -> AsyncIterator[Publisher]:
    """A publisher of weights to every process of an engine; `policy|head` for both folders."""
    ranks = await asyncio.to_thread(processes_of, engine_url)
    async with publisher(Path(folder), "send", ranks=ranks) as process:
        yield process


def spans(record: FinishedCompletion) -> list[tuple[int, int, int, int]]:
    return [(span.start, span.end, span.lineage, span.version) for span in record.spans]


def logprobs(
    model: Path, tokens: list[int], *, first: int, temperature: float = 1.0
) -> list[float]:
    """Log-probabilities of tokens[first:] under plain transformers, float32."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = policy(torch.tensor([tokens])).logits[0]
    rows = torch.log_softmax(logits[first - 1 : -1] / temperature, -1)
    return [float(value) for value in rows.gather(1, torch.tensor(tokens[first:])[:, None])[:, 0]]


async def test_relayed_weights_are_swapped_mid_generation_and_are_the_published_ones(
    base_engine_url: str, engine_model: Path, trained: Path, tmp_path: Path
) -> None:
    """They arrive while the engine generates; tokens after the split are the new model's."""
    durable = tmp_path / "durable"
    shutil.copytree(trained, durable)
    async with serving_scene(base_engine_url, engine_model) as scene:
        address = (await scene.report(is_serving=True)).weights_address
        for number in range(1, 5):
            await scene.request(number, [*CONTEXT, number], max_tokens=900, temperature=5.0)
        await scene.until_running()
        relayed = await relay(durable, [address], version=1)
        assert (relayed.lane, relayed.left_out) == (0, {})
        assert (await scene.report(is_serving=True)).version == 0
        to_us = (RelayedLane(lane=0, epoch=1),)
        await scene.publish(durable, version=1, relayed_to=to_us)
        # The engine cannot have read it: what it serves below came by relay.
        shutil.rmtree(durable)
        _, loaded = await scene.loaded(count=2, timeout_s=60)
        await scene.request(5, CONTEXT, max_tokens=20)
        records = await scene.finished(count=5, timeout_s=120)
    assert (loaded.path, loaded.version) == ("fast", 1)
    assert 0 < loaded.paused_s <= loaded.duration_s
    by_number = {int(record.request_id, 16): record for record in records}
    after = by_number[5]
    assert spans(after) == [(0, len(after.output) // 4, 1, 1)]
    split = [record for record in records if len(record.spans) == 2]
    assert split, [spans(record) for record in records]
    output = list(unpack_ids(after.output))
    expected = logprobs(trained, [*CONTEXT, *output], first=len(CONTEXT))
    assert list(unpack_floats(after.logprobs)) == pytest.approx(expected, abs=1e-4)


async def test_weights_broadcast_mid_generation_split_the_output_at_the_version(
    base_engine_url: str, engine_model: Path, trained: Path
) -> None:
    """Tokens before the split have the old model's log-probabilities, those after it the new's."""
    async with (
        serving_scene(base_engine_url, engine_model) as scene,
        publisher(trained, "send") as trainer,
    ):
        offers = await trainer.offer()
        for number in range(1, 5):
            await scene.request(number, [*CONTEXT, number], max_tokens=900, temperature=5.0)
        await scene.until_running()
        await scene.publish(trained, version=1, fast_paths=offers)
        await trainer.send()
        assert await trainer.result() == {"0": ""}
        _, loaded = await scene.loaded(count=2)
        await scene.request(5, CONTEXT, max_tokens=20)
        records = await scene.finished(count=5, timeout_s=60)
        # The same group again, without a new rendezvous.
        await trainer.next_folder(engine_model)
        again = await trainer.offer()
        await scene.publish(engine_model, version=2, fast_paths=again)
        await trainer.send()
        assert await trainer.result() == {"0": ""}
        *_, back = await scene.loaded(count=3)
        await scene.request(6, CONTEXT, max_tokens=20)
        *_, after = await scene.finished(count=6)
    assert (loaded.path, loaded.version, back.path, back.version) == ("fast", 1, "fast", 2)
    assert not again[0].is_new
    assert 0 < loaded.paused_s < 10
    by_number = {int(record.request_id, 16): record for record in [*records, after]}
    assert spans(by_number[5]) == [(0, len(by_number[5].output) // 4, 1, 1)]
    assert spans(after) == [(0, len(after.output) // 4, 1, 2)]
    split = [record for record in records if len(record.spans) == 2]
    assert split, [spans(record) for record in records]
    for record in split:
        tokens = [*CONTEXT, int(record.request_id, 16), *unpack_ids(record.output)]
        end, first = record.spans[0].end, len(CONTEXT) + 1
        old = logprobs(engine_model, tokens, first=first, temperature=5.0)
        new = logprobs(trained, tokens, first=first, temperature=5.0)
        expected = old[:end] + new[end:]
        assert unpack_floats(record.logprobs) == pytest.approx(expected, abs=1e-3)
        assert record.retractions == 1
    for record, model in ((by_number[5], trained), (after, engine_model)):
        tokens = CONTEXT + unpack_ids(record.output)
        expected = logprobs(model, tokens, first=len(CONTEXT))
        assert unpack_floats(record.logprobs) == pytest.approx(expected, abs=1e-3)


async def test_the_engine_finds_its_cache_again_and_nothing_of_another_version(
    base_engine_url: str, engine_model: Path
) -> None:
    """The new version has the same bytes, so that the engine drops nothing by itself."""
    context = list(range(10, 60)) * 4
    async with serving_scene(base_engine_url, engine_model) as scene:
        await scene.publish(engine_model, version=7)
        await scene.loaded(count=2)  # After those it started with.
        for number, version in ((1, 7), (2, 7), (3, 8), (4, 8)):
            if number == 3:
                await scene.publish(engine_model, version=version)
                await scene.loaded(count=3)
            await scene.request(number, context, max_tokens=4, temperature=0.0)
            await scene.finished(count=number)
        records = await scene.finished(count=4)
    by_number = {int(record.request_id, 16): record for record in records}
    versions = [by_number[number].spans[0].version for number in (1, 2, 3, 4)]
    assert versions == [7, 7, 8, 8]
    # The last token of a context is read again.
    cached = [by_number[number].cached_tokens for number in (1, 2, 3, 4)]
    assert cached == [0, len(context) - 1, 0, len(context) - 1]
    assert len({by_number[number].output for number in (1, 2, 3, 4)}) == 1


@pytest.mark.parametrize("mode", ["absent", "die"])
async def test_a_publisher_that_fails_costs_seconds_and_the_durable_copy_is_loaded(
    base_engine_url: str, engine_model: Path, trained: Path, mode: str
) -> None:
    async with (
        serving_scene(base_engine_url, engine_model) as scene,
        publisher(trained, mode) as trainer,
    ):
        offers = await trainer.offer()
        await scene.request(1, CONTEXT, max_tokens=900, temperature=3.0)
        started_s = time.monotonic()
        await scene.publish(trained, version=1, fast_paths=offers, deadline_s=20.0)
        await trainer.send()
        _, loaded = await scene.loaded(count=2, timeout_s=60)
        took_s = time.monotonic() - started_s
        (record,) = await scene.finished(count=1)
        await scene.request(2, CONTEXT, max_tokens=20)
        _, after = await scene.finished(count=2)
    assert (loaded.path, loaded.version) == ("durable", 1)
    assert took_s < 45
    assert len(scene.events_named("fast_path_failed")) == 1
    assert record.error == ""
    expected = logprobs(trained, CONTEXT + unpack_ids(after.output), first=len(CONTEXT))
    assert unpack_floats(after.logprobs) == pytest.approx(expected, abs=1e-3)
    assert spans(after)[0][2:] == (1, 1)


async def test_a_late_joiner_loads_the_newest_durable_copy_before_it_serves(
    base_engine_url: str, engine_model: Path, trained: Path
) -> None:
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(log, model=engine_model, engine_url=base_engine_url)
    await scene.publish(engine_model, version=4)
    await scene.publish(trained, version=5)
    async with scene.serving():
        report = await scene.report(is_serving=True)
        await scene.request(1, CONTEXT, max_tokens=20)
        (record,) = await scene.finished(count=1)
        (loaded,) = await scene.loaded(count=1)
    assert (report.version, loaded.version, loaded.path) == (5, 5, "start")
    expected = logprobs(trained, CONTEXT + unpack_ids(record.output), first=len(CONTEXT))
    assert unpack_floats(record.logprobs) == pytest.approx(expected, abs=1e-3)


async def test_a_restarted_service_takes_an_engine_over_in_the_middle_of_an_update(
    base_engine_url: str, engine_model: Path, trained: Path
) -> None:
    """Leave the engine as a killed service does: paused, an update open, weights named broken."""
    async with aiohttp.ClientSession(base_engine_url) as session:
        for path, body in (
            ("/pause_generation", {"mode": "retract"}),
            ("/update_weight_version", {"new_version": "broken", "abort_all_requests": False}),
            ("/begin_weight_update", {}),
        ):
            async with session.post(path, json=body) as response:
                assert response.status == 200
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(log, model=engine_model, engine_url=base_engine_url)
    await scene.publish(trained, version=1)
    async with scene.serving():
        report = await scene.report(is_serving=True)
        await scene.request(1, CONTEXT, max_tokens=20)
        (record,) = await scene.finished(count=1)
    assert report.version == 1
    expected = logprobs(trained, CONTEXT + unpack_ids(record.output), first=len(CONTEXT))
    assert unpack_floats(record.logprobs) == pytest.approx(expected, abs=1e-3)
