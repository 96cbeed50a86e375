"""The training loop: step after step, each exactly once in the lineage that survives.

A step's weights and checkpoint are saved, and its records written, while the next step computes the
gradients of its first update: that changes no weight. The update waits until all of it is done, so
there is never more than one step on its way. One rank copies nothing to keep it. Of several, rank 0
gathers the weights before the next step, and each writes its part of the optimizer's state beside
it. The records' order is the same as without. Engines are given the weights first, so that they
wait for no disk. A crash at any point leaves a step either unrecorded, or in a checkpoint that the
next life finds or before which it begins: it trains an unrecorded step again and publishes it under
its own lineage, whether or not an engine has served its weights already.
"""

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from forgemq_bus.decoding import decoded_record
from forgemq_bus.log import Headers, Place, Reader
from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_contracts.mixture import staleness_limits
from forgemq_contracts.speculation import unpublished_head
from forgemq_contracts.steps import ScheduledStep, TrainedStep, TrainingMetrics
from forgemq_contracts.topics import MERGED_TREES, SCHEDULED_STEPS, TRAINED_STEPS
from forgemq_shell.dead_letters import DeadLetters
from forgemq_shell.records import emit_of
from forgemq_shell.service import Context
from forgemq_telemetry.traces import completion_trace, trace_headers
from forgemq_trainer.completion_source import KEPT_BYTES_MAX
from forgemq_trainer.core.alarms import Thresholds, alarms
from forgemq_trainer.core.checkpoint_pace import CheckpointPace
from forgemq_trainer.core.fresh import FreshCompletions, HeldWeights
from forgemq_trainer.present_folders import PresentFolders
from forgemq_trainer.previous_lives import PreviousLives, TrainerLife
from forgemq_trainer.publisher import Publisher
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.step_report import report_step
from forgemq_trainer.storage.checkpoint import Checkpoint
from forgemq_trainer.store import Store
from forgemq_trainer.training import ReadStep, Training
from forgemq_trainer.tree_source import TreeSource

READ_TIMEOUT_S = 0.25
"""How long a read for the next step blocks, hence how late the loop sees a request to stop."""


class LostTreeError(Exception):
    """A step that was trained and accounted cannot be trained again: one of its trees is lost."""


