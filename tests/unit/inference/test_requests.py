"""The whole service on an in-memory log beside the stand-in engine."""

import asyncio
from pathlib import Path

import pytest
from stand_in_answers import Speed, sampled
from stand_in_engine import StandInEngine, serving

from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import pack_ids, unpack_floats, unpack_ids
from forgemq_contracts.weights import ReportedEngine
from forgemq_shell.clock import now_ms
from forgemq_telemetry.causes import causes
from forgemq_telemetry.exporters import exporter_of
from forgemq_telemetry.settings import TelemetrySettings
from tests.lane_scene import LaneScene, create_topics, request_id
from tests.scraped import samples

CONTEXT = [5, 6, 7]
REQUESTED = topics.REQUESTED_COMPLETIONS.name
TRACE = (("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)


async def scene_of(base: Path, url: str) -> LaneScene:
    log = MemoryLog(run="r")
    await create_topics(log)
    return LaneScene(log, model=base, engine_url=url)


async def test_a_request_ends_as_one_record_with_tokens_logprobs_and_spans(base: Path) -> None:
    speed = Speed(tokens=5)
    async with serving(StandInEngine(speed)) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, headers=TRACE, temperature=0.5, max_tokens=9)
            (record,) = await scene.finished(count=1)
    tokens, logprobs = sampled(CONTEXT, count=5, speed=speed)
    assert (record.request_id, record.finish_reason, record.epoch) == (request_id(1), "stop", 1)
    assert unpack_ids(record.output) == tokens
    assert unpack_floats(record.logprobs) == pytest.approx(logprobs, rel=1e-6)
    assert [(s.start, s.end, s.lineage, s.version) for s in record.spans] == [(0, 5, 0, 0)]
    assert (record.temperature, record.support) == (0.5, "full")
    assert unpack_ids(record.context) == CONTEXT


async def test_the_trace_context_of_the_request_is_on_the_record(base: Path) -> None:
    async with serving(StandInEngine(Speed(tokens=1))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, headers=TRACE)
            await scene.finished(count=1)
        places = [await scene.read("finished-completions-v1", p) for p in range(4)]
    (record,) = [record for place in places for record in place]
    assert dict(record.headers)["traceparent"] == TRACE[0][1]


async def test_a_completion_waits_for_a_blob_store_that_is_away(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "blobs"
    folder.write_text("no folder can be made here")
    blobs = BlobStore(str(folder), run="r")
    log = MemoryLog(run="r", blobs=blobs, inline_bytes_max=4096)  # A completion is larger.
    await create_topics(log)
    async with serving(StandInEngine(Speed(tokens=800))) as url:
        scene = LaneScene(log, model=base, engine_url=url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, max_tokens=800)
            await asyncio.sleep(10.0)
            finished_meanwhile = len(await scene.finished())
            folder.unlink()
            (record,) = await scene.finished(count=1)
    assert finished_meanwhile == 0
    assert (record.request_id, len(unpack_ids(record.output))) == (request_id(1), 800)


async def test_a_redelivered_request_runs_once(base: Path) -> None:
    async with serving(StandInEngine(Speed(tokens=1))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            for _ in range(3):
                await scene.request(1, CONTEXT)
            await scene.request(2, CONTEXT)
            records = await scene.finished(count=2)
            await asyncio.sleep(0.1)
            assert len(await scene.finished()) == 2
    assert {record.request_id for record in records} == {request_id(1), request_id(2)}


async def test_a_delta_request_continues_the_lanes_own_completion(base: Path) -> None:
    speed = Speed(tokens=4)
    async with serving(StandInEngine(speed)) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, max_tokens=4)
            (parent,) = await scene.finished(count=1)
            await scene.request(2, [8], parent=1, shared=6, is_delta=True, max_tokens=4)
            _, child = await scene.finished(count=2)
    full = [*CONTEXT, *unpack_ids(parent.output)[:3], 8]
    assert unpack_ids(child.output) == sampled(full, count=4, speed=speed)[0]
    assert (child.context, child.shared_prefix_tokens) == (pack_ids([8]), 6)


@pytest.mark.parametrize("shared", [8, 10_000])
async def test_a_delta_request_beyond_what_is_remembered_is_context_missing(
    base: Path, shared: int
) -> None:
    async with serving(StandInEngine(Speed(tokens=4))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, max_tokens=4)
            await scene.finished(count=1)
            await scene.request(2, [8], parent=1, shared=shared, is_delta=True)
            await scene.request(3, [8], parent=9, shared=1, is_delta=True)
            records = await scene.finished(count=3)
    assert [record.error for record in records] == ["", "context_missing", "context_missing"]
    assert [record.failure for record in records] == [None, "context_missing", "context_missing"]


async def test_a_full_request_records_the_context_after_the_shared_prefix(base: Path) -> None:
    async with serving(StandInEngine(Speed(tokens=1))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, [1, 2, 3, 4], parent=7, shared=3)
            (record,) = await scene.finished(count=1)
    assert unpack_ids(record.context) == [4]


async def test_a_cancelled_request_is_aborted_in_the_engine_at_once(base: Path) -> None:
    async with serving(StandInEngine(Speed(latency_s=30.0))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT)
            await scene.until_running()
            await scene.cancel(1)
            (record,) = await scene.finished(count=1, timeout_s=5)
    assert (record.finish_reason, record.error) == ("abort", "cancelled")


async def test_a_cancellation_that_comes_before_its_request_holds(base: Path) -> None:
    async with serving(StandInEngine(Speed(latency_s=30.0))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.cancel(1)
            await asyncio.sleep(0.3)
            await scene.request(1, CONTEXT)
            (record,) = await scene.finished(count=1, timeout_s=5)
    assert record.error == "cancelled"


@pytest.mark.wall_clock
async def test_a_request_past_its_deadline_is_an_error_before_and_in_the_engine(
    base: Path,
) -> None:
    async with serving(StandInEngine(Speed(latency_s=30.0))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, deadline_s=-1)
            await scene.request(2, CONTEXT, deadline_s=0.3)
            records = await scene.finished(count=2, timeout_s=5)
            assert (await scene.report(is_serving=True)).is_serving
    assert [(r.finish_reason, r.error) for r in records] == [("error", "deadline")] * 2


async def test_context_tokens_count_when_the_engine_has_answered_as_the_cached_ones_do(
    base: Path,
) -> None:
    exporter = exporter_of(
        TelemetrySettings(exporter="prometheus", port=0), service="inference", resource={}
    )
    assert exporter is not None
    async with serving(StandInEngine(Speed(latency_s=1.0))) as url:
        scene = await scene_of(base, url)
        scene.exporter = exporter
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, deadline_s=0.3)
            await scene.request(2, CONTEXT)
            records = await scene.finished(count=2, timeout_s=5)
    counted = samples(exporter.address, "forgemq_inference_context_tokens_total")
    exporter.close()
    assert sorted(record.finish_reason for record in records) == ["error", "stop"]
    assert [value for _, value in counted] == [len(CONTEXT)]


async def test_requests_beyond_the_limit_wait_for_their_turn(base: Path) -> None:
    async with serving(StandInEngine(Speed(latency_s=0.3))) as url:
        scene = await scene_of(base, url)
        async with scene.serving(concurrent_max=2, queued_max=1):
            await scene.report(is_serving=True)
            for number in range(6):
                await scene.request(number, CONTEXT)
            peak = 0
            while len(await scene.finished()) < 6:
                peak = max(peak, (await scene.report(is_serving=True)).running)
                await asyncio.sleep(0.02)
    assert peak == 2


async def test_the_wait_for_the_engine_is_measured_on_the_lanes_clock_alone(base: Path) -> None:
    """The gateway's clock is an hour behind; the second request waits while the first runs."""
    async with serving(StandInEngine(Speed(latency_s=0.3))) as url:
        scene = await scene_of(base, url)
        async with scene.serving(concurrent_max=1):
            await scene.report(is_serving=True)
            for number in range(2):
                await scene.request(number, CONTEXT, requested_ms=now_ms() - 3_600_000)
            first, second = await scene.finished(count=2)
    # The test's clock skips sleeps, so only the order of the waits and an hour's absence are seen.
    assert 0 <= first.queued_s < second.queued_s < 60


async def test_a_lane_goes_on_behind_requests_that_were_trimmed_before_it_read_them(
    base: Path,
) -> None:
    """The gateway lets requests of retired groups be deleted while a lane has no room for more."""
    async with serving(StandInEngine(Speed(latency_s=0.3))) as url:
        scene = await scene_of(base, url)
        async with scene.serving(concurrent_max=1, queued_max=1):
            await scene.report(is_serving=True)
            for number in range(2):
                await scene.request(number, CONTEXT)
            await scene.until_queued()
            for number in (2, 3):
                await scene.request(number, CONTEXT)
            await scene.log.trim({Place(REQUESTED, 0): 4})
            await scene.request(4, CONTEXT)
            records = await scene.finished(count=3)
            newest = await scene.report(is_serving=True)
    assert [record.request_id for record in records] == [request_id(n) for n in (0, 1, 4)]
    assert {record.finish_reason for record in records} == {"stop"}
    assert newest.epoch == 1
    assert [event["lane"] for event in scene.events_named("requests_trimmed")] == [0]


async def test_a_token_outside_the_vocabulary_never_reaches_the_engine(base: Path) -> None:
    async with serving(StandInEngine(Speed())) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, [1, 704])
            (record,) = await scene.finished(count=1)
    assert record.error == "engine: a token id is outside the vocabulary of 704"


async def test_a_request_of_an_older_epoch_is_left_to_the_gateway(base: Path) -> None:
    async with serving(StandInEngine(Speed(tokens=1))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            assert (await scene.report(is_serving=True)).epoch == 1
        async with scene.serving():
            # The start record is written after the newest heartbeat of the first life.
            assert (await scene.loaded(count=2))[1].epoch == 2
            await scene.request(1, CONTEXT, epoch=1)
            await scene.request(2, CONTEXT, epoch=2)
            records = await scene.finished(count=1)
            await asyncio.sleep(0.1)
            assert len(await scene.finished()) == 1
    assert records[0].request_id == request_id(2)


async def test_a_newer_process_on_the_lane_ends_the_older_one(base: Path) -> None:
    async with serving(StandInEngine(Speed())) as url:
        scene = await scene_of(base, url)

        async def serve() -> None:
            async with scene.serving():
                report = await scene.report(is_serving=True)
                await scene.write(topics.REPORTED_ENGINES, 0, report_of(report.epoch + 1))
                await asyncio.sleep(5)

        with pytest.raises(ExceptionGroup) as caught:
            await serve()
    found = "; ".join(map(str, causes(caught.value)))
    assert "belongs to a newer process: epoch 2, this one has 1" in found


async def test_a_lost_engine_fails_its_requests_and_is_taken_back_when_it_returns(
    base: Path,
) -> None:
    async with serving(StandInEngine(Speed(latency_s=30.0))) as url:
        port = int(url.rsplit(":", 1)[1])
        scene = await scene_of(base, url)
        service = scene.serving()
        await service.__aenter__()
        before = await scene.report(is_serving=True)
        await scene.request(1, CONTEXT)
        await scene.until_running()
    await scene.report(is_serving=False, timeout_s=10)
    (lost,) = await scene.finished(count=1, timeout_s=5)
    await scene.request(2, CONTEXT)
    _, refused = await scene.finished(count=2, timeout_s=5)
    async with serving(StandInEngine(Speed(tokens=1)), port=port):
        after = await scene.report(is_serving=True, timeout_s=10)
        await scene.request(3, CONTEXT)
        *_, served = await scene.finished(count=3, timeout_s=5)
        await service.__aexit__(None, None, None)
    assert (lost.finish_reason, lost.failure) == ("error", "engine")
    assert refused.error == "engine: not serving"
    assert served.finish_reason == "stop"
    assert 0 < before.cache_since_ms < after.cache_since_ms


async def test_a_stop_lets_short_requests_end_and_fails_long_ones(base: Path) -> None:
    async with serving(StandInEngine(Speed(latency_s=0.4))) as url:
        scene = await scene_of(base, url)
        async with scene.serving(drain_s=3) as stop:
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT)
            await scene.until_running()
            stop.set()
            (short,) = await scene.finished(count=1)
        assert not (await scene.report(is_serving=False)).is_serving
    async with serving(StandInEngine(Speed(latency_s=30.0))) as url:
        scene = await scene_of(base, url)
        async with scene.serving(drain_s=0.2) as stop:
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT)
            await scene.until_running()
            stop.set()
            (long,) = await scene.finished(count=1, timeout_s=5)
    assert short.error == ""
    assert long.error == "engine: the lane is leaving"


