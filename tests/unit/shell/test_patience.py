"""A blob store that does not answer for a while costs a service that time, and no more."""

import asyncio
import io
import json
from pathlib import Path

import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError, LostBlobError
from forgemq_contracts.fields import BlobReference
from forgemq_shell.patience import PATIENCE_S, PatientBlobStore, patiently
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.shell.task_world import MERGED, World


class SilentBlobs(BlobStore):
    """A store that may not answer one kind of request."""

    unanswered = ""

    async def put(self, data: bytes) -> BlobReference:
        if self.unanswered == "put":
            raise BlobError("no answer")
        return await super().put(data)

    async def get(self, reference: BlobReference) -> bytes:
        if self.unanswered == "get":
            raise BlobError("no answer")
        return await super().get(reference)


class Blobs(PatientBlobStore, SilentBlobs):
    """The same, as a service has it."""


def _world(folder: Path) -> tuple[World, Blobs]:
    """A task whose every value lies in the blob store."""
    lines = io.StringIO()
    blobs = Blobs(str(folder), run="r", telemetry=Telemetry(service="merger", stream=lines))
    world = World(blobs=blobs, inline_bytes_max=1)
    world.lines = lines
    return world, blobs


@pytest.mark.parametrize("unanswered", ["get", "put"])
async def test_a_task_goes_on_when_its_blob_store_answers_again(
    tmp_path: Path, unanswered: str
) -> None:
    world, blobs = _world(tmp_path)
    await world.open()
    await world.score("g-0", "g-1")
    blobs.unanswered = unanswered
    async with world.task():
        await asyncio.sleep(3.0)
        merged_meanwhile = world.log_size(MERGED)
        blobs.unanswered = ""
        await world.until_merged(2)
    silent = world.events("blob_store_silent")
    assert (merged_meanwhile, {event["limit_s"] for event in silent}) == (0, {PATIENCE_S})
    assert all("no answer" in event["error"] for event in silent)
    assert await world.merged() == [("g-0", 1), ("g-1", 2)]
    await world.log.close()


async def test_a_task_that_starts_while_its_blob_store_is_away_begins_when_it_answers(
    tmp_path: Path,
) -> None:
    world, blobs = _world(tmp_path)
    await world.open()
    await world.handle_new(1)  # Its clean stop leaves a snapshot, which lies in the store.
    blobs.unanswered = "get"
    async with world.task():
        await asyncio.sleep(3.0)
        is_silent = bool(world.events("blob_store_silent"))
        blobs.unanswered = ""
        await world.score("g-1")
        await world.until_merged(2)
    assert is_silent
    assert await world.merged() == [("g-0", 1), ("g-1", 2)]
    await world.log.close()


@pytest.mark.parametrize(("error", "took_s"), [(BlobError, PATIENCE_S), (LostBlobError, 0.0)])
async def test_a_store_that_stays_silent_ends_the_wait_and_a_lost_blob_begins_none(
    error: type[BlobError], took_s: float
) -> None:
    lines, now_s = io.StringIO(), asyncio.get_running_loop().time
    tries: list[float] = []

    async def read() -> None:
        tries.append(now_s())
        raise error("no answer")

    with pytest.raises(error) as raised:
        await patiently(read, telemetry=Telemetry(service="merger", stream=lines))
    events = [json.loads(line)["event"] for line in lines.getvalue().splitlines()]
    assert type(raised.value) is error
    assert tries[-1] - tries[0] == pytest.approx(took_s, abs=1.0)
    assert events == (["blob_store_silent"] if took_s else [])


async def test_a_store_that_was_waited_for_in_vain_is_waited_for_again_once_it_has_answered(
    tmp_path: Path,
) -> None:
    lines, now_s = io.StringIO(), asyncio.get_running_loop().time
    blobs = Blobs(str(tmp_path), run="r", telemetry=Telemetry(service="console", stream=lines))
    reference = await blobs.put(b"value")
    took_s = []
    for unanswered in ("get", "get", "", "get"):
        blobs.unanswered, begun_s = unanswered, now_s()
        if unanswered:
            with pytest.raises(BlobError):
                await blobs.get(reference)
        else:
            assert await blobs.get(reference) == b"value"
        took_s.append(now_s() - begun_s)
    assert took_s == pytest.approx([PATIENCE_S, 0.0, 0.0, PATIENCE_S], abs=1.0)
    events = [json.loads(line)["event"] for line in lines.getvalue().splitlines()]
    assert events == ["blob_store_silent"] * 2
