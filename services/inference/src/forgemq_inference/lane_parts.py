"""The objects of one lane, wired to one another."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from forgemq_bus.log import Writer
from forgemq_inference.attachment import Attachment
from forgemq_inference.core.lane import LaneState
from forgemq_inference.core.weights import BASE, WeightsState, served_by
from forgemq_inference.durable import copies_in
from forgemq_inference.engine_pair import LaneEngine
from forgemq_inference.inbox import Inbox
from forgemq_inference.lane_duty import LaneDuty
from forgemq_inference.live_chunks import Spawn
from forgemq_inference.pause_clock import PauseClock
from forgemq_inference.read_back import ParameterReadBack
from forgemq_inference.relay import RelayedWeights
from forgemq_inference.reports import LaneIdentity, Reports
from forgemq_inference.requests import LaneLimits, Requests
from forgemq_inference.settings import InferenceSettings
from forgemq_inference.teacher import Teacher
from forgemq_inference.weight_loader import WeightLoader
from forgemq_shell.dead_letters import DeadLetters
from forgemq_shell.service import Context
from forgemq_telemetry import Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEdges:
    """What connects a lane to the world.

    Attributes:
        engine: Open.
        writer: To the run's log.
        cache: Folder for weights that must be downloaded.
        relayed: Listens for weights of the relay.
        teacher: Its engine is open; None if the run has none.
    """

    engine: LaneEngine
    writer: Writer
    cache: Path
    relayed: RelayedWeights
    teacher: Teacher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneParts:
    """The objects of one lane; `attachment` and `reports` each run as one task."""

    weights: WeightsState
    requests: Requests
    reports: Reports
    attachment: Attachment


def lane_parts(
    context: Context,
    settings: InferenceSettings,
    identity: LaneIdentity,
    *,
    edges: LaneEdges,
    spawn: Spawn,
) -> LaneParts:
    """The parts of a lane that serves nothing yet.

    Args:
        context: Of the service.
        settings: Of the service.
        identity: The lane and its epoch, already claimed.
        edges: Outlive the parts.
        spawn: Starts a coroutine whose failure ends the service.
    """
    telemetry, pauses, suspected = context.telemetry, PauseClock(), asyncio.Event()
    weights = WeightsState(
        lane=identity.lane,
        epoch=identity.epoch,
        served=served_by(BASE.name, base_sha256=None),
    )
    requests = Requests(
        edges.engine,
        _lane_state(settings, identity),
        weights=weights,
        limits=_lane_limits(context, settings, identity),
        writer=edges.writer,
        spawn=spawn,
        pauses=pauses,
        on_unreachable=suspected.set,
        telemetry=telemetry,
        teacher=edges.teacher,
    )
    reports = Reports(
        identity,
        writer=edges.writer,
        weights=weights,
        requests=requests,
        heartbeat_s=settings.heartbeat_s,
        telemetry=telemetry,
    )
    loader = _loader(settings, identity, edges, weights, pauses=pauses, telemetry=telemetry)
    attachment = Attachment(
        edges.engine,
        configuration=context.configuration,
        settings=settings,
        weights=weights,
        loader=loader,
        requests=requests,
        reports=reports,
        pauses=pauses,
        suspected=suspected,
        telemetry=telemetry,
    )
    return LaneParts(weights=weights, requests=requests, reports=reports, attachment=attachment)


def _loader(
    settings: InferenceSettings,
    identity: LaneIdentity,
    edges: LaneEdges,
    weights: WeightsState,
    *,
    pauses: PauseClock,
    telemetry: Telemetry,
) -> WeightLoader:
    engine, copies = edges.engine, copies_in(edges.cache, lane=identity.lane)
    return WeightLoader(
        engine,
        weights,
        copies=copies,
        relayed=edges.relayed,
        read_back=ParameterReadBack(
            engine, copies.policies, lane=identity.lane, telemetry=telemetry
        ),
        pauses=pauses,
        durable_timeout_s=settings.durable_timeout_s,
        telemetry=telemetry,
    )


def inbox_of(
    context: Context,
    settings: InferenceSettings,
    identity: LaneIdentity,
    *,
    parts: LaneParts,
    duty: LaneDuty,
    writer: Writer,
) -> Inbox:
    """The inbox that passes a lane's records to its parts; dead letters go to `writer`."""
    return Inbox(
        identity,
        requests=parts.requests,
        weights=parts.weights,
        duty=duty,
        on_published=parts.attachment.notify_published,
        dead_letters=DeadLetters(
            context.log, writer, service="inference", telemetry=context.telemetry
        ),
        queued_max=settings.queued_max,
        telemetry=context.telemetry,
    )


def _lane_state(settings: InferenceSettings, identity: LaneIdentity) -> LaneState:
    return LaneState(
        lane=identity.lane,
        epoch=identity.epoch,
        remembered_bytes_max=settings.remembered_bytes_max,
    )


def _lane_limits(
    context: Context, settings: InferenceSettings, identity: LaneIdentity
) -> LaneLimits:
    return LaneLimits(
        epoch=identity.epoch,
        concurrent_max=settings.concurrent_max,
        group_partitions=context.configuration.log.group_partitions,
        cache_salt=f"{context.started.run}.{context.started.started_ms}",
        repetition_stop=context.configuration.episodes.repetition_stop,
    )
