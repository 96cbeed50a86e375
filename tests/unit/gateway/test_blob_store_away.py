"""A gateway whose blob store is away for a while reads on when it is back."""

import asyncio
import io
from pathlib import Path

from forgemq_bus.blobs import BlobStore
from forgemq_bus.memory import MemoryLog
from forgemq_bus.payloads import offloaded
from forgemq_contracts import topics
from forgemq_contracts.groups import AdmittedGroup
from forgemq_contracts.messages import Output
from forgemq_shell.patience import PatientBlobStore
from forgemq_shell.records import emit_of
from forgemq_telemetry import Telemetry
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, running


async def test_an_admission_in_a_blob_is_read_when_the_store_is_there_again(
    model: Path, tmp_path: Path
) -> None:
    """Its blob lies in a folder that is moved to the gateway's place later, as by a mount."""
    telemetry = Telemetry(service="gateway", stream=io.StringIO())
    here = PatientBlobStore(str(tmp_path / "here"), run="r", telemetry=telemetry)
    store = MemoryLog(run="r", clock_ms=wall_ms, blobs=here)
    body = {"domain": "shop", "idempotency_key": "k", "task": {}}
    async with running(store.open, configuration_of(model), lambda _: "yes") as (world, _):
        group = (await world.admin("POST", "/v1/groups", body)).json()["group_id"]
        record = AdmittedGroup(
            group_id=group,
            domain="shop",
            purpose="train",
            group_size=2,
            task=b"{}",
            version_at_admission=0,
            queue_index=0,
        )
        emit = emit_of(Output(topic=topics.ADMITTED_GROUPS.name, partition=0, record=record))
        away = BlobStore(str(tmp_path / "away"), run="r")
        writer = await world.log.transaction_writer("scheduler")
        await writer.commit(
            outputs=await offloaded([emit], blobs=away, inline_bytes_max=0),
            group="scheduler",
            positions={},
        )
        await asyncio.sleep(3.0)
        waiting = (await world.admin("GET", f"/v1/groups/{group}")).json()["state"]
        (tmp_path / "away").rename(tmp_path / "here")
        claim = await world.claim(group)
    assert (waiting, claim["group_id"]) == ("requested", group)
