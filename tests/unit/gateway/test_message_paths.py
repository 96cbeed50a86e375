"""Paths of messages are known as long as a request or a reply has them."""

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forgemq_gateway.core.digests import EMPTY_PATH
from forgemq_gateway.core.held_bytes import HeldBytes, HeldPart
from forgemq_gateway.core.message_paths import Branch, MessagePaths
from tests.unit.gateway.talk import talk

KEYS = st.lists(st.sampled_from("ab"), max_size=4).map(tuple)


@given(noted=st.lists(st.tuples(KEYS, st.booleans()), max_size=8), probe=KEYS)
def test_what_was_noted_and_taken_back_is_as_if_it_had_never_been_noted(
    noted: list[tuple[tuple[str, ...], bool]], probe: tuple[str, ...]
) -> None:
    """Replies stay: `a` is one. Half of the requests follow the start, the others the reply."""
    held, still = HeldPart(HeldBytes()), HeldPart(HeldBytes())
    paths, expected = MessagePaths(held), MessagePaths(still)
    reply = paths.follow(EMPTY_PATH, "a")
    assert expected.follow(EMPTY_PATH, "a") == reply
    branches = [
        (Branch(keys, reply if len(keys) % 2 else EMPTY_PATH), is_kept) for keys, is_kept in noted
    ]
    for branch, is_kept in branches:
        paths.note(branch)
        if is_kept:
            expected.note(branch)
    for branch, is_kept in branches:
        if not is_kept:
            paths.forget(branch)
    known = expected.known(probe)
    assert paths.known(probe) == known
    assert [paths.is_continued(path) for path in known] == [
        expected.is_continued(path) for path in known
    ]
    assert (paths.deepest, held.size_bytes) == (expected.deepest, still.size_bytes)


async def test_a_request_that_was_refused_before_a_lane_had_it_makes_no_fork(model: Path) -> None:
    too_long = {"role": "user", "content": "word " * 9000}
    hello, more = ({"role": "user", "content": text} for text in ("hello", "more"))
    echo = {"role": "assistant", "content": "yes"}
    async with talk(model, lambda _: "yes") as agent:
        asked: list[list[Any]] = [[too_long], [hello], [hello, echo, too_long], [hello, echo, more]]
        answers = [
            await agent.post("/v1/chat/completions", {"model": "m", "messages": messages})
            for messages in asked
        ]
        finished = await agent.finished()
        ended = await agent.end()
    assert [answer.status_code for answer in answers] == [400, 200, 400, 200]
    assert [(each.turn.fork_reason, each.turn.is_fork) for each in finished] == [(None, False)] * 2
    assert (ended.forks, len(ended.manifest)) == (0, 2)
