"""How many groups of each domain every step trains, and how stale that lets a token get.

A run without stages trains P groups of each queue in every step. With stages, the groups of a step
are the sum of all P, and a stage says how they are divided.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from math import ceil
from typing import NamedTuple

from forgemq_contracts.even_rows import even_rows
from forgemq_contracts.queues import window_of
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_contracts.stages import SHARE_PARTS, Stage, of_domain, parts_of, stage_at

Row = tuple[int, ...]
"""A number for each queue, in the order of the run's queues."""


class _Span(NamedTuple):
    """The steps of one stage: what they train repeats.

    Attributes:
        start: Its first step.
        before: Groups of each queue in all steps before it.
        sums: Groups of each queue in its first n steps, for n from 0 to the period.
    """

    start: int
    before: Row
    sums: tuple[Row, ...]

    def taken(self, queue: int, step: int) -> int:
        """Groups of the queue in all steps before this one, which is in the stage or its end."""
        rounds, rest = divmod(step - self.start, len(self.sums) - 1)
        of_period = rounds * self.sums[-1][queue]
        return self.before[queue] + of_period + self.sums[rest][queue]

    def has(self, queue: int) -> bool:
        """Whether the stage trains the queue."""
        return self.sums[-1][queue] > 0


class Mixture:
    """What each step of a run trains, from its queues and stages alone.

    Example: two queues with P of 4 and 2, shares 0.75 and 0.25 from step 0 on. Of the 6 groups of
    a step these are 4.5 and 1.5: steps train (5, 1), (4, 2), (5, 1), ...
    """

    def __init__(self, queues: Sequence[Queue], stages: tuple[Stage, ...]) -> None:
        self._queues = tuple(queues)
        self._stages = stages
        self._spans = tuple(_spans(self._queues, stages))
        # Kept, since the same step is asked for with every record that may fill it.
        self._bounds: dict[int, int] = {}
        self._newest: tuple[int, Row] = (-1, ())

    def groups(self, step: int) -> Row:
        """Groups of each queue in this step."""
        if self._newest[0] != step:
            numbers = range(len(self._queues))
            row = tuple(self.taken(n, step + 1) - self.taken(n, step) for n in numbers)
            self._newest = (step, row)
        return self._newest[1]

    def groups_max(self, queue: int) -> int:
        """The most groups of the queue that any step has."""
        return max(
            after[queue] - before[queue]
            for span in self._spans
            for before, after in pairwise(span.sums)
        )

    def taken(self, queue: int, step: int) -> int:
        """Groups of the queue in all steps before this one."""
        return self._span(max(0, step - 1)).taken(queue, step)

    def stage(self, step: int) -> int | None:
        """Index of the stage that the step belongs to; None without stages."""
        return stage_at(self._stages, step)

    def stage_of_group(self, queue: int, number: int) -> int | None:
        """The stage that trains group `number` of a queue, counted as steps take them, from 0.

        The newest one if no stage ever takes so many; None without stages.
        """
        for index, (span, end) in enumerate(zip(self._spans, self._ends(), strict=True)):
            is_taken = end is None or number < span.taken(queue, end)
            if span.has(queue) and is_taken:
                return index if self._stages else None
        return len(self._stages) - 1 if self._stages else None

    def presence_end(self, queue: int, step: int) -> int | None:
        """The first step after this one whose stage does not train the queue; None: there is none.

        The step itself if its own stage does not.
        """
        for span, end in zip(self._spans, self._ends(), strict=True):
            if (end is None or end > step) and not span.has(queue):
                return max(span.start, step)
        return None

    def staleness_bound(self, queue: int) -> int:
        """G3: no trained token of the queue is staler than this, in steps (docs/staleness.md).

        The largest k - v such that step k trains the queue, the steps v to k - 1 took at most
        N + W - 2 groups of it, and no stage from v to k leaves it out.
        """
        if queue not in self._bounds:
            reach = self._queues[queue].slots + window_of(self._queues[queue]) - 2
            lags = (self._lag(queue, version, reach) for version in self._versions(queue, reach))
            self._bounds[queue] = max(lags)
        return self._bounds[queue]

    @property
    def staleness_bound_max(self) -> int:
        """The largest of the queues' bounds."""
        return max(self.staleness_bound(queue) for queue in range(len(self._queues)))

    def _lag(self, queue: int, version: int, reach: int) -> int:
        """The largest lag of a group that is admitted at this version."""
        step, lag = version, 0
        end = self.presence_end(queue, version)
        before = self.taken(queue, version)
        while step != end and (taken := self.taken(queue, step) - before) <= reach:
            if self.taken(queue, step + 1) - before > taken:
                lag = step - version
            step += 1
        return lag

    def _versions(self, queue: int, reach: int) -> Iterator[int]:
        """Versions that together show every lag: of each stage one period, and its last steps."""
        for span, end in zip(self._spans, self._ends(), strict=True):
            if not span.has(queue):
                continue
            period = len(span.sums) - 1
            stop = span.start + period if end is None else min(end, span.start + period)
            yield from range(span.start, stop)
            if end is not None:
                # In these many steps the queue has more than `reach` groups, so that a group of an
                # earlier version is trained in this stage, and a version a period before it showed
                # the same lag.
                steps = ceil((reach + 2) * period / span.sums[-1][queue])
                yield from range(max(stop, end - steps), end)

    def _ends(self) -> tuple[int | None, ...]:
        """The step after each stage; None: it lasts to the end of the run."""
        return (*(span.start for span in self._spans[1:]), None)

    def _span(self, step: int) -> _Span:
        return next(span for span in reversed(self._spans) if span.start <= step)


