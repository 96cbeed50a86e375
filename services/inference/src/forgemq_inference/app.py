"""Wiring of one lane: the log on one side, one engine on the other."""

import asyncio
import tempfile
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from forgemq_bus.log import Emit, Place, Writer
from forgemq_contracts import topics
from forgemq_contracts.weights import ReportedEngine
from forgemq_inference.attachment import Attachment
from forgemq_inference.clock import PauseClock
from forgemq_inference.core.lane import LaneState
from forgemq_inference.core.weights import BASE, Served, WeightsState
from forgemq_inference.durable import DurableCopies
from forgemq_inference.engine import Engine, EngineError
from forgemq_inference.epoch import claim_epoch, tail
from forgemq_inference.inbox import Inbox
from forgemq_inference.loading import WeightLoader
from forgemq_inference.reports import LaneIdentity, Reports, emit_of_report
from forgemq_inference.requests import LEAVING, LaneLimits, Requests, Spawn
from forgemq_inference.settings import InferenceSettings
from forgemq_settings.environment import SettingsError, parse
from forgemq_shell.dead_letters import DeadLetters
from forgemq_shell.service import Context
from forgemq_telemetry import Telemetry
from forgemq_telemetry.clock import now_ms

CONSUMES = (
    topics.REQUESTED_COMPLETIONS,
    topics.CANCELLED_COMPLETIONS,
    topics.PUBLISHED_WEIGHTS,
    topics.REPORTED_ENGINES,
    topics.LOADED_WEIGHTS,
)
PRODUCES = (topics.FINISHED_COMPLETIONS, topics.LOADED_WEIGHTS, topics.REPORTED_ENGINES)


async def main(context: Context) -> None:
    """Serve one lane until told to stop.

    Raises:
        SettingsError: the run has no such lane.
        FencedError: a newer process took the lane.
    """
    settings = parse(InferenceSettings, prefix="FORGEMQ_INFERENCE_", environ=context.environ)
    lanes = context.configuration.log.lanes
    if settings.lane >= lanes:
        raise SettingsError(f"FORGEMQ_INFERENCE_LANE: the run has {lanes} lanes, from 0")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(settings.engine_url))
        cache = settings.cache or stack.enter_context(tempfile.TemporaryDirectory())
        writer = await context.log.writer()
        stack.push_async_callback(writer.close)
        await _serve(context, settings, engine=engine, writer=writer, cache=Path(cache))


async def _serve(
    context: Context, settings: InferenceSettings, *, engine: Engine, writer: Writer, cache: Path
) -> None:
    lane = settings.lane
    log = context.log
    requested = Place(topics.REQUESTED_COMPLETIONS.name, lane)
    cancelled = Place(topics.CANCELLED_COMPLETIONS.name, lane)
    # Before the claim: what is requested under the new epoch comes after it.
    positions = await log.end_positions([requested, cancelled])
    claim = await claim_epoch(
        log, writer, lane=lane, report=lambda epoch: _first_report(settings, epoch)
    )
    identity = LaneIdentity(lane=lane, epoch=claim.epoch, url=engine.url)
    context.telemetry.event("claimed", lane=lane, epoch=claim.epoch)
    published = Place(topics.PUBLISHED_WEIGHTS.name, 0)
    newest = await tail(log, published)
    async with asyncio.TaskGroup() as group:
        parts = _parts(
            context,
            settings,
            identity,
            engine=engine,
            writer=writer,
            cache=cache,
            spawn=group.create_task,
        )
        inbox = Inbox(
            identity,
            requests=parts.requests,
            weights=parts.weights,
            on_published=parts.attachment.follow_weights,
            dead_letters=DeadLetters(log, writer, service="inference"),
            queued_max=settings.queued_max,
            telemetry=context.telemetry,
        )
        for record in newest.records:
            await inbox.take(record)
        reader = await log.reader(
            {
                **positions,
                published: newest.position,
                Place(topics.REPORTED_ENGINES.name, lane): claim.position,
            }
        )
        tasks = [
            group.create_task(inbox.run(reader)),
            group.create_task(parts.attachment.run()),
            group.create_task(parts.reports.run()),
        ]
        await context.stop.wait()
        tasks[0].cancel()
        await _leave(parts, engine, drain_s=settings.drain_s, telemetry=context.telemetry)
        for task in tasks:
            task.cancel()
        parts.reports.stop_serving()
    await parts.reports.write()


async def _leave(parts: "_Parts", engine: Engine, *, drain_s: float, telemetry: Telemetry) -> None:
    """Let running requests end, then end the rest with an error."""
    parts.reports.stop_serving()
    with suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await parts.requests.wait_idle()
    parts.requests.close(LEAVING)
    try:
        await engine.abort_all()
    except EngineError as error:
        telemetry.event("abort_failed", error=str(error))
    await parts.requests.wait_idle()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The objects of one lane."""

    weights: WeightsState
    requests: Requests
    reports: Reports
    attachment: Attachment


def _parts(
    context: Context,
    settings: InferenceSettings,
    identity: LaneIdentity,
    *,
    engine: Engine,
    writer: Writer,
    cache: Path,
    spawn: Spawn,
) -> _Parts:
    telemetry, configuration = context.telemetry, context.configuration
    lane, epoch = identity.lane, identity.epoch
    pauses, suspected = PauseClock(), asyncio.Event()
    weights = WeightsState(lane=lane, epoch=epoch, served=Served(weights=BASE))
    requests = Requests(
        engine,
        LaneState(lane=lane, epoch=epoch, remembered_bytes_max=settings.remembered_bytes_max),
        limits=LaneLimits(
            epoch=epoch,
            concurrent_max=settings.concurrent_max,
            group_partitions=configuration.log.group_partitions,
        ),
        writer=writer,
        spawn=spawn,
        pauses=pauses,
        on_unreachable=suspected.set,
        telemetry=telemetry,
    )
    reports = Reports(
        identity,
        writer=writer,
        weights=weights,
        requests=requests,
        heartbeat_s=settings.heartbeat_s,
        telemetry=telemetry,
    )
    loader = WeightLoader(
        engine,
        weights,
        copies=DurableCopies(cache),
        pauses=pauses,
        durable_timeout_s=settings.durable_timeout_s,
        telemetry=telemetry,
    )
    attachment = Attachment(
        engine,
        configuration=configuration,
        settings=settings,
        weights=weights,
        loader=loader,
        requests=requests,
        reports=reports,
        pauses=pauses,
        suspected=suspected,
        telemetry=telemetry,
    )
    return _Parts(weights=weights, requests=requests, reports=reports, attachment=attachment)


def _first_report(settings: InferenceSettings, epoch: int) -> Emit:
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
