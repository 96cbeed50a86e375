"""The training loop: one step after the other, each exactly once in the lineage that survives."""

import asyncio
import dataclasses
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from forgemq_bus.log import Emit, Headers, Place, Reader, TransactionWriter
from forgemq_contracts import topics
from forgemq_contracts.run import staleness_limit
from forgemq_contracts.steps import ScheduledStep, TrainedStep, TrainingMetrics
from forgemq_contracts.topics import MERGED_TREES, SCHEDULED_STEPS, TRAINED_STEPS
from forgemq_shell.dead_letters import DeadLetters
from forgemq_shell.service import Context
from forgemq_telemetry.traces import completion_trace, trace_headers
from forgemq_trainer.core.alarms import Thresholds, alarms
from forgemq_trainer.history import StepHistory
from forgemq_trainer.publisher import Publisher
from forgemq_trainer.ranks.ranks import Ranks, device_of, launch_of
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.storage.checkpoint import Checkpoint
from forgemq_trainer.storage.weights import WeightsFolder
from forgemq_trainer.store import Store
from forgemq_trainer.training import ReadStep, Training
from forgemq_trainer.tree_source import TreeSource

READ_TIMEOUT_S = 0.25


class LostTreeError(Exception):
    """A step that was trained and accounted cannot be trained again: one of its trees is lost."""