class TrainingLoop:
    """Owns the order of a step; everything that blocks runs in a worker thread."""

    def __init__(
        self,
        context: Context,
        settings: TrainerSettings,
        *,
        store: Store,
        publisher: Publisher,
        life: TrainerLife,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Train nothing yet; `tasks` runs the saving, and ends all if that fails."""
        self._context = context
        self._tasks = tasks
        self._thresholds = Thresholds(
            logprob_gap_mean=settings.alarm_logprob_gap_mean,
            kl_k3=settings.alarm_kl_k3,
            ratio_p99=settings.alarm_ratio_p99,
            capped_share=settings.alarm_capped_share,
        )
        self._store = store
        self._folders = PresentFolders(
            context.blobs,
            Path(settings.folder),
            telemetry=context.telemetry,
            is_stopping=context.stop.is_set,
        )
        self._publisher = publisher
        self._is_beside = settings.saves_beside_step
        self._saving: asyncio.Task[None] | None = None
        self._life = life
        self.fresh = FreshCompletions(bytes_max=KEPT_BYTES_MAX)
        self._checkpoint_step = -1
        self._pace = CheckpointPace(context.configuration.trainer)
        self._previous = PreviousLives()
        self._restored_version = 0
        configuration = context.configuration
        # No step to come may train a group that is staler, so its tree can be dropped.
        staleness = max(staleness_limits(configuration).values())
        self._staleness_max = staleness + configuration.trainer.steps_ahead_max

    async def run(
        self, training: Training, checkpoint: Checkpoint | None, previous: PreviousLives
    ) -> None:
        """Publish the version that training continues from, then train until the stop event."""
        await self._restore(training, checkpoint, previous)
        log = self._context.log
        trees = await TreeSource.open(
            log,
            partitions=self._context.configuration.log.group_partitions,
            since=dict(checkpoint.record.tree_positions) if checkpoint is not None else {},
            telemetry=self._context.telemetry,
        )
        # From the first record, not from a committed position: `_next` skips the trained steps, and
        # the checkpoint alone decides which ones these are.
        steps = await log.reader(await log.first_positions([Place(SCHEDULED_STEPS.name, 0)]))
        dead_letters = DeadLetters(
            log, await log.writer(), service="trainer", telemetry=self._context.telemetry
        )
        try:
            while found := await self._next(steps, training.version, dead_letters=dead_letters):
                scheduled, trace = found
                await self._step(scheduled, training, trees, trace=trace)
        finally:
            # Also after an error: the step before is trained, and its records are not lost.
            if self._saving is not None:
                await asyncio.wait([self._saving])
        await asyncio.to_thread(training.end)

    async def _restore(
        self, training: Training, checkpoint: Checkpoint | None, previous: PreviousLives
    ) -> None:
        """Write to the log what a previous life may not have written of the checkpoint's step."""
        await self._folders.wait()
        saved = await asyncio.to_thread(
            self._store.save_restored, training, checkpoint, lineage=self._life.lineage
        )
        self._previous = previous
        self._restored_version = training.version
        if checkpoint is not None:
            self._checkpoint_step = checkpoint.step
            is_written = checkpoint.step in previous.trained
            await self._commit(
                None if is_written else checkpoint.record.trained,
                needed=dict(checkpoint.record.tree_positions),
                headers=(),
            )
        self._context.telemetry.event(
            "restored",
            lineage=self._life.lineage,
            version=training.version,
            sha256=saved.weights.sha256,
        )
        await self._publisher.publish(saved, headers=())
        configuration = self._context.configuration
        if unpublished := unpublished_head(
            configuration.speculation, steps=configuration.trainer.steps
        ):
            self._context.telemetry.event("head_unpublished", detail=unpublished)

    async def _next(
        self, steps: Reader, version: int, *, dead_letters: DeadLetters
    ) -> tuple[ScheduledStep, Headers] | None:
        """Wait for the step that this version trains, and its trace; None after the stop event."""
        while not self._context.stop.is_set():
            # One at a time: a record that is read beyond the wanted one would be lost.
            for record in await steps.read(timeout_s=READ_TIMEOUT_S, records_max=1):
                try:
                    scheduled = decoded_record(record)
                except msgspec.ValidationError as error:
                    await dead_letters.write(record, f"does not decode: {error}")
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
        """Train one step, then begin to save and to publish it."""
        telemetry = self._context.telemetry
        clock = asyncio.get_running_loop()
        started_s = clock.time()
        values = await trees.collect(scheduled)
        step = await asyncio.to_thread(self._read, scheduled, values, training)
        for group, reason in step.failed:
            telemetry.event("group_failed", step=scheduled.step, group=group, reason=reason)
        links = [completion_trace(name) for name in step.completion_ids]
        with telemetry.span("step", parent=trace, links=links, step=scheduled.step) as span:
            await asyncio.to_thread(training.compute_gradients, step)
            # The weights change now, and what is saved must be those of the step before.
            await self._finish_saving()
            metrics = await self._update(step, training)
            # Before the checkpoint, whose positions must not count this step's trees as needed.
            trees.forget(
                (group.group_id for group in scheduled.groups),
                version_min=training.version - self._staleness_max,
            )
            # The duration ends here: the record is part of the checkpoint, so it cannot include it.
            trained = self._record(step, metrics, duration_s=clock.time() - started_s)
            self._checkpoint_step = trained.checkpoint_step
            await asyncio.to_thread(self._begin_saving, training, trained)
            saving = self._save(trained, training, trees.positions(), headers=span.headers())
            self._saving = self._tasks.create_task(saving)
        if not self._is_beside:
            await self._finish_saving()

    async def _update(self, step: ReadStep, training: Training) -> TrainingMetrics:
        # The latest moment at which the trainer still holds the weights that engines run.
        fresh = self.fresh.trees(
            HeldWeights(self._life.lineage, training.version),
            but=frozenset(group.group_id for group in step.scheduled.groups),
        )
        return await asyncio.to_thread(
            training.update,
            [topics.encode(tree) for tree in fresh],
            is_remade=self._is_remade(training.version),
        )

    def _begin_saving(self, training: Training, trained: TrainedStep) -> None:
        """Do what all ranks do together, before they compute the next step."""
        training.saving.gather_weights()
        if trained.checkpoint_step == trained.step:
            training.saving.begin_optimizer()

    async def _save(
        self,
        trained: TrainedStep,
        training: Training,
        positions: tuple[tuple[int, int], ...],
        *,
        headers: Headers,
    ) -> None:
        """Give engines a trained step's weights, make all durable and commit the step's record."""
        started_s = asyncio.get_running_loop().time()
        await self._folders.wait()
        written = await asyncio.to_thread(
            self._store.write_version, training, lineage=self._life.lineage
        )
        # Publishing the first version may wait for the base model's evaluation; its record may not.
        is_first = written.version == 1
        if not is_first:
            await self._publisher.offer(written, headers=headers)
        saved = await asyncio.to_thread(self._store.keep_version, written)
        if not is_first:
            await self._publisher.publish(saved, headers=headers)
        needed: Mapping[int, int] = {}
        if trained.checkpoint_step == trained.step:
            await self._folders.wait()
            begun_s = asyncio.get_running_loop().time()
            await asyncio.to_thread(
                self._store.save_checkpoint,
                training,
                weights=saved.checkpointed,
                trained=trained,
                tree_positions=positions,
            )
            self._pace.took(asyncio.get_running_loop().time() - begun_s)
            needed = dict(positions)
        await self._commit(trained, needed=needed, headers=headers)
        saving_s = asyncio.get_running_loop().time() - started_s
        report_step(trained, self._context.telemetry, saving_s=saving_s)
        if is_first:
            await self._publisher.publish(saved, headers=headers)

    async def _finish_saving(self) -> None:
        """Wait until the step before is durable, recorded and published."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    def _is_remade(self, version: int) -> bool:
        """Whether this life trained a step again to make a version that an older one published."""
        return version > self._restored_version and version in self._previous.published

    def _read(
        self, scheduled: ScheduledStep, values: Mapping[str, bytes], training: Training
    ) -> ReadStep:
        """Read the step's trees; if a previous life trained the step, of exactly its groups.

        That life's record retired the groups. So this life may neither leave out a group that the
        record names as trained, nor train one that it names as failed.

        Raises:
            LostTreeError: a group that was trained can no longer be read.
        """
        accounted = self._previous.trained.get(scheduled.step)
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
        """The step's record; if a checkpoint is due after the step, it names that one."""
        scheduled = step.scheduled
        now_s = asyncio.get_running_loop().time()
        is_due = self._pace.is_due(scheduled.step, is_last=scheduled.is_last, now_s=now_s)
        return TrainedStep(
            step=scheduled.step,
            lineage=self._life.lineage,
            group_ids=tuple(group.group_id for group in step.groups),
            failed_group_ids=tuple(group for group, _ in step.failed),
            metrics=metrics,
            checkpoint_step=scheduled.step if is_due else self._checkpoint_step,
            duration_s=duration_s,
            is_last=scheduled.is_last,
            alarms=alarms(metrics, self._thresholds),
        )

    async def _commit(
        self, trained: TrainedStep | None, *, needed: Mapping[int, int], headers: Headers
    ) -> None:
        """Commit a step's record and the positions of its checkpoint, in one transaction.

        Args:
            trained: The step's record; None if it is on the log already.
            needed: First offset by partition at which the checkpoint that the record names reads
                trees again; trees before it may be deleted. Empty if there is no new checkpoint.
            headers: The step's trace, for the record.

        Raises:
            FencedError: a newer trainer of this run has started.
        """
        outputs = []
        if trained is not None:
            output = Output(topic=TRAINED_STEPS.name, partition=0, record=trained)
            outputs.append(emit_of(output, headers=headers))
        await self._life.claim.commit(
            outputs=outputs,
            group=topics.needed_group("trainer"),
            positions={Place(MERGED_TREES.name, n): position for n, position in needed.items()},
        )
