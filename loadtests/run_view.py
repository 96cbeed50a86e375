"""What does the state of a run cost, when its steps have ten times as many groups?

A page asks for it once a second. Some steps are scheduled and trained, and the clock runs over
`RunView.state`: CPU time of this one thread. `cost_10n_over_n` is that of steps of 10 N groups over
that of N. `over_plain` compares with the plain way in the same run: a look at every group of every
step.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from measurement import Measurement, arguments

from forgemq_contracts.messages import Message
from forgemq_contracts.run import Model, Queue, RunConfiguration, StartedRun, Trainer
from forgemq_contracts.steps import ScheduledGroup, ScheduledStep, TrainedStep, TrainingMetrics
from forgemq_contracts.topics import SCHEDULED_STEPS, TRAINED_STEPS
from forgemq_run_view.view import RunView

STEPS = 1_000
GROUPS = 16
"""N: of a step."""
REPEATS = 5
_METRICS = TrainingMetrics(
    loss=1.0,
    grad_norm=1.0,
    lr=1e-3,
    loss_tokens=1,
    tree_tokens=1,
    request_tokens=1,
    append_tokens=1,
    attention_pairs=1,
    ratio_mean=1.0,
    ratio_p99=1.0,
    capped_share=0.0,
    logprob_gap_mean=0.0,
    logprob_gap_max=0.0,
    kl_k3=0.0,
    entropy=1.0,
    staleness_max=0,
    forward_backward_s=1.0,
)


def started() -> StartedRun:
    """A run of one queue."""
    queue = Queue(domain="d", task_source="", agent="", slots=8, groups_per_step=1)
    configuration = RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m"),
        queues=(queue,),
        trainer=Trainer(steps=STEPS),
    )
    return StartedRun(run="r", configuration=configuration, blobs="", started_ms=0)


def scheduled(step: int, groups: int) -> ScheduledStep:
    """A step of so many groups."""
    return ScheduledStep(
        step=step,
        groups=tuple(
            ScheduledGroup(
                group_id=f"g-{step * groups + index:x}",
                domain="d",
                queue_index=step * groups + index,
                partition=0,
                tree_sha256="0" * 64,
                tree_tokens=1,
                loss_tokens=1,
                attention_pairs=1,
                version_min=step,
                staleness=0,
            )
            for index in range(groups)
        ),
        staleness_bound=2,
    )


def trained(of: ScheduledStep) -> TrainedStep:
    """The same step, trained."""
    return TrainedStep(
        step=of.step,
        lineage=1,
        group_ids=tuple(group.group_id for group in of.groups),
        failed_group_ids=(),
        metrics=_METRICS,
        checkpoint_step=of.step,
        duration_s=1.0,
        is_last=False,
    )


def records(steps: Sequence[ScheduledStep]) -> Iterator[Message]:
    """Both records of each step."""
    for step in steps:
        for topic, record in ((SCHEDULED_STEPS, step), (TRAINED_STEPS, trained(step))):
            yield Message(
                topic=topic.name, partition=0, offset=step.step, timestamp_ms=0, record=record
            )


def cpu_ms(look: Callable[[], object]) -> float:
    """The least of some repeats, as others use the machine."""
    times = []
    for _ in range(REPEATS):
        begun_s = time.process_time()
        look()
        times.append((time.process_time() - begun_s) * 1e3)
    return min(times)


def state_ms(steps: Sequence[ScheduledStep]) -> float:
    """The state of a run of these steps."""
    view = RunView(started())
    for message in records(steps):
        view.apply(message)
    return cpu_ms(lambda: view.state(now_ms=0))


def plain_ms(steps: Sequence[ScheduledStep]) -> float:
    """A count of their groups by domain and staleness, and a number for each group's id."""
    samples = {group.group_id: 1 for step in steps for group in step.groups}

    def look() -> None:
        Counter((group.domain, group.staleness) for step in steps for group in step.groups)
        sum(samples[group.group_id] for step in steps for group in step.groups)

    return cpu_ms(look)


def main() -> int:
    """Measure with N and 10 N groups a step."""
    chosen = arguments(__doc__ or "")
    measurement = Measurement(
        name="run_view",
        question="What does the state of a run cost, when its steps have ten times as many groups?",
        conditions={"steps": str(STEPS), "groups of a step": f"{GROUPS} and {10 * GROUPS}"},
    )
    if not chosen.case or "state" in chosen.case:
        few, many = (
            [scheduled(n, groups) for n in range(STEPS)] for groups in (GROUPS, 10 * GROUPS)
        )
        many_ms = state_ms(many)
        measurement.row("state", "cost_ms", many_ms, "ms")
        measurement.row("state", "cost_10n_over_n", many_ms / state_ms(few), "x")
        measurement.row("state", "over_plain", plain_ms(many) / many_ms, "x")
    return measurement.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