class TrainingLoop:
    """Owns the order of a step; everything that blocks runs in a worker thread."""

    def __init__(
        self,
        *,
        context: Context,
        settings: TrainerSettings,
        store: Store,
        publisher: Publisher,
        claim: TransactionWriter,
        lineage: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._context = context
        self._settings = settings
        self._store = store
        self._publisher = publisher
        self._claim = claim
        self._lineage = lineage
        self._ranks = ranks
        self._checkpoint_step = -1
        self._accounted: Mapping[int, TrainedStep] = {}
        configuration = context.configuration
        staleness = max(staleness_limit(queue) for queue in configuration.queues)
        self._staleness_max = staleness + configuration.trainer.steps_ahead_max

    async def run(self, checkpoint: Checkpoint | None, history: StepHistory) -> None:
        """Publish where training stands, then train what is scheduled until told to stop."""
        configuration = self._context.configuration
        training = await asyncio.to_thread(
            Training,
            configuration,
            device=device_of(self._settings.device, launch=launch_of(self._context.environ)),
            checkpoint=checkpoint,
            ranks=self._ranks,
        )
        weights = await asyncio.to_thread(
            self._store.restored_weights, training, checkpoint, lineage=self._lineage
        )
        since: Mapping[int, int] = {}
        trained: TrainedStep | None = None
        self._accounted = history.trained
        if checkpoint is not None:
            self._checkpoint_step = checkpoint.step
            since = dict(checkpoint.record.tree_positions)
            if checkpoint.step not in history.trained:
                trained = checkpoint.record.trained
            await self._commit(trained, needed=since, headers=())
        self._context.telemetry.event(
            "restored", lineage=self._lineage, version=training.version, sha256=weights.sha256
        )
        await self._publish(weights, version=training.version, headers=())
        trees = await TreeSource.open(
            self._context.log,
            partitions=configuration.log.group_partitions,
            since=since,
            telemetry=self._context.telemetry,
        )
        place = Place(SCHEDULED_STEPS.name, 0)
        log = self._context.log
        steps = await log.reader(await log.first_positions([place]))
        dead_letters = DeadLetters(log, await log.writer(), service="trainer")
        while found := await self._next(steps, training.version, dead_letters=dead_letters):
            scheduled, trace = found
            await self._step(scheduled, training, trees, trace=trace)
        await asyncio.to_thread(training.end)

    async def _next(
        self, steps: Reader, version: int, *, dead_letters: DeadLetters
    ) -> tuple[ScheduledStep, Headers] | None:
        """The step that this version trains, and its trace; None when told to stop."""
        while not self._context.stop.is_set():
            for record in await steps.read(timeout_s=READ_TIMEOUT_S, records_max=1):
                try:
                    scheduled = topics.decode(SCHEDULED_STEPS, record.value)
                except msgspec.ValidationError as error:
                    await dead_letters.bury(record, f"does not decode: {error}")
                    continue
                assert isinstance(scheduled, ScheduledStep)
                if scheduled.step > version:
                    raise ValueError(
                        f"scheduled-steps goes from {version - 1} to {scheduled.step}: "
                        f"step {version} is missing"
                    )
                if scheduled.step == version:
                    return scheduled, trace_headers(record.headers)
        return None

    async def _step(
        self, scheduled: ScheduledStep, training: Training, trees: TreeSource, *, trace: Headers
    ) -> None:
        telemetry = self._context.telemetry
        clock = asyncio.get_running_loop()
        started_s = clock.time()
        values = await trees.collect(scheduled)
        step = await asyncio.to_thread(self._read, scheduled, values, training)
        for group, reason in step.failed:
            telemetry.event("group_failed", step=scheduled.step, group=group, reason=reason)
        links = [completion_trace(name) for name in step.completion_ids]
        with telemetry.span("step", parent=trace, links=links, step=scheduled.step) as span:
            metrics = await asyncio.to_thread(training.train, step)
            trees.forget(
                (group.group_id for group in scheduled.groups),
                version_min=training.version - self._staleness_max,
            )
            weights = await asyncio.to_thread(
                self._store.save_weights, training, lineage=self._lineage
            )
            trained = self._record(step, metrics, duration_s=clock.time() - started_s)
            needed: Mapping[int, int] = {}
            if trained.checkpoint_step == scheduled.step:
                positions = trees.positions()
                await asyncio.to_thread(
                    self._store.save_checkpoint,
                    training,
                    weights=weights,
                    trained=trained,
                    tree_positions=positions,
                )
                self._checkpoint_step = scheduled.step
                needed = dict(positions)
            await self._commit(trained, needed=needed, headers=span.headers())
            self._report(trained)
            await self._publish(weights, version=training.version, headers=span.headers())

    def _read(
        self, scheduled: ScheduledStep, values: Mapping[str, bytes], training: Training
    ) -> ReadStep:
        """What the step trains; of a step that an earlier life trained exactly the same groups.

        Its record is what the groups were retired by, so this life may neither leave out one of
        its groups nor train one that had failed.

        Raises:
            LostTreeError: a group that was trained cannot be read any more.
        """
        accounted = self._accounted.get(scheduled.step)
        if accounted is None:
            return training.read(scheduled, values)
        groups = {group.group_id: group for group in scheduled.groups}
        again = replace(scheduled, groups=tuple(groups[name] for name in accounted.group_ids))
        step = training.read(again, values)
        if step.failed:
            group, reason = step.failed[0]
            raise LostTreeError(
                f"step {scheduled.step} trained group {group} in lineage {accounted.lineage} and "
                f"has to train it again, but {reason}; continue from a later checkpoint"
            )
        reason = f"it had failed when lineage {accounted.lineage} trained the step"
        failed = tuple((group, reason) for group in accounted.failed_group_ids)
        return dataclasses.replace(step, scheduled=scheduled, failed=failed)

    def _record(
        self, step: ReadStep, metrics: TrainingMetrics, *, duration_s: float
    ) -> TrainedStep:
        """The step's record; it names its own checkpoint where one is due."""
        scheduled = step.scheduled
        every = self._context.configuration.trainer.checkpoint_every_steps
        is_due = (scheduled.step + 1) % every == 0 or scheduled.is_last
        return TrainedStep(
            step=scheduled.step,
            lineage=self._lineage,
            group_ids=tuple(group.group_id for group in step.groups),
            failed_group_ids=tuple(group for group, _ in step.failed),
            metrics=metrics,
            checkpoint_step=scheduled.step if is_due else self._checkpoint_step,
            duration_s=duration_s,
            is_last=scheduled.is_last,
        )

    async def _publish(self, weights: WeightsFolder, *, version: int, headers: Headers) -> None:
        await self._publisher.publish(
            weights, lineage=self._lineage, version=version, headers=headers
        )

    def _raise_alarms(self, trained: TrainedStep) -> None:
        settings, telemetry = self._settings, self._context.telemetry
        thresholds = Thresholds(
            logprob_gap_mean=settings.alarm_logprob_gap_mean,
            kl_k3=settings.alarm_kl_k3,
            ratio_p99=settings.alarm_ratio_p99,
            capped_share=settings.alarm_capped_share,
        )
        for alarm in alarms(trained.metrics, thresholds):
            telemetry.event(
                "alarm",
                step=trained.step,
                metric=alarm.metric,
                value=alarm.value,
                threshold=alarm.threshold,
            )
            telemetry.count("trainer.alarms", metric=alarm.metric)

    def _report(self, trained: TrainedStep) -> None:
        telemetry, metrics = self._context.telemetry, trained.metrics
        telemetry.event(
            "trained",
            step=trained.step,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            loss_tokens=metrics.loss_tokens,
            logprob_gap_max=metrics.logprob_gap_max,
            duration_s=trained.duration_s,
        )
        telemetry.count("trainer.steps")
        telemetry.count("trainer.failed_groups", len(trained.failed_group_ids))
        telemetry.count("trainer.tree_tokens", metrics.tree_tokens)
        telemetry.count("trainer.loss_entries", metrics.loss_tokens)
        telemetry.gauge("trainer.version", trained.step + 1)
        telemetry.gauge("trainer.loss", metrics.loss)
        telemetry.gauge("trainer.grad_norm", metrics.grad_norm)
        telemetry.gauge("trainer.entropy", metrics.entropy)
        telemetry.gauge("trainer.kl_k3", metrics.kl_k3)
        telemetry.gauge("trainer.kl_reference", metrics.kl_reference)
        telemetry.gauge("trainer.ratio_p99", metrics.ratio_p99)
        telemetry.gauge("trainer.capped_share", metrics.capped_share)
        telemetry.gauge("trainer.logprob_gap_max", metrics.logprob_gap_max)
        telemetry.gauge("trainer.logprob_gap_mean", metrics.logprob_gap_mean)
        telemetry.gauge("trainer.branch_loss", metrics.branch_loss)
        telemetry.gauge("trainer.flop_ratio", metrics.flop_ratio)
        telemetry.gauge("trainer.flop_ratio_weights", metrics.flop_ratio_weights)
        telemetry.gauge("trainer.flop_ratio_attention", metrics.flop_ratio_attention)
        telemetry.gauge("trainer.token_ratio", metrics.request_tokens / max(1, metrics.tree_tokens))
        telemetry.gauge("trainer.append_ratio", metrics.append_tokens / max(1, metrics.tree_tokens))
        telemetry.count("trainer.route_disagreements", metrics.route_disagreements)
        self._raise_alarms(trained)
        telemetry.observe("trainer.step_s", trained.duration_s)
        telemetry.observe("trainer.forward_backward_s", metrics.forward_backward_s)

    async def _commit(
        self, trained: TrainedStep | None, *, needed: Mapping[int, int], headers: Headers
    ) -> None:
        """Through the claim: once a newer trainer has started, the broker refuses this one.

        Args:
            trained: The step's record; None where the log has it.
            needed: Where the durable checkpoint that it names reads trees again, by partition:
                none before that is needed any more.
            headers: Of the record.

        Raises:
            FencedError: a newer trainer of this run has started.
        """
        outputs = []
        if trained is not None:
            outputs.append(
                Emit(
                    topic=TRAINED_STEPS.name,
                    partition=0,
                    key=str(trained.step).encode(),
                    value=topics.encode(trained),
                    headers=headers,
                )
            )
        await self._claim.commit(
            outputs=outputs,
            group=topics.needed_group("trainer"),
            positions={Place(MERGED_TREES.name, n): position for n, position in needed.items()},
        )
