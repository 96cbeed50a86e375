"""Keeps one engine attached to its lane: wait for it, tidy it up, load, watch, begin again.

The engine is a process with an unknown past: it may be fresh, or paused in the middle of an update
that an earlier inference process began, or restarted between two health checks.
"""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from forgemq_contracts.engine_report import ModelInfo
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import trained_head
from forgemq_contracts.weights import EngineLoad
from forgemq_inference.core.engine_load import EngineMeter
from forgemq_inference.core.weights import (
    BASE,
    BROKEN_NAME,
    WeightsState,
    served_by,
    weights_of_name,
)
from forgemq_inference.durable import WEIGHTS_FILE, DurableCopyError, file_sha256
from forgemq_inference.engine import (
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    EngineUnreadyError,
    ServerInfo,
)
from forgemq_inference.engine_pair import LaneEngine
from forgemq_inference.limits import ModelFolderError, check_engine, engine_limits
from forgemq_inference.pause_clock import PauseClock
from forgemq_inference.reports import Reports
from forgemq_inference.requests import NOT_SERVING, Requests
from forgemq_inference.settings import InferenceSettings
from forgemq_inference.weight_loader import Loading, WeightLoader
from forgemq_shell.interruption import wait_at_most
from forgemq_telemetry import Telemetry
from forgemq_telemetry.causes import causes

_POLL_S = 0.5
"""Between two looks for an engine that starts; a start takes a minute or more."""
_RETRY_S = 0.2
"""Between failed health checks: three of them decide within a second, before the lane lapses."""
_LOAD_RETRY_S = 1.0
"""Times the number of failures: a blob store that restarts gets some 10 s for its attempts."""
_RESUME_TIMEOUT_S = 30.0
"""The engine answers within a decoding step, but may be busy with its first compilation."""


