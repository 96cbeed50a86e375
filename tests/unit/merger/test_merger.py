"""The merger's core over records."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from forgemq_contracts import topics
from forgemq_contracts.accounting import RETIRED_IDS_MAX
from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.compatibility import keeps
from forgemq_contracts.completions import WeightSpan
from forgemq_contracts.groups import MergedGroup, ScoredCompletion
from forgemq_contracts.messages import Output, Tick
from forgemq_merger.core.merger import QUIET_MS_MAX, MergerCore
from tests.unit.merger.records import (
    GROUP,
    feed,
    finished,
    ints,
    message,
    name,
    only_summary,
    read_back,
    restored,
    retired,
    scored,
)


def test_a_group_becomes_one_tree_and_one_summary_with_its_digest():
    outputs = feed(
        MergerCore(4),
        finished(0, None, 0, [1, 2], [3, 4], temperature=0.5),
        finished(1, 0, 4, [5], [6]),
        finished(2, None, 0, [1, 2], [3, 9]),
        scored(0, 1, 2),
    )
    assert [(output.topic, output.partition) for output in outputs] == [
        ("merged-trees-v1", 4),
        ("merged-groups-v1", 4),
    ]
    tree, summary = outputs[0].record, outputs[1].record
    assert unpack_ids(tree.tokens) == [1, 2, 3, 4, 5, 6, 9]
    assert ints(tree.segment_length) == [3, 3, 1]
    samples = read_back(tree)
    assert samples[name(0)]["tokens"] == [1, 2, 3, 4]
    assert samples[name(0)]["positions"] == [2, 3]
    assert samples[name(0)]["temperature"] == 0.5
    assert samples[name(1)]["tokens"] == [1, 2, 3, 4, 5, 6]
    assert samples[name(1)]["positions"] == [5]
    assert samples[name(1)]["logprobs"] == [-1.5]
    assert samples[name(2)]["tokens"] == [1, 2, 3, 9]
    assert samples[name(2)]["versions"] == [2, 2]
    assert summary == MergedGroup(
        group_id=GROUP,
        domain="shop",
        purpose="train",
        partition=4,
        tree_sha256=hashlib.sha256(topics.encode(tree)).hexdigest(),
        tree_tokens=7,
        loss_tokens=5,
        attention_pairs=1 + 2 + 3 + 4 + 5 + 6 + 4,
        request_tokens=4 + 6 + 4,
        append_tokens=4 + 6 + 4,
        version_min=0,
        scored=1,
        solved=1,
    )


def test_append_tokens_count_a_continued_completion_once_per_episode():
    records = [finished(0, None, 0, [1], [2]), finished(1, 0, 2, [3], [4])]
    in_one = scored(0, 1)
    same_episode = tuple(
        ScoredCompletion(
            completion_id=each.completion_id,
            offset=each.offset,
            episode_index=0,
            sequence=each.sequence,
            return_to_go=0,
            advantage=0.5,
        )
        for each in in_one.completions
    )
    summary = feed(MergerCore(4), *records, scored(0, 1, completions=same_episode))[1].record
    assert (summary.request_tokens, summary.append_tokens, summary.tree_tokens) == (6, 4, 4)


def test_a_response_across_a_weight_update_has_a_version_per_token():
    spans = (
        WeightSpan(start=0, end=2, lineage=1, version=7),
        WeightSpan(start=2, end=3, lineage=2, version=8),
    )
    outputs = feed(MergerCore(4), finished(0, None, 0, [1], [2, 3, 4], spans=spans), scored(0))
    assert ints(outputs[0].record.entry_version) == [7, 7, 8]
    assert outputs[0].record.lineage == 2
    assert outputs[1].record.version_min == 7


def test_truncated_support_is_context_and_not_loss():
    greedy = finished(0, None, 0, [1], [2, 3], support="greedy", temperature=0.0)
    outputs = feed(MergerCore(4), greedy, finished(1, 0, 3, [4], [5]), scored(0, 1))
    tree = outputs[0].record
    assert unpack_ids(tree.tokens) == [1, 2, 3, 4, 5]
    assert tree.sample_ids == (name(1),)
    assert ints(tree.entry_token) == [4]


def test_a_group_without_any_full_support_fails():
    summary = only_summary(
        feed(MergerCore(4), finished(0, None, 0, [1], [2], support="grammar"), scored(0))
    )
    assert summary.not_trainable == "failed"
    assert summary.detail == "no completion of the group was sampled with full support"


def test_the_lowest_offset_that_is_no_error_is_the_completion():
    outputs = feed(
        MergerCore(4),
        finished(0, None, 0, [1], [], finish_reason="error", error="engine: gone"),
        finished(0, None, 0, [1], [2], attempt=1),
        finished(0, None, 0, [1], [3], attempt=2),
        scored(0, offsets={0: 1}),
    )
    assert unpack_ids(outputs[0].record.tokens) == [1, 2]


def test_a_missing_completion_fails_the_group_and_says_which():
    summary = only_summary(
        feed(MergerCore(4), finished(0, None, 0, [1], [2]), scored(0, 5, offsets={0: 0, 5: 0}))
    )
    assert summary.not_trainable == "failed"
    assert summary.detail == f"completion {name(5)} is not in the log"


def test_a_missing_parent_fails_the_group_only_where_it_is_needed():
    orphan = finished(1, 0, 3, [4], [5])
    whole = finished(2, None, 0, [1], [2])
    outputs = feed(MergerCore(4), orphan, whole, scored(2, offsets={2: 1}))
    assert outputs[1].record.not_trainable == ""
    summary = only_summary(feed(MergerCore(4), orphan, whole, scored(1, offsets={1: 0})))
    assert summary.detail == f"completion {name(0)}, parent of {name(1)}, is not in the log"


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"temperature": 0.0}, "full support at temperature 0"),
        ({"temperature": 1e-50}, "temperature 1e-50 is out of float32's range"),
        ({"temperature": 1e39}, "temperature 1e+39 is out of float32's range"),
        ({"spans": ()}, "no weight spans"),
        ({"context": b""}, "no context before the first sampled token"),
    ],
)
def test_a_record_that_cannot_be_loss_fails_its_group(changes, detail):
    broken = finished(0, None, 0, [1], [2, 3], **changes)
    summary = only_summary(feed(MergerCore(4), broken, scored(0)))
    assert summary.not_trainable == "failed"
    assert summary.detail == f"completion {name(0)}: {detail}"


@pytest.mark.parametrize("advantage", [1e39, -1e39])
def test_an_advantage_that_float32_cannot_hold_fails_its_group(advantage):
    group = scored(0)
    score = msgspec.structs.replace(group.completions[0], advantage=advantage)
    group = msgspec.structs.replace(group, completions=(score,))
    core = MergerCore(4)
    summary = only_summary(feed(core, finished(0, None, 0, [1], [2, 3]), group))
    assert summary.not_trainable == "failed"
    assert summary.detail == f"completion {name(0)}: advantage {advantage} is no finite float32"


def test_more_shared_tokens_than_the_parent_has_fail_the_group():
    summary = only_summary(
        feed(MergerCore(4), finished(0, None, 0, [1], [2]), finished(1, 0, 3, [4], [5]), scored(1))
    )
    assert summary.detail == f"completion {name(1)} shares 3 tokens where 2 came before it"


@pytest.mark.parametrize("reason", ["zero_variance", "failed", "evaluated"])
def test_what_cannot_train_passes_without_a_tree(reason):
    group = scored(not_trainable=reason, detail="why")
    summary = only_summary(feed(MergerCore(4), group))
    assert (summary.not_trainable, summary.detail, summary.tree_sha256) == (reason, "why", None)


def test_a_scored_group_waits_until_its_completions_are_read():
    core = MergerCore(4)
    assert list(core.handle(message(scored(0, 1)))) == []
    assert list(core.handle(message(finished(0, None, 0, [1], [2]), 0))) == []
    outputs = core.handle(message(finished(1, 0, 2, [3], [4]), 1))
    assert [output.topic for output in outputs] == ["merged-trees-v1", "merged-groups-v1"]


def test_a_completion_that_never_comes_fails_the_group_once_the_partition_is_quiet():
    core = MergerCore(4)
    core.handle(Tick(run_ms=1_000))
    core.handle(message(finished(0, None, 0, [1], [2]), 0))
    assert list(core.handle(message(scored(0, 1)))) == []
    assert list(core.handle(Tick(run_ms=1_000 + QUIET_MS_MAX - 1))) == []
    summary = only_summary(list(core.handle(Tick(run_ms=1_000 + QUIET_MS_MAX))))
    assert summary.detail == f"completion {name(1)} is not in the log"


def test_a_scored_group_read_twice_is_merged_once():
    core = MergerCore(4)
    feed(core, finished(0, None, 0, [1], [2]), scored(0))
    assert feed(core, scored(0)) == []
    core.handle(message(retired()))
    assert feed(core, scored(0)) == []


def test_a_group_retired_before_it_was_scored_still_has_its_summary():
    core = MergerCore(4)
    feed(core, finished(0, None, 0, [1], [2]), retired())
    summary = only_summary(feed(core, scored(0)))
    assert (summary.not_trainable, summary.detail) == ("failed", "retired before it was merged")


def test_a_group_retired_while_it_waits_still_has_its_summary():
    core = MergerCore(4)
    feed(core, scored(0))
    summary = only_summary(feed(core, retired()))
    assert (summary.not_trainable, summary.detail) == ("failed", "retired before it was merged")
    assert feed(core, finished(0, None, 0, [1], [2])) == []


def test_a_retired_group_leaves_no_state_and_late_completions_bring_none():
    core, empty = MergerCore(4), MergerCore(4)
    feed(core, finished(0, None, 0, [1], [2]), retired())
    feed(core, finished(1, None, 0, [1], [2]))
    feed(empty, finished(0, None, 0, [1], [2], group_id="g-2"), retired(), retired("g-2"))
    assert len(core.snapshot()) < 300
    assert b"context" not in core.snapshot()
    assert b"context" not in empty.snapshot()


def test_a_snapshot_holds_eight_bytes_and_not_the_tokens_of_an_open_completion():
    """A thousand tokens or ten: the snapshot names the record."""
    sizes = []
    for tokens in (10, 1_000):
        core = MergerCore(4)
        for number in range(100):
            record = finished(number, None, 0, range(tokens), [1] * tokens)
            core.handle(message(record, 1_000_000_000 + number))
        sizes.append(len(core.snapshot()) - len(MergerCore(4).snapshot()))
    assert sizes[0] == sizes[1]
    assert sizes[1] <= 100 * 8


def test_a_completion_that_a_restart_cannot_recall_fails_its_group_alone():
    core = MergerCore(4)
    first = [finished(0, None, 0, [1], [2, 3]), finished(1, None, 0, [1], [2, 4], group_id="g-2")]
    feed(core, *first)
    other = MergerCore(4)
    other.restore(core.snapshot())
    other.recall(message(first[1], 1))
    assert [named.offsets for named in other.references()] == [(0, 1)]
    [failed] = other.handle(message(scored(0)))
    assert failed.record.detail == f"completion {name(0)} is not in the log"
    whole = other.handle(message(scored(1, group_id="g-2", offsets={1: 1})))
    assert [output.topic for output in whole] == ["merged-trees-v1", "merged-groups-v1"]
    assert other.references()[0].offsets == ()


def test_groups_of_an_older_snapshot_keep_their_tokens_until_they_are_merged():
    """Their records may be trimmed: an older build did not say that it needs them."""
    old = FROZEN.read_bytes()
    core, again = MergerCore(0), MergerCore(0)
    core.restore(old)
    assert core.references()[0].offsets == ()
    again.restore(core.snapshot())
    groups = msgspec.msgpack.decode(old)["groups"]
    assert len(groups) > 0
    # Fields that are newer than the snapshot have their defaults.
    assert keeps(groups, msgspec.msgpack.decode(again.snapshot())["groups"])


def test_the_memory_of_closed_groups_is_bounded():
    core = MergerCore(4)
    for number in range(RETIRED_IDS_MAX + 50):
        core.handle(message(retired(f"g-{number}")))
    size = len(core.snapshot())
    assert size < 2 * 2**20
    for number in range(50):
        core.handle(message(retired(f"h-{number}")))
    assert len(core.snapshot()) == size


def test_a_restored_core_continues_byte_for_byte():
    records = [
        finished(0, None, 0, [1, 2], [3, 4]),
        finished(1, 0, 4, [5], [6]),
        finished(2, None, 0, [1, 2], [3, 9]),
        scored(0, 1, 2),
    ]
    straight = feed(MergerCore(4), *records)
    for cut in range(len(records)):
        core = MergerCore(4)
        feed(core, *records[:cut])
        other = restored(core.snapshot(), *records)
        assert other.snapshot() == core.snapshot()
        outputs: list[Output] = []
        for offset in range(cut, len(records)):
            outputs.extend(other.handle(message(records[offset], offset)))
        assert [topics.encode(o.record) for o in outputs] == [
            topics.encode(o.record) for o in straight
        ]


FROZEN = Path(__file__).parents[2] / "contracts" / "snapshots" / "merger-1.msgpack"
"""A snapshot of logic version 1."""

PROGRAM = """
import hashlib, importlib.util

