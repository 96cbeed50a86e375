"""One task domain: requests that wait, open groups, and the groups taken for the next step."""

from collections import deque
from collections.abc import Iterable, MutableSequence

from forgemq_contracts.groups import MergedGroup, RequestedGroup, RetiredGroup, RetireReason
from forgemq_contracts.mixture import Mixture, mixture_of, staleness_limits
from forgemq_contracts.queues import window_of
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_contracts.steps import ScheduledGroup
from forgemq_scheduler.core.choices import choice_of, result_of
from forgemq_scheduler.core.snapshot import GroupPhase, OpenGroup, QueueSnapshot
from forgemq_scheduler.core.window import WindowedFifo


class DomainQueue:
    """State of one queue; the scheduler decides when each change happens."""

    def __init__(
        self, settings: Queue, *, staleness_limit: int, mixture: Mixture, number: int
    ) -> None:
        """An empty queue, number `number` of the run."""
        self.settings = settings
        self.staleness_limit = staleness_limit
        self._mixture, self._number = mixture, number
        self.waiting: deque[RequestedGroup] = deque()
        self.groups: dict[int, OpenGroup] = {}  # by queue index, ascending
        self.fifo = WindowedFifo(window=window_of(settings))
        self.forming: list[ScheduledGroup] = []
        self._results = 0

    def is_full(self, step: int) -> bool:
        """Whether the step that forms has its groups from this queue."""
        return len(self.forming) == self._mixture.groups(step)[self._number]

    def slots_free(self, *, held: int, version: int, step: int) -> int:
        """Groups that may be admitted now.

        If a stage to come leaves the domain out, no more than the steps before it still take: what
        is left then would grow stale until the domain comes back. While one leaves it out, none.

        Args:
            held: Slots that trained steps still hold.
            version: Weights that serve.
            step: The step that forms.
        """
        free = self.settings.slots - len(self.groups) - held
        end = self._mixture.presence_end(self._number, version)
        if end is None:
            return free
        taken = self._mixture.taken(self._number, step) + len(self.forming)
        left = self._mixture.taken(self._number, end) - taken - self.fifo.untaken_count
        return min(free, left)

    def admit(self, request: RequestedGroup, *, deadline_ms: int, version: int) -> OpenGroup:
        """Append a group to the generation queue; its slot is taken from here on."""
        index = self.fifo.append()
        group = OpenGroup(
            group_id=request.group_id,
            queue=self._number,
            queue_index=index,
            deadline_ms=deadline_ms,
            phase="unclaimed",
            choice=choice_of(request, version=version),
        )
        self.groups[index] = group
        return group

    def take(self, index: int, merged: MergedGroup, *, step: int) -> None:
        """Move a finished group from the window into the step that forms."""
        assert merged.tree_sha256 is not None, "a group without a tree never finishes"
        self.fifo.take(index)
        self.forming.append(
            ScheduledGroup(
                group_id=merged.group_id,
                domain=merged.domain,
                queue_index=index,
                partition=merged.partition,
                tree_sha256=merged.tree_sha256,
                tree_tokens=merged.tree_tokens,
                loss_tokens=merged.loss_tokens,
                attention_pairs=merged.attention_pairs,
                version_min=merged.version_min,
                # A lane may load the weights of a step before the step that follows is formed, so
                # the version can be ahead of the step: such a group is not stale at all.
                staleness=max(0, step - merged.version_min),
                request_tokens=merged.request_tokens,
                append_tokens=merged.append_tokens,
            )
        )

    def close(
        self, group: OpenGroup, *, reason: RetireReason, step: int | None, detail: str
    ) -> RetiredGroup:
        """Drop a group that retires; returns the record that ends it.

        An evaluation group, which is in no queue, has only its domain from here.
        """
        result = None
        if group.queue_index is not None:
            del self.groups[group.queue_index]
        if group.choice is not None:
            result = result_of(group.choice, index=self._results)
            self._results += 1
        return RetiredGroup(
            group_id=group.group_id,
            domain=self.settings.domain,
            purpose="eval" if group.queue_index is None else "train",
            reason=reason,
            queue_index=group.queue_index,
            step=step,
            detail=detail,
            result=result,
        )

    def is_taken(self, group: OpenGroup) -> bool:
        """Whether a step has taken this group; always False for an evaluation group."""
        return group.queue_index is not None and not self.fifo.is_untaken(group.queue_index)

    def deadline_ms(self, phase: GroupPhase, *, now_ms: int) -> int:
        """Until when a group may be in a phase that begins now."""
        settings = self.settings
        within_s = settings.claim_deadline_s if phase == "unclaimed" else settings.group_deadline_s
        return now_ms + round(1000 * within_s)

    def lapsed(self, *, now_ms: int) -> list[OpenGroup]:
        """Groups past their deadline that have not finished, oldest first.

        A finished group never lapses: it waits for its step, and retiring it would lose its work.
        """
        return [
            group
            for index, group in self.groups.items()
            if group.deadline_ms <= now_ms
            and not self.fifo.is_finished(index)
            and self.fifo.is_untaken(index)
        ]

    def snapshot(self) -> QueueSnapshot:
        """All state of the queue, to be given to `restore`."""
        next_index, order, taken, finished = self.fifo.snapshot()
        return QueueSnapshot(
            waiting=tuple(self.waiting),
            groups=tuple(self.groups[index] for index in sorted(self.groups)),
            next_index=next_index,
            order=order,
            taken=taken,
            finished=finished,
            forming=tuple(self.forming),
            results=self._results,
        )

    def restore(self, state: QueueSnapshot) -> None:
        """Replace all state with that of `snapshot`."""
        self.waiting = deque(state.waiting)
        self.groups = {
            group.queue_index: group for group in state.groups if group.queue_index is not None
        }
        self.fifo.restore(
            next_index=state.next_index,
            order=state.order,
            taken=state.taken,
            finished=state.finished,
        )
        self.forming = list(state.forming)
        self._results = state.results

    def _check(self, scheduled_ids: set[str]) -> None:
        """Assert the invariants.

        Args:
            scheduled_ids: Groups of the steps that are scheduled and not trained.
        """
        self.fifo._check()
        assert len(self.groups) <= self.settings.slots, "more open groups than slots"
        assert len(self.forming) <= self._mixture.groups_max(self._number)
        taken = scheduled_ids | {group.group_id for group in self.forming}
        for index, group in self.groups.items():
            is_taken = group.group_id in taken
            assert is_taken != self.fifo.is_untaken(index), "taken or in the window's queue"


def queues_of(configuration: RunConfiguration) -> list[DomainQueue]:
    """The queues of a run, empty, in the order of its configuration."""
    mixture, limits = mixture_of(configuration), staleness_limits(configuration)
    return [
        DomainQueue(queue, staleness_limit=limits[queue.domain], mixture=mixture, number=number)
        for number, queue in enumerate(configuration.queues)
    ]


def withdraw(
    waiting: Iterable[MutableSequence[RequestedGroup]], *, group_id: str
) -> RequestedGroup | None:
    """Remove the waiting request of this group and return it; None if there is none."""
    for requests in waiting:
        for request in requests:
            if request.group_id == group_id:
                requests.remove(request)
                return request
    return None