class Attachment:
    """Serves a lane with one engine; a lost engine is waited for, and is not a failure.

    Lifecycle: one task `run`. `notify_published` is called after a publication; setting
    `suspected` makes a health check happen at once.
    """

    def __init__(
        self,
        engine: LaneEngine,
        *,
        configuration: RunConfiguration,
        settings: InferenceSettings,
        weights: WeightsState,
        loader: WeightLoader,
        pauses: PauseClock,
        requests: Requests,
        reports: Reports,
        suspected: asyncio.Event,
        telemetry: Telemetry,
    ) -> None:
        """Begin without an engine."""
        self._engine = engine
        self._configuration = configuration
        self._settings = settings
        self._weights = weights
        self._loader = loader
        self._pauses = pauses
        self._requests = requests
        self._reports = reports
        self._telemetry = telemetry
        self._meter = EngineMeter()
        self._published = asyncio.Event()
        self._suspected = suspected
        self._is_loading = False
        self._is_wanted = True

    def want(self, *, is_wanted: bool) -> None:
        """Let the lane serve, or let it drain: it takes no request, and its weights stay new.

        A load that has reached the engine ends first. A trainer that reads of a lane that does not
        serve leaves it, and the requests there would stand still until the transfer's deadline.
        """
        self._is_wanted = is_wanted
        if not self._is_changing:
            self._reports.allow(is_wanted=is_wanted)

    def notify_published(self) -> None:
        """Wake the task that loads: newer weights are published, or a group is offered."""
        self._loader.note_published()
        self._published.set()

    async def run(self) -> None:
        """Attach the engine and serve until it is lost, again and again.

        What ends it is in the lane's last report, so that people read it who see no log.

        Raises:
            ExceptionGroup: of EngineError, the engine did not come up, is refused, or cannot be
                brought to published weights; of DurableCopyError, the durable copy stays unusable;
                of ModelFolderError, the model's folder does not give the engine's limits.
        """
        try:
            await self._attach_again_and_again()
        except* (EngineError, DurableCopyError, ModelFolderError) as errors:
            self._reports.note_fault(str(causes(errors)[0]))
            await self._reports.write_report()
            raise

    async def _attach_again_and_again(self) -> None:
        while True:
            await self._wait_healthy()
            self._reports.note_fault("")
            try:
                await self._attach_engine()
                await self._serve_lane()
            except* EngineUnreachableError as lost:
                error = str(lost.exceptions[0])
                self._telemetry.event("engine_lost", url=self._engine.url, error=error)
                self._telemetry.count("inference.engine_losses")
                self._reports.note_fault(f"{self._engine.url} is lost: {error}")
            finally:
                self._requests.close(NOT_SERVING)
                self._reports.stop_serving()
            # An engine may answer health checks and nothing else.
            await asyncio.sleep(_POLL_S)

    async def _wait_healthy(self) -> None:
        deadline_s = time.monotonic() + self._settings.engine_start_timeout_s
        while True:
            try:
                return await self._engine.check_health(timeout_s=self._settings.health_timeout_s)
            except EngineError as error:
                if time.monotonic() > deadline_s:
                    raise EngineRefusedError(
                        f"no healthy engine at {self._engine.url} within "
                        f"{self._settings.engine_start_timeout_s:.0f} s: {error}"
                    ) from error
                self._reports.note_fault(f"{self._engine.url} is not healthy: {error}")
            await asyncio.sleep(_POLL_S)

    async def _wait_ready(self) -> tuple[ModelInfo, ServerInfo]:
        """What the engine says of itself; asked again while it answers that it failed."""
        deadline_s = time.monotonic() + self._settings.engine_start_timeout_s
        said = ""
        while True:
            try:
                return await self._engine.model_info(), await self._engine.server_info()
            except EngineUnreadyError as error:
                if time.monotonic() > deadline_s:
                    raise EngineRefusedError(
                        f"the engine at {self._engine.url} answers health checks, and failed to "
                        f"answer for {self._settings.engine_start_timeout_s:.0f} s: {error}"
                    ) from error
                if str(error) != said:
                    said = str(error)
                    self._telemetry.event("engine_not_ready", url=self._engine.url, error=said)
                    self._reports.note_fault(f"{self._engine.url} is not ready: {error}")
            await asyncio.sleep(_POLL_S)

    async def _attach_engine(self) -> None:
        started_s, paused_s = time.monotonic(), self._pauses.total_s
        info, server = await self._wait_ready()
        model = self._configuration.model
        await check_engine(server, info, model=model, url=self._engine.url)
        await self._tidy_engine()
        limits = await engine_limits(
            server,
            model_path=model.path,
            context_tokens_max=model.context_tokens_max,
        )
        if limits.experts is not None and not limits.records_routes:
            # Without routes the trainer chooses experts by itself: part of G5's gap is routing.
            self._telemetry.event("routes_not_recorded", url=self._engine.url)
        pool = self._configuration.pool
        if pool is not None and server.hicache_storage_backend != pool.storage:
            # The engine serves as well, and computes what it could have found.
            backend = server.hicache_storage_backend or ""
            self._telemetry.event("pool_not_attached", url=self._engine.url, storage=backend)
        if self._configuration.speculation is not None and server.speculative_algorithm is None:
            # The run goes on as well without: only no token is guessed.
            self._telemetry.event("engine_does_not_speculate", url=self._engine.url)
        await self._load_newest()
        await self._engine.resume(timeout_s=_RESUME_TIMEOUT_S)
        self._pauses.resume()
        self._requests.open(limits)
        self._reports.serve(context_tokens_max=limits.context_tokens_max, ranks=server.tp_size)
        await self._reports.write_loaded_weights(
            Loading(
                path="start",
                duration_s=time.monotonic() - started_s,
                paused_s=self._pauses.total_s - paused_s,
            )
        )

    async def _load_newest(self) -> None:
        """Load what is published; wait for it if the engine must not serve what it has.

        That is so if its weights are older than those that the lane served before, or not whole, or
        of another run.
        """
        while True:
            while await self._load_next() is not None:
                pass
            if not self._weights.has_gone_back and not self._weights.served.is_dirty:
                return
            self._telemetry.event("waits_for_copy", url=self._engine.url)
            self._published.clear()
            await self._published.wait()

    async def _tidy_engine(self) -> None:
        """End what an earlier process left running, and learn which weights the engine holds."""
        with suppress(EngineRefusedError):
            # Refused if there is no open update, which is the usual case.
            await self._engine.end_update(timeout_s=self._settings.durable_timeout_s)
        await self._engine.abort_all()
        # A group of an engine's processes may take a request before an abort that came earlier, but
        # each answers what was asked after the abort.
        await self._engine.server_info()
        info = await self._engine.model_info()
        name = info.weight_version
        is_base = name != BROKEN_NAME and (weights_of_name(name) or BASE) == BASE
        base_sha256 = await self._base_sha256(info) if is_base else None
        served = served_by(name, base_sha256=base_sha256)
        if self._weights.is_foreign(served):
            self._telemetry.event("weights_of_another_run", url=self._engine.url, weights=name)
            await self._engine.name_weights(BROKEN_NAME)
            served = served_by(BROKEN_NAME, base_sha256=None)
        if is_base and name != BASE.name:
            await self._engine.name_weights(BASE.name)
        self._weights.note_restarted(served)
        trained = trained_head(self._configuration.speculation)
        if is_base and trained is not None:
            start = Path(trained.head) / WEIGHTS_FILE
            self._weights.note_head(await file_sha256(start))

    async def _base_sha256(self, info: ModelInfo) -> str | None:
        """Checksum of the model that the engine began with; None if it cannot be read from here.

        By the engine's own folder: it may have been started with another model than the run's.
        """
        model = self._configuration.model
        wanted = model.path
        held_sha256 = None
        if info.model_path:
            held_sha256 = await file_sha256(Path(info.model_path) / WEIGHTS_FILE)
        # An engine with 8-bit blocks begins with a model of its own, which has the run's in blocks.
        if info.model_path == wanted or model.engine_quantization != "none":
            return held_sha256
        if held_sha256 != await file_sha256(Path(wanted) / WEIGHTS_FILE):
            self._telemetry.event(
                "engine_of_another_model",
                url=self._engine.url,
                folder=info.model_path,
                wanted=wanted,
            )
        return held_sha256

    async def _serve_lane(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_engine())
            group.create_task(self._follow_weights())

    async def _follow_weights(self) -> None:
        while True:
            await self._published.wait()
            self._published.clear()
            # Recorded before the next one: a record names the weights that are served.
            while (loading := await self._load_next()) is not None:
                await self._reports.write_loaded_weights(loading)
            await self._join_offered()

    async def _join_offered(self) -> None:
        """Let the engine join the group that is offered, if one is."""
        join = self._weights.take_join()
        if join is None:
            return
        self._is_loading = True
        try:
            await self._loader.join(join)
        finally:
            self._is_loading = False
            self._reports.allow(is_wanted=self._is_wanted)

    async def _load_next(self) -> Loading | None:
        """Load the newest published weights; None if the engine has them, or must wait for them."""
        failures = 0
        self._is_loading = True
        try:
            while (load := self._weights.next_load()) is not None:
                try:
                    loading = await self._loader.load(load)
                    if loading is not None:
                        return loading
                except (EngineRefusedError, DurableCopyError) as error:
                    failures += 1
                    self._telemetry.event("load_failed", failures=failures, error=str(error))
                    if failures >= self._settings.load_attempts_max:
                        raise
                    await asyncio.sleep(_LOAD_RETRY_S * failures)
            return None
        finally:
            self._is_loading = False
            self._reports.allow(is_wanted=self._is_wanted)

    @property
    def _is_changing(self) -> bool:
        """Whether a load or a join is under way in the engine itself."""
        return self._is_loading and not self._loader.is_fetching

    async def _watch_engine(self) -> None:
        """Check the engine until it is lost.

        Raises:
            EngineUnreachableError: the engine stopped answering, or is another process.
        """
        failures = 0
        while True:
            await wait_at_most(self._suspected, self._settings.heartbeat_s)
            self._suspected.clear()
            if self._is_changing:
                # A load has its own deadlines, and the engine may not answer during one.
                continue
            try:
                await self._check_engine()
                failures = 0
            except EngineError as error:
                failures += 1
                await self._count_failure(failures, error)
                self._suspected.set()

    async def _count_failure(self, failures: int, error: EngineError) -> None:
        if failures >= self._settings.health_failures_max:
            raise EngineUnreachableError(str(error)) from error
        await asyncio.sleep(_RETRY_S)

    async def _check_engine(self) -> None:
        await self._engine.check_health(timeout_s=self._settings.health_timeout_s)
        served = self._weights.served
        name = (await self._engine.model_info()).weight_version
        if not self._is_changing and served == self._weights.served:
            expected = served.name
            if name != expected:
                raise EngineUnreachableError(f"restarted: its weights are {name}, were {expected}")
        load = await self._engine_load()
        self._reports.note_load(load)
        self._requests.batch.note_load(load)

    async def _engine_load(self) -> EngineLoad | None:
        """What the engine has to do; None if it does not say, since it serves as well without."""
        try:
            return self._meter.observe(await self._engine.counters())
        except EngineError:
            return None
