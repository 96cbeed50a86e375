"""One lane from its claim to its last report: the log on one side, one engine on the other."""

import asyncio
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from forgemq_bus.log import Emit, Place
from forgemq_contracts import topics
from forgemq_contracts.lane_plan import lanes_limit
from forgemq_contracts.weights import ReportedEngine
from forgemq_inference.core.weights import BASE
from forgemq_inference.engine import Engine, EngineError, EngineGoneError
from forgemq_inference.engine_pair import EnginePair, LaneEngine
from forgemq_inference.epoch import claim_epoch, read_tail
from forgemq_inference.lane_duty import PLACE, LaneDuty
from forgemq_inference.lane_parts import LaneEdges, LaneParts, inbox_of, lane_parts
from forgemq_inference.relay import RelayedWeights
from forgemq_inference.reports import LaneIdentity, emit_of_report
from forgemq_inference.requests import LEAVING
from forgemq_inference.settings import InferenceSettings
from forgemq_inference.teacher import Teacher
from forgemq_settings.environment import SettingsError, parse
from forgemq_shell.clock import now_ms
from forgemq_shell.service import Context

CONSUMES = (
    topics.REQUESTED_COMPLETIONS,
    topics.CANCELLED_COMPLETIONS,
    topics.PUBLISHED_WEIGHTS,
    topics.OFFERED_BROADCASTS,
    topics.REQUESTED_LANES,
    topics.REPORTED_ENGINES,
    topics.LOADED_WEIGHTS,
)
PRODUCES = (
    topics.SAMPLED_CHUNKS,
    topics.FINISHED_COMPLETIONS,
    topics.LOADED_WEIGHTS,
    topics.REPORTED_ENGINES,
)

_ANY_ADDRESS = ("0.0.0.0", "::")


async def main(context: Context) -> None:
    """Serve one lane until the service is stopped, or the lane is removed.

    Raises:
        SettingsError: the run cannot have such a lane, or the host is no address of this machine.
        FencedError: a newer process took the lane.
    """
    settings = parse(InferenceSettings, prefix="FORGEMQ_INFERENCE_", environ=context.environ)
    lanes = lanes_limit(context.configuration.log)
    if settings.lane >= lanes:
        raise SettingsError(f"FORGEMQ_INFERENCE_LANE: the run has room for {lanes} lanes, from 0")
    async with AsyncExitStack() as stack:
        engine = await _engine(settings, stack)
        cache = settings.cache or stack.enter_context(tempfile.TemporaryDirectory())
        writer = await context.log.writer()
        stack.push_async_callback(writer.close)
        relayed = _listen(context, settings, Path(cache))
        stack.callback(relayed.close)
        teacher = await _teacher(context, stack)
        edges = LaneEdges(
            engine=engine, writer=writer, cache=Path(cache), relayed=relayed, teacher=teacher
        )
        await _serve_lane(context, settings, edges)


def _listen(context: Context, settings: InferenceSettings, cache: Path) -> RelayedWeights:
    if settings.host in _ANY_ADDRESS:
        raise SettingsError(
            f"FORGEMQ_INFERENCE_HOST: {settings.host} stands for every address of this machine; "
            "heartbeats give it to the trainer and the other lanes, so name the one they reach"
        )
    try:
        return RelayedWeights(
            # Lanes of one machine may share a cache; what a lane gets is its own.
            cache / f"relay-{settings.lane}",
            run=context.configuration.run,
            host=settings.host,
            lane=settings.lane,
            telemetry=context.telemetry,
        )
    except OSError as error:
        raise SettingsError(
            f"FORGEMQ_INFERENCE_HOST: cannot listen at {settings.host}: {error}"
        ) from error


async def _engine(settings: InferenceSettings, stack: AsyncExitStack) -> LaneEngine:
    """The lane's engine, open until the stack closes."""
    engine = await stack.enter_async_context(Engine(settings.engine_url))
    if not settings.prefill_url:
        return engine
    prefill = await stack.enter_async_context(Engine(settings.prefill_url))
    return EnginePair(prefill=prefill, decode=engine)