async def test_a_record_that_does_not_decode_goes_to_the_dead_letter_topic(base: Path) -> None:
    async with serving(StandInEngine(Speed(tokens=1))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            bad = report_of(1)
            writer = await scene.log.writer()
            await writer.write(
                Emit(topic=REQUESTED, partition=0, key=b"", value=topics.encode(bad))
            )
            await scene.request(1, CONTEXT)
            await scene.finished(count=1)
            (dead,) = await scene.read(f"{REQUESTED}-dlq", 0)
    assert dead.value == topics.encode(bad)
    assert b"request_id" in dict(dead.headers)["reason"]


async def test_a_lane_writes_dead_letters_about_its_own_records_only(base: Path) -> None:
    """Every lane reads published weights; dead letters about those are the trainer's."""
    published = topics.PUBLISHED_WEIGHTS.name
    async with serving(StandInEngine(Speed(tokens=1))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            writer = await scene.log.writer()
            await writer.write(Emit(topic=published, partition=0, key=b"1", value=b"\xc1"))
            await scene.request(1, CONTEXT)
            await scene.finished(count=1)
            assert await scene.read(f"{published}-dlq", 0) == []


def report_of(epoch: int) -> ReportedEngine:
    return ReportedEngine(
        lane=0,
        epoch=epoch,
        url="http://elsewhere",
        is_serving=False,
        lineage=0,
        version=0,
        running=0,
        queued=0,
        reported_ms=1,
    )
