"""Windowed FIFO over all queues: the only owner of the generation queue Q.

Two rules together bound how stale a trained token can be (G3, derived in docs/staleness.md): the
window (window.py) bounds how many groups overtake a waiting one, the slots (slots.py) how many
stand before it when it is admitted.
"""

from collections.abc import Iterator, MutableSequence, Sequence

import msgspec

from forgemq_contracts import topics
from forgemq_contracts.accounting import RetiredIds
from forgemq_contracts.asked_keys import AskedKeys
from forgemq_contracts.dead_letters import DeadLetter
from forgemq_contracts.episodes import OpenedEpisode
from forgemq_contracts.groups import MergedGroup, RequestedGroup, RetireReason
from forgemq_contracts.lanes import WeightsId
from forgemq_contracts.messages import Event, InvalidRecordError, Output, Tick
from forgemq_contracts.mixture import mixture_of
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import TrainedStep
from forgemq_contracts.weights import LoadedWeights, ReportedEngine
from forgemq_scheduler.core.choices import scored_choice
from forgemq_scheduler.core.domain_queue import DomainQueue, queues_of, withdraw
from forgemq_scheduler.core.evaluations import Evaluations
from forgemq_scheduler.core.lanes import ServedLanes
from forgemq_scheduler.core.records import (
    admitted_group,
    closed_group,
    expiry,
    failure,
    never_admitted,
    scheduled_step,
)
from forgemq_scheduler.core.slots import Slots
from forgemq_scheduler.core.snapshot import OpenGroup, SchedulerSnapshot, TakenStep
from forgemq_scheduler.core.steps import Steps