def mixture_of(configuration: RunConfiguration) -> Mixture:
    """The mixture of a run."""
    return _mixture(configuration.queues, configuration.stages)


def staleness_bounds(configuration: RunConfiguration) -> dict[str, int]:
    """By domain, G3's bound in steps."""
    mixture = mixture_of(configuration)
    return {
        queue.domain: mixture.staleness_bound(number)
        for number, queue in enumerate(configuration.queues)
    }


def staleness_limits(configuration: RunConfiguration) -> dict[str, int]:
    """By domain, the largest staleness that trains: `staleness_max` if it is below the bound."""
    limits = staleness_bounds(configuration)
    for queue in configuration.queues:
        if queue.staleness_max is not None:
            limits[queue.domain] = min(limits[queue.domain], queue.staleness_max)
    return limits


@lru_cache(maxsize=64)
def _mixture(queues: tuple[Queue, ...], stages: tuple[Stage, ...]) -> Mixture:
    return Mixture(queues, stages)


def quotas(queues: Sequence[Queue], stage: Stage) -> tuple[Fraction, ...]:
    """Groups of each queue in a step of this stage, as exact fractions."""
    groups = sum(queue.groups_per_step for queue in queues)
    own = (of_domain((stage,), 0, domain=queue.domain) for queue in queues)
    return tuple(
        Fraction(0 if each is None else parts_of(each.share) * groups, SHARE_PARTS) for each in own
    )


def _spans(queues: tuple[Queue, ...], stages: tuple[Stage, ...]) -> Iterator[_Span]:
    if not stages:
        once = tuple(queue.groups_per_step for queue in queues)
        nothing = (0,) * len(queues)
        yield _Span(0, nothing, (nothing, once))
        return
    span: _Span | None = None
    for stage in stages:
        before = (0,) * len(queues)
        if span is not None:
            before = tuple(span.taken(n, stage.from_step) for n in range(len(queues)))
        span = _Span(stage.from_step, before, _sums(quotas(queues, stage)))
        yield span


def _sums(rates: Sequence[Fraction]) -> tuple[Row, ...]:
    """Sums of the first n rows, for n from 0 to the period of the rates."""
    divisors = (n for n in range(1, SHARE_PARTS + 1) if SHARE_PARTS % n == 0)
    period = next(n for n in divisors if all((n * rate).denominator == 1 for rate in rates))
    rows = islice(even_rows(rates), period)
    return tuple(accumulate(rows, _added, initial=(0,) * len(rates)))


def _added(left: Row, right: Row) -> Row:
    return tuple(one + other for one, other in zip(left, right, strict=True))