async def _teacher(context: Context, stack: AsyncExitStack) -> Teacher | None:
    """The run's teacher, open until the stack closes; None if it has none."""
    settings = context.configuration.distillation
    if settings is None:
        return None
    engine = await stack.enter_async_context(Engine(settings.url))
    return Teacher(engine, settings, telemetry=context.telemetry)


async def _serve_lane(context: Context, settings: InferenceSettings, edges: LaneEdges) -> None:
    lane, log = settings.lane, context.log
    requested = Place(topics.REQUESTED_COMPLETIONS.name, lane)
    cancelled = Place(topics.CANCELLED_COMPLETIONS.name, lane)
    offered = Place(topics.OFFERED_BROADCASTS.name, 0)
    # Before the claim: what is requested or offered under the new epoch comes after it.
    positions = await log.end_positions([requested, cancelled, offered])
    claim = await claim_epoch(
        log, edges.writer, lane=lane, report=lambda epoch: _first_report(settings, epoch)
    )
    context.telemetry.event("claimed", lane=lane, epoch=claim.epoch)
    positions[Place(topics.REPORTED_ENGINES.name, lane)] = claim.position
    published = Place(topics.PUBLISHED_WEIGHTS.name, 0)
    newest = await read_tail(log, published)
    positions[published] = newest.position
    duty = LaneDuty(lane, context.configuration.log, telemetry=context.telemetry)
    positions[PLACE] = await duty.restore(log)
    identity = LaneIdentity(
        lane=lane,
        epoch=claim.epoch,
        url=edges.engine.url,
        weights_address=edges.relayed.address,
    )
    async with asyncio.TaskGroup() as group:
        parts = lane_parts(context, settings, identity, edges=edges, spawn=group.create_task)
        inbox = inbox_of(context, settings, identity, parts=parts, duty=duty, writer=edges.writer)
        duty.on_change = lambda: parts.attachment.want(is_wanted=duty.is_wanted)
        duty.on_change()
        # Before the engine is attached: it then loads the newest weights and none before them.
        for record in newest.records:
            await inbox.take(record)
        reader = await log.reader(positions)
        reading = group.create_task(
            inbox.run(reader, log=log, turned=lambda: context.loop_watch.beat("inbox"))
        )
        serving = [group.create_task(part.run()) for part in (parts.attachment, parts.reports)]
        await _wait_for_any(context.stop, duty.removed)
        reading.cancel()
        context.loop_watch.end("inbox")
        await _leave_lane(context, parts, edges.engine, drain_s=settings.drain_s)
        for task in serving:
            task.cancel()
        parts.reports.stop_serving()
    await parts.reports.write_report()


async def _wait_for_any(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _leave_lane(
    context: Context, parts: LaneParts, engine: LaneEngine, *, drain_s: float
) -> None:
    """Let running requests end for `drain_s`, then end the others with an error."""
    parts.reports.stop_serving()
    with suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await parts.requests.wait_idle()
    parts.requests.close(LEAVING)
    try:
        await engine.abort_all()
    except EngineGoneError:
        pass  # Nothing is left to abort: `forgemq run` ends services and engines at the same time.
    except EngineError as error:
        context.telemetry.event("abort_failed", error=str(error))
    await parts.requests.wait_idle()


def _first_report(settings: InferenceSettings, epoch: int) -> Emit:
    """The report that claims an epoch; the lane does not serve yet."""
    return emit_of_report(
        ReportedEngine(
            lane=settings.lane,
            epoch=epoch,
            url=settings.engine_url,
            is_serving=False,
            lineage=BASE.lineage,
            version=BASE.version,
            running=0,
            queued=0,
            reported_ms=now_ms(),
        )
    )