class SchedulerCore:
    """Admits groups into N slots, forms steps inside the window, retires every group once.

    Life of a train group: waiting -> open (has a queue index and a slot) -> finished (merged,
    trainable) -> taken (scheduled into the step that forms) -> retired. Its slot is free when it
    retires untrained, or when all live lanes serve the version its step made. An open group is
    unclaimed, then playing, then perhaps closed: past its deadline, to be scored as it is.

    Example, one queue with N=12, W=4, P=6 and one step ahead: 12 groups are admitted at version
    0. Six finish inside the window: step 0. Six more: step 1, though step 0 still trains. Step 0
    is trained and version 1 is loaded by all lanes: six slots are free, six groups are admitted.
    """

    def __init__(self, configuration: RunConfiguration) -> None:
        self._partitions = configuration.log.group_partitions
        self._mixture = mixture_of(configuration)
        self._queues = queues_of(configuration)
        self._numbers = {queue.domain: n for n, queue in enumerate(configuration.queues)}
        self._now_ms = 0
        self._lanes = ServedLanes()
        self._steps = Steps(configuration.trainer)
        self._slots = Slots()
        self._requested_ids: set[str] = set()  # not admitted, any purpose
        self._open: dict[str, OpenGroup] = {}  # admitted, not retired, any purpose
        self._evaluations = Evaluations()
        self._retired = RetiredIds()
        self._asked = AskedKeys()  # of all groups ever requested
        self._outputs: list[Output] = []

    def handle(self, event: Event) -> Sequence[Output]:
        """Apply one event; return the records to write, in order."""
        self._outputs = []
        if isinstance(event, Tick):
            self._on_tick(event)
            self._advance()
            return self._outputs
        known_of_lanes = self._lanes.revision
        self._on_record(event.record)
        # Most records are claims and heartbeats. A claim changes no decision, nor does a heartbeat
        # that says only that a live lane is still there.
        is_heartbeat = isinstance(event.record, ReportedEngine)
        is_claim = isinstance(event.record, OpenedEpisode)
        if not is_claim and not (is_heartbeat and self._lanes.revision == known_of_lanes):
            self._advance()
        return self._outputs

    def snapshot(self) -> bytes:
        """All state; equal states give equal bytes."""
        checkpoint_step, holding = self._slots.snapshot()
        return SchedulerSnapshot(
            now_ms=self._now_ms,
            lanes=self._lanes.known(),
            served=self._lanes.served,
            lineage=self._steps.lineage,
            steps_scheduled=self._steps.scheduled,
            steps_trained=self._steps.trained,
            checkpoint_step=checkpoint_step,
            scheduled=self._steps.in_training(),
            holding=holding,
            queues=tuple(queue.snapshot() for queue in self._queues),
            evaluations_waiting=tuple(self._evaluations.waiting),
            evaluations=self._evaluations.groups(),
            retired=self._retired.to_bytes(),
            asked=self._asked.to_bytes(),
        ).to_bytes()

    def restore(self, snapshot: bytes) -> None:
        """Replace all state with that of a `snapshot()`."""
        state = SchedulerSnapshot.of(snapshot)
        self._now_ms = state.now_ms
        self._lanes.restore(state.lanes, served=state.served, now_ms=state.now_ms)
        self._steps.restore(
            scheduled=state.steps_scheduled,
            trained=state.steps_trained,
            lineage=state.lineage,
            in_training=state.scheduled,
        )
        self._slots.restore(checkpoint_step=state.checkpoint_step, holding=state.holding)
        for queue, queue_state in zip(self._queues, state.queues, strict=True):
            queue.restore(queue_state)
        self._evaluations.restore(waiting=state.evaluations_waiting, groups=state.evaluations)
        waiting = (request for requests in self._waiting() for request in requests)
        self._requested_ids = {request.group_id for request in waiting}
        train = (group for queue in self._queues for group in queue.groups.values())
        self._open = {group.group_id: group for group in (*state.evaluations, *train)}
        self._retired.restore(state.retired)
        self._asked.restore(state.asked)

    def _on_tick(self, tick: Tick) -> None:
        self._now_ms = max(self._now_ms, tick.run_ms)
        self._lanes.on_time(self._now_ms)
        late = self._evaluations.lapsed(now_ms=self._now_ms)
        late += [group for queue in self._queues for group in queue.lapsed(now_ms=self._now_ms)]
        for group in late:
            self._lapse(group)

    def _lapse(self, group: OpenGroup) -> None:
        """Close a group whose time to play is over; retire one that nothing moves."""
        queue = self._queues[group.queue]
        if group.phase == "playing":
            deadline_ms = queue.deadline_ms("closed", now_ms=self._now_ms)
            self._keep(group, phase="closed", deadline_ms=deadline_ms)
            record = closed_group(group, settings=queue.settings)
            self._write(topics.CLOSED_GROUPS, partition=group.queue, record=record)
        else:
            self._remove(group, "expired", detail=expiry(group, settings=queue.settings))

    def _on_record(self, record: msgspec.Struct) -> None:
        match record:
            case RequestedGroup():
                self._on_requested(record)
            case OpenedEpisode():
                self._on_opened(record)
            case MergedGroup():
                self._on_merged(record)
            case TrainedStep():
                self._on_trained(record)
            case LoadedWeights():
                self._lanes.on_loaded(record)
            case ReportedEngine():
                self._lanes.on_report(record)
            case DeadLetter():
                self._on_dead_letter(record)
            case _:
                raise InvalidRecordError(f"the scheduler takes no {type(record).__name__}")

    def _on_requested(self, request: RequestedGroup) -> None:
        number = self._numbers.get(request.domain)
        if number is None:
            raise InvalidRecordError(
                f"domain {request.domain!r} has no queue in the run's configuration"
            )
        is_new = self._asked.add(request.idempotency_key, domain=request.domain)
        by_id = (self._requested_ids, self._open, self._retired)  # of snapshots without keys
        if not is_new or any(request.group_id in ids for ids in by_id):
            return
        if request.purpose == "eval":
            self._evaluations.waiting.append(request)
        elif self._steps.has_ended:
            return  # nothing will train it; trained-steps has the end of training, for the agents
        else:
            self._queues[number].waiting.append(request)
        self._requested_ids.add(request.group_id)

    def _on_opened(self, opened: OpenedEpisode) -> None:
        """Let the group's time to play begin, if this is its first claim."""
        group = self._open.get(opened.group_id)
        if group is not None and group.phase == "unclaimed":
            deadline_ms = self._queues[group.queue].deadline_ms("playing", now_ms=self._now_ms)
            self._keep(group, phase="playing", deadline_ms=deadline_ms)

    def _on_merged(self, merged: MergedGroup) -> None:
        group = self._open.get(merged.group_id)
        if group is None:
            return
        if not merged.not_trainable and merged.tree_sha256 is None:
            raise InvalidRecordError(f"group {merged.group_id} can train but has no tree")
        if group.queue_index is None:
            self._retire(group, merged.not_trainable or "evaluated", detail=merged.detail)
            return
        index, fifo = group.queue_index, self._queues[group.queue].fifo
        if fifo.is_finished(index) or not fifo.is_untaken(index):
            return  # the record is delivered a second time
        if group.choice is not None:
            group = self._keep(group, choice=scored_choice(group.choice, merged))
        if merged.not_trainable == "failed" and group.phase == "closed":
            self._remove(group, "expired", detail=f"past its deadline; {merged.detail}")
        elif merged.not_trainable:
            self._remove(group, merged.not_trainable, detail=merged.detail)
        else:
            fifo.finish(index, merged)

    def _on_trained(self, trained: TrainedStep) -> None:
        taken = self._steps.finish(trained)
        if taken is None:
            return
        self._slots.hold(taken, checkpoint_step=trained.checkpoint_step)
        failed = set(trained.failed_group_ids)
        for group_id in taken.group_ids:
            group = self._open[group_id]
            if group_id in failed:
                detail = group.failure or "the trainer could not load the tree"
                self._retire(group, "failed", detail=detail)
            else:
                self._retire(group, "trained", step=trained.step)
        if self._steps.has_ended:
            self._end()

    def _on_dead_letter(self, letter: DeadLetter) -> None:
        """Fail the group that a bad record belongs to.

        If a step has already taken it, only note the reason: the trainer reports how it ended.
        """
        group = self._open.get(letter.group)
        if group is None:
            self._withdraw(letter)
        elif self._queues[group.queue].is_taken(group):
            self._keep(group, failure=failure(letter))
        else:
            self._remove(group, "failed", detail=failure(letter))

    def _withdraw(self, letter: DeadLetter) -> None:
        """Retire a group that was never admitted: the agent that asked for it waits for an end."""
        request = withdraw(self._waiting(), group_id=letter.group)
        is_request = letter.topic == topics.REQUESTED_GROUPS.name and bool(letter.group)
        if letter.group in self._retired or (request is None and not is_request):
            return
        self._requested_ids.discard(letter.group)
        self._retired.add(letter.group)
        queue = self._queues[letter.partition if request is None else self._numbers[request.domain]]
        record = never_admitted(letter, request=request, domain=queue.settings.domain)
        partition = group_partition(letter.group, partitions=self._partitions)
        self._write(topics.RETIRED_GROUPS, partition=partition, record=record)

    def _end(self) -> None:
        for queue in self._queues:
            self._requested_ids.difference_update(request.group_id for request in queue.waiting)
            queue.waiting.clear()
            for group in list(queue.groups.values()):
                self._remove(group, "cancelled", detail="the last step is trained")

    def _advance(self) -> None:
        version = self._lanes.version()
        if version is not None:
            self._slots.forget_served(version)
        self._form_steps()
        self._admit_evaluations()
        for number in range(len(self._queues)):
            self._admit(number)

    def _form_steps(self) -> None:
        while (step := self._steps.forming()) is not None:
            for queue in self._queues:
                self._take(queue, step=step)
            if not all(queue.is_full(step) for queue in self._queues):
                return
            self._schedule(step)

    def _take(self, queue: DomainQueue, *, step: int) -> None:
        version = self._lanes.version()
        if version is None or step - version > queue.staleness_limit:
            # Even a group that is sampled from the weights that serve would be too stale for this
            # step. Taking would only retire groups, so wait until newer weights serve.
            return
        while not queue.is_full(step):
            takeable = queue.fifo.next_takeable()
            if takeable is None:
                return
            index, merged = takeable
            if step - merged.version_min > queue.staleness_limit:
                self._remove(
                    queue.groups[index],
                    "stale",
                    detail=f"version {merged.version_min} is too old for step {step}: "
                    f"at most {queue.staleness_limit} steps",
                )
            else:
                queue.take(index, merged, step=step)

    def _schedule(self, step: int) -> None:
        groups = tuple(group for queue in self._queues for group in queue.forming)
        self._steps.schedule(
            TakenStep(
                step=step,
                group_ids=tuple(group.group_id for group in groups),
                slots=tuple(len(queue.forming) for queue in self._queues),
            )
        )
        for queue in self._queues:
            queue.forming.clear()
        is_last = step + 1 == self._steps.count
        record = scheduled_step(step, groups=groups, mixture=self._mixture, is_last=is_last)
        self._write(topics.SCHEDULED_STEPS, partition=0, record=record)

    def _admit_evaluations(self) -> None:
        weights = self._lanes.at_admission()
        if weights is None or not self._lanes.is_any_live:
            return
        if self._steps.has_ended and weights[1] < self._steps.count:
            # Evaluations asked for at the end measure the final weights.
            return
        for request in self._evaluations.waiting:
            number = self._numbers[request.domain]
            deadline_ms = self._queues[number].deadline_ms("unclaimed", now_ms=self._now_ms)
            group = self._evaluations.open(request, queue=number, deadline_ms=deadline_ms)
            self._open_group(request, group, weights=weights)
        self._evaluations.waiting.clear()

    def _admit(self, number: int) -> None:
        queue = self._queues[number]
        weights = self._lanes.at_admission()
        if not queue.waiting or weights is None or not self._lanes.is_any_live:
            return
        held = self._slots.held(number, version=weights[1])
        slots_free = queue.slots_free(held=held, version=weights[1], step=self._steps.scheduled)
        while queue.waiting and slots_free > 0:
            request = queue.waiting.popleft()
            deadline_ms = queue.deadline_ms("unclaimed", now_ms=self._now_ms)
            group = queue.admit(request, deadline_ms=deadline_ms, version=weights[1])
            self._open_group(request, group, weights=weights)
            slots_free -= 1

    def _waiting(self) -> Iterator[MutableSequence[RequestedGroup]]:
        yield self._evaluations.waiting
        yield from (queue.waiting for queue in self._queues)

    def _keep(self, group: OpenGroup, **changes: object) -> OpenGroup:
        """Replace what is known of an open group; returns it."""
        changed = msgspec.structs.replace(group, **changes)
        self._open[group.group_id] = changed
        if group.queue_index is None:
            self._evaluations.keep(changed)
        else:
            self._queues[group.queue].groups[group.queue_index] = changed
        return changed

    def _open_group(self, request: RequestedGroup, group: OpenGroup, *, weights: WeightsId) -> None:
        self._requested_ids.remove(request.group_id)
        self._open[group.group_id] = group
        record = admitted_group(request, group=group, weights=weights)
        self._write(topics.ADMITTED_GROUPS, partition=group.queue, record=record)

    def _remove(self, group: OpenGroup, reason: RetireReason, *, detail: str) -> None:
        """Retire a group; if it is in the window, it leaves it."""
        queue = self._queues[group.queue]
        if group.queue_index is not None and not queue.is_taken(group):
            queue.fifo.remove(group.queue_index)
        self._retire(group, reason, detail=detail)

    def _retire(
        self, group: OpenGroup, reason: RetireReason, *, step: int | None = None, detail: str = ""
    ) -> None:
        del self._open[group.group_id]
        if group.queue_index is None:
            self._evaluations.close(group.group_id)
        self._retired.add(group.group_id)
        record = self._queues[group.queue].close(group, reason=reason, step=step, detail=detail)
        partition = group_partition(group.group_id, partitions=self._partitions)
        self._write(topics.RETIRED_GROUPS, partition=partition, record=record)

    def _write(self, topic: topics.Topic, *, partition: int, record: msgspec.Struct) -> None:
        self._outputs.append(Output(topic=topic.name, partition=partition, record=record))

    def _check(self) -> None:
        """Assert the invariants; simulations call this after every event."""
        self._steps._check()
        in_training = self._steps.in_training()
        taken_ids = {group_id for taken in in_training for group_id in taken.group_ids}
        assert taken_ids <= self._open.keys(), "a scheduled group must be open"
        assert not self._requested_ids & self._open.keys(), "admitted groups do not wait"
        assert not any(group_id in self._retired for group_id in self._open), "retired and open"
        opened = sum(len(queue.groups) for queue in self._queues) + len(self._evaluations.groups())
        assert len(self._open) == opened, "every open group is in one queue or an evaluation"
        for queue in self._queues:
            queue._check(taken_ids)
            assert not self._steps.has_ended or not queue.groups, "open train groups after the end"
