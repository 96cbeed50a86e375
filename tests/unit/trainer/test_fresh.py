"""Completions of the weights in training as trees that the probe can run."""

import asyncio
import dataclasses
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from forgemq_bus.log import Emit
from forgemq_contracts import topics
from forgemq_contracts.completions import FinishedCompletion, TopTokens, TurnPart, WeightSpan
from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.fresh import OBJECT_BYTES, TREES_MAX, FreshCompletions, HeldWeights
from forgemq_trainer.core.tree import read_tree
from tests.unit.trainer.bench import memory_bench
from tests.unit.trainer.scene import agent_samples, merge, scheduled_step

NOTHING: frozenset[str] = frozenset()


def _ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def _completion(
    number: int, context: bytes, output: bytes, *, version: int = 3, **changes: object
) -> FinishedCompletion:
    made = FinishedCompletion(
        request_id=f"{number:032x}",
        attempt=0,
        episode_id="g-0.0.0",
        group_id="g-0",
        lane=0,
        epoch=1,
        finish_reason="stop",
        turn=TurnPart(sequence=number, protocol="chat_completions", body_digest="d"),
        context=context,
        output=output,
        logprobs=np.full(len(output) // 4, -0.5 - number, "<f4").tobytes(),
        spans=(WeightSpan(start=0, end=len(output) // 4, lineage=2, version=version),),
    )
    return msgspec.structs.replace(made, **changes)


ROOT = _completion(0, _ids(1, 2, 3), _ids(4, 5), version=2)
SECOND = _completion(1, _ids(6), _ids(7, 8), parent_id=ROOT.request_id, shared_prefix_tokens=5)
FORK = _completion(2, _ids(9), _ids(10), parent_id=SECOND.request_id, shared_prefix_tokens=4)
"""Keeps only the first token that the root sampled, and nothing of its parent's own."""


def _fresh(*completions: FinishedCompletion, bytes_max: int = 1_000_000) -> FreshCompletions:
    fresh = FreshCompletions(bytes_max=bytes_max)
    for completion in completions:
        fresh.observe(completion)
    return fresh


def _tokens(tree: MergedTree) -> list[int]:
    return read_tree(tree).tokens_N.tolist()


def test_a_tree_has_the_whole_path_and_the_tokens_that_the_weights_sampled() -> None:
    fork, second = _fresh(ROOT, SECOND, FORK).trees(HeldWeights(2, 3), but=NOTHING)
    assert _tokens(second) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert _tokens(fork) == [1, 2, 3, 4, 9, 10]
    forest = read_tree(second)
    assert forest.tokens_N[forest.entry_token_E].tolist() == [7, 8]
    assert forest.entry_logprob_E.tolist() == [-1.5, -1.5]
    assert forest.entry_version_E.tolist() == [3, 3]
    assert forest.entry_temperature_E.tolist() == [1.0, 1.0]


def test_only_tokens_of_these_weights_count_and_version_0_is_the_same_in_every_life() -> None:
    spans = (
        WeightSpan(start=0, end=1, lineage=2, version=2),
        WeightSpan(start=1, end=2, lineage=2, version=3),
    )
    mixed = msgspec.structs.replace(SECOND, spans=spans)
    (tree,) = _fresh(ROOT, mixed).trees(HeldWeights(2, 3), but=NOTHING)
    assert read_tree(tree).entry_version_E.tolist() == [-1, 3]
    assert _fresh(ROOT, SECOND).trees(HeldWeights(1, 3), but=NOTHING) == ()
    base = _completion(0, _ids(1), _ids(2), version=0)
    assert len(_fresh(base).trees(HeldWeights(7, 0), but=NOTHING)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"support": "truncated"},
        {"temperature": 0.0},
        {"finish_reason": "error"},
        {"spans": ()},
        {"group_id": "g-9"},
    ],
)
def test_what_cannot_be_compared_is_not_probed(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(SECOND, **change)
    assert _fresh(ROOT, other).trees(HeldWeights(2, 3), but=frozenset({"g-9"})) == ()


def test_a_chain_with_a_missing_ancestor_is_not_probed() -> None:
    assert _fresh(SECOND).trees(HeldWeights(2, 3), but=NOTHING) == ()
    kept = _fresh(ROOT, SECOND, FORK, bytes_max=2 * OBJECT_BYTES + 45)
    assert kept.trees(HeldWeights(2, 3), but=NOTHING) == ()


def test_the_first_record_of_a_request_counts_and_the_newest_completions_come_first() -> None:
    again = msgspec.structs.replace(ROOT, output=_ids(60, 61))
    many = [_completion(10 + n, _ids(1), _ids(n)) for n in range(TREES_MAX + 3)]
    trees = _fresh(ROOT, again, SECOND, *many).trees(HeldWeights(2, 3), but=NOTHING)
    assert [_tokens(tree)[1] for tree in trees[:2]] == [TREES_MAX + 2, TREES_MAX + 1]
    assert len(trees) == TREES_MAX
    (tree,) = _fresh(ROOT, again, SECOND).trees(HeldWeights(2, 3), but=NOTHING)
    assert _tokens(tree)[:5] == [1, 2, 3, 4, 5]


def test_expert_routes_of_the_whole_path_are_replayed_if_every_completion_has_them() -> None:
    def routed(completion: FinishedCompletion) -> FinishedCompletion:
        tokens = np.frombuffer(completion.output, "<i4")
        routes = np.stack([tokens, tokens + 1], axis=1).astype("<i2").tobytes()
        return msgspec.structs.replace(completion, routes=routes)

    (tree,) = _fresh(routed(ROOT), routed(SECOND)).trees(HeldWeights(2, 3), but=NOTHING)
    forest = read_tree(tree)
    assert forest.tokens_N[forest.entry_token_E].tolist() == [4, 5, 7, 8]
    assert forest.entry_version_E.tolist() == [-1, -1, 3, 3]
    assert forest.entry_route_ER.tolist() == [[4, 5], [5, 6], [7, 8], [8, 9]]
    (fork,) = _fresh(routed(ROOT), SECOND, routed(FORK)).trees(HeldWeights(2, 3), but=NOTHING)[:1]
    assert read_tree(fork).entry_route_ER.tolist() == [[4, 5], [10, 11]]
    (bare,) = _fresh(ROOT, routed(SECOND)).trees(HeldWeights(2, 3), but=NOTHING)
    assert read_tree(bare).entry_route_ER.tolist() == [[7, 8], [8, 9]]


def test_messages_and_tools_of_the_kept_completions_take_no_memory() -> None:
    """The bound is on tokens and log-probabilities; each turn here has a megabyte of text."""
    fresh = FreshCompletions(bytes_max=1_000_000)
    tracemalloc.start()
    for number in range(20):
        text = b'[{"role": "tool", "content": "' + b"x" * 1_000_000 + b'"}]'
        turn = TurnPart(
            sequence=number, protocol="chat_completions", body_digest="d", messages=text
        )
        fresh.observe(_completion(number, _ids(1), _ids(2), turn=turn))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(fresh.trees(HeldWeights(2, 3), but=NOTHING)) == 20
    assert held_bytes < 4_000_000


@pytest.mark.parametrize("top_tokens", [0, 20])
def test_many_small_completions_stay_within_the_bound(top_tokens: int) -> None:
    """Of ten tokens each, whose ids and numbers are larger, as are likeliest tokens beside them."""
    tops = _ids(*range(10 * top_tokens))
    asked = TopTokens(ids=tops, logprobs=tops) if top_tokens else None
    values = [
        topics.encode(_completion(number, _ids(1), _ids(*range(10)), top_tokens=asked))
        for number in range(3000)
    ]
    fresh = FreshCompletions(bytes_max=1_000_000)
    tracemalloc.start()
    for value in values:
        completion = topics.decode(topics.FINISHED_COMPLETIONS, value)
        assert isinstance(completion, FinishedCompletion)
        fresh.observe(completion)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 1_200_000


async def test_a_run_probes_what_its_weights_have_just_sampled(tmp_path: Path) -> None:
    """The step's own tokens are all of another version."""
    bench = await memory_bench(tmp_path)
    samples = agent_samples(np.random.default_rng(0))
    old = merge([dataclasses.replace(sample, version=9) for sample in samples], "g-1")
    await bench.put_trees([old])
    completion = _completion(1, _ids(*range(15)), _ids(21, 22, 23), version=0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.train(until=0))
        await bench.wait_for_start()
        writer = await bench.log.writer()
        await writer.write(
            Emit(
                topic=topics.FINISHED_COMPLETIONS.name,
                partition=0,
                key=b"",
                value=topics.encode(completion),
            )
        )
        await asyncio.sleep(2.0)
        await bench.put_steps([scheduled_step(0, [old])])
    (trained,) = await bench.trained()
    assert trained.metrics.gap_entries == 3
    assert trained.metrics.logprob_gap is not None
    assert trained.metrics.probe_s > 0