spec = importlib.util.spec_from_file_location("records", {file!r})
t = importlib.util.module_from_spec(spec)
spec.loader.exec_module(t)
core = t.MergerCore(4)
others = [t.finished(i, None, 0, [1, 2], [3, i], group_id=f"g-a{{i}}") for i in range(20)]
ours = [t.finished(20, None, 0, [1], [2, 3]), t.finished(21, None, 0, [1], [2, 4])]
outputs = t.feed(core, *others, *ours, t.scored(20, 21))
wire = b"".join(t.topics.encode(output.record) for output in outputs)
print(hashlib.sha256(core.snapshot() + wire).hexdigest())
"""


@pytest.mark.slow
def test_snapshots_and_outputs_do_not_depend_on_the_hash_seed():
    program = PROGRAM.format(file=__file__)
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            check=True,
            capture_output=True,
            timeout=50,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(("limit", "has_tree"), [(None, True), (5, True), (4, False)])
def test_a_group_whose_tree_is_over_the_limit_fails_by_the_name_of_the_setting(limit, has_tree):
    core = MergerCore(4, tree_tokens_max=limit)
    records = finished(0, None, 0, [1], [2]), finished(1, 0, 2, [4], [5, 6])
    outputs = feed(core, *records, scored(0, 1))
    summary = outputs[-1].record
    assert (len(outputs), summary.not_trainable) == ((2, "") if has_tree else (1, "failed"))
    assert summary.tree_tokens == (5 if has_tree else 0)
    if not has_tree:
        assert summary.detail == "its tree has 5 tokens, trainer.tree_tokens_max is 4"
