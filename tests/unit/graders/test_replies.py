"""Kept replies of a judge: the newest used stay, in memory and on disk."""

import pytest

from forgemq_graders.replies import Replies, RepliesInMemory, RepliesOnDisk


def replies_of(kind: str, folder, *, count_max: int) -> Replies:
    if kind == "memory":
        return RepliesInMemory(count_max)
    return RepliesOnDisk(folder / "replies.sqlite", count_max)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_hits_cost_no_other_reply_its_place(tmp_path, kind):
    replies = replies_of(kind, tmp_path, count_max=3)
    for key in "abc":
        replies.put(key, key.upper())
    for _ in range(10):
        assert replies.get("c") == "C"
    replies.put("b", "B")
    assert [replies.get(key) for key in "abc"] == ["A", "B", "C"]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_the_reply_that_was_used_longest_ago_makes_room(tmp_path, kind):
    replies = replies_of(kind, tmp_path, count_max=3)
    for key in "abc":
        replies.put(key, key.upper())
    replies.get("a")
    replies.put("d", "D")
    assert [replies.get(key) for key in "abcd"] == ["A", None, "C", "D"]


def test_a_file_that_was_longer_is_cut_to_what_is_used_newest(tmp_path):
    longer = replies_of("disk", tmp_path, count_max=9)
    for key in "abcdef":
        longer.put(key, key.upper())
    shorter = replies_of("disk", tmp_path, count_max=2)
    shorter.put("g", "G")
    assert [shorter.get(key) for key in "abcdefg"] == [None] * 5 + ["F", "G"]


@pytest.mark.slow
def test_a_large_file_has_at_most_a_hundredth_more(tmp_path):
    replies = replies_of("disk", tmp_path, count_max=200)
    for number in range(240):
        replies.put(str(number), "x")
    kept = [number for number in range(30, 240) if replies.get(str(number)) is not None]
    assert kept[-200:] == list(range(40, 240))
    assert len(kept) <= 202
