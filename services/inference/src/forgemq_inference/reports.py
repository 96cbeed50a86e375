"""What a lane reports: heartbeats, changes, and the weights it serves."""

import asyncio

from msgspec import Struct

from forgemq_bus.log import Emit, Writer
from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_contracts.weights import EngineLoad, LoadedWeights, ReportedEngine
from forgemq_inference.core.weights import WeightsState
from forgemq_inference.requests import Requests
from forgemq_inference.weight_loader import Loading
from forgemq_shell.clock import now_ms
from forgemq_shell.interruption import wait_at_most
from forgemq_shell.records import emit_of
from forgemq_telemetry import Telemetry

_FAULT_CHARACTERS_MAX = 500
"""Of what an engine answers: every heartbeat has it."""


class LaneIdentity(Struct, frozen=True, kw_only=True):
    """Which lane, under which epoch, with which engine, and where it takes relayed weights."""

    lane: int
    epoch: int
    url: str
    weights_address: str = ""


class Reports:
    """Writes reported-engines about every `heartbeat_s` and on change, and loaded-weights.

    `serve`, `stop_serving`, `note_fault` and `allow` set what the next report says; `write_report`
    writes one at once.
    """

    def __init__(
        self,
        identity: LaneIdentity,
        *,
        writer: Writer,
        weights: WeightsState,
        requests: Requests,
        heartbeat_s: float,
        telemetry: Telemetry,
    ) -> None:
        """Begin with a lane that does not serve."""
        self._identity = identity
        self._writer = writer
        self._weights = weights
        self._requests = requests
        self._heartbeat_s = heartbeat_s
        self._telemetry = telemetry
        self._changed = asyncio.Event()
        self._is_serving = False
        self._is_wanted = True
        self._context_tokens_max = 0
        self._ranks = 1
        self._load: EngineLoad | None = None
        self._cache_since_ms = 0
        self._fault = ""

    def serve(self, *, context_tokens_max: int, ranks: int) -> None:
        """Report from here on that the lane serves."""
        self._is_serving, self._fault = True, ""
        self._context_tokens_max = context_tokens_max
        self._ranks = ranks
        self._changed.set()

    def stop_serving(self) -> None:
        """Report from here on that the lane does not serve: its engine is lost, or it leaves."""
        self._is_serving = False
        self._changed.set()

    def note_fault(self, why: str) -> None:
        """Report from here on, while the lane does not serve, why its engine cannot; "" if it can.

        It is asked again and again, and only another answer is a change.
        """
        fault = why[:_FAULT_CHARACTERS_MAX]
        if fault != self._fault:
            self._fault = fault
            self._changed.set()

    def allow(self, *, is_wanted: bool) -> None:
        """Report from here on that the lane serves only if it is wanted and its engine serves."""
        self._is_wanted = is_wanted
        self._changed.set()

    def note_load(self, load: EngineLoad | None) -> None:
        """Report this load from here on, with the next heartbeat."""
        self._load = load

    async def run(self) -> None:
        """Write a report every `heartbeat_s` and on change, until cancelled."""
        while True:
            self._changed.clear()
            await self.write_report()
            await wait_at_most(self._changed, self._heartbeat_s)

    async def write_report(self) -> None:
        """Write one report."""
        weights, requests = self._weights.served.weights, self._requests
        lane = self._identity.lane
        report = ReportedEngine(
            lane=lane,
            epoch=self._identity.epoch,
            url=self._identity.url,
            is_serving=self._is_serving and self._is_wanted,
            lineage=weights.lineage,
            version=weights.version,
            running=requests.running,
            queued=requests.queued,
            reported_ms=now_ms(),
            context_tokens_max=self._context_tokens_max,
            output_tokens_total=requests.output_tokens_total,
            ranks=self._ranks,
            weights_address=self._identity.weights_address,
            load=self._load,
            process_group=self._weights.shared_group,
            cache_since_ms=self._cache_since_ms,
            detail=self._fault,
        )
        self._telemetry.gauge("inference.running", report.running, lane=lane)
        self._telemetry.gauge("inference.queued", report.queued, lane=lane)
        self._telemetry.gauge("inference.weight_version", report.version, lane=lane)
        self._telemetry.gauge("inference.remembered_bytes", requests.remembered_bytes, lane=lane)
        await self._writer.write(emit_of_report(report))

    async def write_loaded_weights(self, loading: Loading) -> None:
        """Write which weights the lane serves and how they arrived; the engine's cache is empty."""
        self._cache_since_ms = now_ms()
        weights = self._weights.served.weights
        loaded = LoadedWeights(
            lane=self._identity.lane,
            epoch=self._identity.epoch,
            lineage=weights.lineage,
            version=weights.version,
            path=loading.path,
            duration_s=loading.duration_s,
            paused_s=loading.paused_s,
        )
        topic = topics.LOADED_WEIGHTS.name
        await self._writer.write(emit_of(Output(topic=topic, partition=loaded.lane, record=loaded)))
        self._telemetry.event(
            "loaded_weights",
            lane=loaded.lane,
            weights=weights.name,
            path=loading.path,
            duration_s=round(loading.duration_s, 3),
            paused_s=round(loading.paused_s, 3),
        )
        self._telemetry.count("inference.weight_loads", path=loading.path)
        self._telemetry.observe("inference.load_s", loading.duration_s)
        self._telemetry.observe("inference.paused_s", loading.paused_s)
        self._changed.set()


def emit_of_report(report: ReportedEngine) -> Emit:
    """The log record of one report."""
    topic = topics.REPORTED_ENGINES.name
    return emit_of(Output(topic=topic, partition=report.lane, record=report))
