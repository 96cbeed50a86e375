"""Which fields of a configuration may change at a resume; each other one has its reason."""

import itertools
from collections.abc import Iterator
from fnmatch import fnmatchcase

import msgspec
import pytest

from forgemq_contracts.distillation import Distillation
from forgemq_contracts.live_key import LiveKey
from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.run_changes import MAY_CHANGE, REASONS, changes, check_changes
from forgemq_contracts.speculation import Speculation
from forgemq_contracts.supervised import Supervised

WAS = RunConfiguration(
    run="r",
    seed=0,
    model=Model(path="m"),
    queues=tuple(
        Queue(domain=name, task_source="", agent="", supervised=Supervised(fraction=0.25))
        for name in ("one", "two")
    ),
    trainer=Trainer(steps=4),
    speculation=Speculation(head="h"),
    distillation=Distillation(url="http://t"),
)


def replaced(part: str, **fields: object) -> RunConfiguration:
    inner = msgspec.structs.replace(getattr(WAS, part), **fields)
    return msgspec.structs.replace(WAS, **{part: inner})


def leaves(struct: msgspec.Struct, path: str = "") -> Iterator[str]:
    for name in struct.__struct_fields__:
        value, inner = getattr(struct, name), f"{path}{name}"
        if isinstance(value, msgspec.Struct):
            yield from leaves(value, f"{inner}.")
        elif name == "queues":
            yield from leaves(value[0], f"{inner}.one.")
        else:
            yield inner


@pytest.mark.parametrize("name", list(leaves(WAS)))
def test_every_field_may_change_or_has_a_reason_why_not(name):
    may = any(fnmatchcase(name, pattern) for pattern in MAY_CHANGE)
    assert may or any(fnmatchcase(name, pattern) for pattern, _ in REASONS)


@pytest.mark.parametrize("pattern", [*MAY_CHANGE, *(pattern for pattern, _ in REASONS)])
def test_every_line_of_the_table_is_about_a_field(pattern):
    assert any(fnmatchcase(name, pattern) for name in leaves(WAS))


def test_a_change_is_named_by_its_dotted_path_and_its_domain():
    queues = (WAS.queues[0], msgspec.structs.replace(WAS.queues[1], agent="m:play"))
    now = msgspec.structs.replace(replaced("optimizer", lr=0.5), queues=queues)
    assert [str(change) for change in changes(WAS, now)] == [
        "queues.two.agent: '' -> 'm:play'",
        "optimizer.lr: 1e-06 -> 0.5",
    ]
    check_changes(WAS, now)


def test_other_queues_are_refused_by_their_domains():
    with pytest.raises(
        ValueError, match=r"^queues was \('one', 'two'\) when .* is \('two',\) now:"
    ):
        check_changes(WAS, msgspec.structs.replace(WAS, queues=WAS.queues[1:]))


@pytest.mark.parametrize(
    ("before", "after"), [("verifiers:one", "verifiers:two"), ("m:play", "verifiers:two")]
)
def test_an_agent_that_brings_its_own_tasks_must_stay(before, after):
    was, now = (
        msgspec.structs.replace(
            WAS, queues=(msgspec.structs.replace(WAS.queues[0], agent=agent), WAS.queues[1])
        )
        for agent in (before, after)
    )
    for one, other in ((was, now), (now, was)):
        with pytest.raises(
            ValueError, match=r"queues\.one\.agent was .*an environment has the tasks"
        ):
            check_changes(one, other)


def test_live_keys_may_come_change_and_go():
    live = LiveKey(name="desk", domain="one", key_sha256="0" * 64)
    other = msgspec.structs.replace(live, key_sha256="1" * 64)
    was, now = (msgspec.structs.replace(WAS, live=(each,)) for each in (live, other))
    for before, after in ((WAS, was), (was, now), (now, WAS)):
        check_changes(before, after)
    assert [change.name for change in changes(was, now)] == ["live.one.key_sha256"]
    assert changes(WAS, WAS) == ()


def test_the_room_for_lanes_may_grow_and_not_shrink():
    rooms = [replaced("log", lanes_max=lanes) for lanes in (None, 1, 3, 4)]
    for before, after in itertools.combinations(rooms, 2):
        check_changes(before, after)
    check_changes(rooms[1], rooms[0])
    for less in rooms[:3]:
        with pytest.raises(ValueError, match=r"log\.lanes_max was 4 .* cannot become fewer"):
            check_changes(rooms[3], less)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (replaced("rewards", beta=2.0), "rewards.beta was 0.1 .* and is 2.0 now: the journal of"),
        (
            replaced("log", lanes=2),
            "log.lanes was 1 .* for more let log.lanes_max grow and use `forgemq add-lane`",
        ),
        (
            replaced("log", group_partitions=32),
            "log.group_partitions was 16 .* and is 32 now: the records and journals of each group",
        ),
        (replaced("trainer", steps_ahead_max=2), "trainer.steps_ahead_max .*scheduler's journal"),
        (replaced("model", dtype="float32"), "model.dtype was 'bfloat16'"),
        (msgspec.structs.replace(WAS, queues=WAS.queues[:1]), "queues was .*scheduler's journal"),
        (msgspec.structs.replace(WAS, seed=1), "seed was 0 .*: the tasks that were asked for"),
    ],
)
def test_a_field_that_must_stay_is_refused_with_its_values_and_the_reason(now, expected):
    with pytest.raises(ValueError, match=expected):
        check_changes(WAS, now)
