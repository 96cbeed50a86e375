"""Which fields of a run's configuration may change at a resume, and why the others may not.

A field may change if nothing on the log was decided by it in a way that a replay must find again:
the trainer, the agents, the gateway and the grading loop read it when they need it. The cores of
scheduler and reward are replayed from their journals with the newest configuration, so what they
read stays. `trainer.steps` is read by the scheduler for one thing, which step is the last: it may
change until that step is scheduled. `log.lanes_max` may grow: partition n of a lane topic is for
lane n, so new ones behind the last change the place of no record.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from msgspec import Struct

from forgemq_contracts.environments import environment_of
from forgemq_contracts.lane_plan import lanes_limit
from forgemq_contracts.run import RunConfiguration

MAY_CHANGE = (
    "audit.*",
    "code_paths",
    "distillation.*",
    "episodes.attempts_max",
    "episodes.concurrent_max",
    "episodes.lease_s",
    "episodes.request_deadline_s",
    "evaluation.every_steps",
    "lanes*",
    "live*",
    "log.keep_for_replay",
    "loss.*",
    "optimizer.*",
    "pool*",
    "queues.*.agent",
    "queues.*.groups_requested_max",
    "queues.*.stream",
    "queues.*.supervised.fraction",
    "rewards.grader_timeout_s",
    "speculation.learning_rate",
    "speculation.loss_weight",
    "speculation.push_every_steps",
    "speculation.steps",
    "speculation.top_k",
    "trainer.checkpoint_every_steps",
    "trainer.checkpoint_share_max",
    "trainer.checkpoints_kept",
    "trainer.expert_ranks",
    "trainer.head_chunk_tokens",
    "trainer.memory_budget_bytes",
    "trainer.shard_ranks",
    "trainer.steps",
    "trainer.threads",
    "trainer.world_size",
    "updates.*",
)
"""Dotted names; `*` is any domain, or any field of the table.

Another budget, chunk or number of ranks adds numbers up in another order: results are then equal
within rounding, not to the byte. Another loss, learning rate or
number of updates holds from the newest checkpoint on.
"""

MAY_GROW = "log.lanes_max"

REASONS = (
    ("run", "it begins the names of the run's topics and blobs"),
    ("seed", "the tasks that were asked for were made with it"),
    ("model.*", "weights, tokens and checkpoints are those of this model"),
    (
        "queues.*.agent",
        "an environment has the tasks, and a task that is asked for again must be the same",
    ),
    ("queues.*.task_source", "a task that is asked for again must be the same task"),
    ("queues.*.task_file", "a task that is asked for again must be the same task"),
    ("queues.*.held_out_file", "the rounds of a run are compared, so all play the same tasks"),
    ("queues.*.task_split", "a task that is asked for again must be the same task"),
    ("queues.*.held_out_split", "the rounds of a run are compared, so all play the same tasks"),
    ("queues.*.curriculum*", "the tasks that were asked for were chosen with it"),
    ("queues.*.outcome", "the episodes of a group are graded by one function"),
    ("queues.*.process", "the episodes of a group are graded by one function"),
    ("queues.*.speed", "the episodes of a group are graded by one function"),
    ("queues.*.history", "the episodes that are open were promised it"),
    ("queues.*.context_tokens_max", "the episodes that are open were promised it"),
    ("queues.*.sampling*", "the episodes that are open were promised it"),
    ("queues.*.supervised*", "the groups of the domain were asked for with it or without"),
    ("queues.*.rewards*", "the journal of reward was written with it, and is replayed with it"),
    ("queues*", "the scheduler's journal was written with it, and is replayed with it"),
    ("stages*", "the scheduler's journal was written with it, and is replayed with it"),
    ("trainer.steps_ahead_max", "the scheduler's journal was written and is replayed with it"),
    ("trainer.tree_tokens_max", "the merger's journal was written and is replayed with it"),
    ("speculation*", "checkpoints hold the head that the run began with, or none"),
    ("lora*", "checkpoints hold the adapter that the run began with, or none"),
    ("distillation*", "the journal of reward was written with it or without, and is replayed so"),
    ("rewards.*", "the journal of reward was written with it, and is replayed with it"),
    ("episodes.*", "the episodes that are open were promised it"),
    ("evaluation.*", "the rounds of a run are compared, so all of them play the same tasks"),
    (
        "log.group_partitions",
        "the records and journals of each group are in the partition that its id and this number "
        "give",
    ),
    ("log.lanes_max", "it is the number of partitions of topics, which cannot become fewer"),
    (
        "log.lanes",
        "it is how many lanes the run began with; for more let log.lanes_max grow and use `forgemq "
        "add-lane`, for fewer `forgemq remove-lane`",
    ),
    ("log.*", "the topics and their records were made with it"),
    ("logic_version", "the journals say which logic wrote them"),
)
"""Why a field stays, by the first pattern that its name matches."""


class FieldChange(NamedTuple):
    """One field that differs between two configurations of a run."""

    name: str
    before: object
    after: object

    def __str__(self) -> str:
        """As on the log and on the screen."""
        return f"{self.name}: {self.before!r} -> {self.after!r}"


def changes(was: RunConfiguration, now: RunConfiguration) -> tuple[FieldChange, ...]:
    """Every field that differs, in order of declaration."""
    return tuple(_differences(was, now, path=""))


def check_changes(was: RunConfiguration, now: RunConfiguration) -> None:
    """Refuse to continue a run with a change that cannot hold.

    Raises:
        ValueError: names the first such field, both values and the reason.
    """
    for change in changes(was, now):
        may_change = any(fnmatchcase(change.name, pattern) for pattern in MAY_CHANGE)
        if change.name == MAY_GROW:
            may_change = lanes_limit(now.log) >= lanes_limit(was.log)
        if not may_change or _changes_environment(change):
            raise ValueError(
                f"{change.name} was {change.before!r} when this run was trained, and is "
                f"{change.after!r} now: {_reason(change.name)}; set it back, or start a new run"
            )


def _changes_environment(change: FieldChange) -> bool:
    """Whether it is an agent that is or was an environment, which brings its own tasks."""
    agents = (change.before, change.after) if fnmatchcase(change.name, "queues.*.agent") else ()
    return any(environment_of(str(agent)) is not None for agent in agents)


def _reason(name: str) -> str:
    return next(reason for pattern, reason in REASONS if fnmatchcase(name, pattern))


def _differences(was: object, now: object, *, path: str) -> Iterator[FieldChange]:
    if isinstance(was, Struct) and type(was) is type(now):
        for name in was.__struct_fields__:
            inner = f"{path}.{name}" if path else name
            yield from _differences(getattr(was, name), getattr(now, name), path=inner)
    elif isinstance(was, tuple) and isinstance(now, tuple) and _domains(was) == _domains(now) != ():
        for domain, before, after in zip(_domains(was), was, now, strict=True):
            yield from _differences(before, after, path=f"{path}.{domain}")
    elif path == "queues" and isinstance(was, tuple) and isinstance(now, tuple):
        yield FieldChange(path, _domains(was), _domains(now))  # Whole queues are a page of text.
    elif was != now:
        yield FieldChange(path, was, now)


def _domains(queues: tuple[object, ...]) -> tuple[str, ...]:
    """Names of the queues, or numbers of other structs; () if this is another tuple."""
    return tuple(
        str(getattr(queue, "domain", number))
        for number, queue in enumerate(queues)
        if isinstance(queue, Struct)
    )
