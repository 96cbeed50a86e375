"""Expert routes of completions become those of the tree's entries, in the same order."""

import numpy as np
import pytest

from forgemq_contracts.messages import Output
from forgemq_contracts.trees import MergedTree
from forgemq_merger.core.merger import MergerCore
from tests.unit.merger.records import feed, finished, message, name, only_summary, restored, scored

LAYERS, TOP_K = 3, 2


def routes(number: int, tokens: int, *, layers: int = LAYERS) -> bytes:
    """Expert routes whose values name their completion, token, layer and index."""
    index = np.arange(tokens * layers * TOP_K) + 100 * number
    return index.astype("<i2").tobytes()


def group(**changes: bytes) -> list[object]:
    """A parent, a child of it, a second child, and one that does not train."""
    return [
        finished(0, None, 0, [1, 2], [3, 4], routes=changes.get("first", routes(0, 2))),
        finished(1, 0, 4, [5], [6, 7, 8], routes=changes.get("second", routes(1, 3))),
        finished(2, 0, 3, [9], [6], routes=changes.get("third", routes(2, 1))),
        finished(3, 1, 7, [1], [2], support="top_p"),
    ]


def tree_of(outputs: list[Output]) -> MergedTree:
    tree = outputs[0].record
    assert isinstance(tree, MergedTree)
    return tree


def test_the_route_of_every_entry_is_that_of_its_sampled_token() -> None:
    tree = tree_of(feed(MergerCore(4), *group(), scored(0, 1, 2, 3)))
    assert tree.sample_ids == (name(0), name(1), name(2))
    rows = np.frombuffer(tree.entry_route, "<i2").reshape(6, LAYERS, TOP_K)
    assert rows[:, 0, 0].tolist() == [0, 6, 100, 106, 112, 200]
    assert rows[2].tolist() == [[100, 101], [102, 103], [104, 105]]


def test_a_group_with_a_sample_without_routes_has_none() -> None:
    outputs = feed(MergerCore(4), *group(second=b""), scored(0, 1, 2, 3))
    assert tree_of(outputs).entry_route == b""
    assert tree_of(feed(MergerCore(4), *group(second=b""), scored(0, 2))).entry_route != b""


def test_routes_of_two_models_fail_the_group() -> None:
    outputs = feed(MergerCore(4), *group(third=routes(2, 1, layers=4)), scored(0, 1, 2, 3))
    summary = only_summary(outputs)
    assert summary.not_trainable == "failed"
    assert summary.detail == (
        f"completion {name(2)}: routes of 16 bytes a token, those of {name(0)} have 12"
    )


@pytest.mark.parametrize("restored_after", [0, 2, 4])
def test_routes_survive_a_snapshot(restored_after: int) -> None:
    records = [*group(), scored(0, 1, 2, 3)]
    core, outputs = MergerCore(4), list[Output]()
    for offset, record in enumerate(records):
        if offset == restored_after:
            core = restored(core.snapshot(), *records)
        outputs.extend(core.handle(message(record, offset)))
    assert tree_of(outputs) == tree_of(feed(MergerCore(4), *records))
