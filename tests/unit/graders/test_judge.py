"""A judge model behind a real HTTP server: scores, the cache, retries, failures, bounds."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from forgemq_graders.judge import Judge, JudgeError, judged, judged_turns, last_score
from forgemq_graders.process import overlong, weighted_async
from forgemq_graders.replies import Replies, RepliesInMemory, RepliesOnDisk
from tests.unit.graders.episodes import answered
from tests.unit.graders.judge_server import JudgeServer, judge_server

PROMPT = "Question: {task[question]} Answer: {answer}"
TASK = {"question": "2 + 2?"}


@pytest.fixture
async def server() -> AsyncIterator[JudgeServer]:
    async with judge_server() as server:
        yield server


def judge_of(server: JudgeServer, **fields: Any) -> Judge:
    return Judge(**{"url": server.url, "model": "j", "wait_s": 0.0, "timeout_s": 5.0, **fields})


async def test_the_outcome_is_the_judges_score_of_the_filled_template(server):
    judge = judge_of(server, api_key="k", sampling={"max_tokens": 5})
    outcome = judged(judge, prompt=PROMPT, scale=10.0)
    assert await outcome(answered("earlier", "4 {task}", task=TASK)) == 0.7
    assert server.requests == [
        {
            "model": "j",
            "temperature": 0,
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "Question: 2 + 2? Answer: 4 {task}"}],
        }
    ]
    assert server.headers == ["Bearer k"]


async def test_messages_and_score_may_be_functions_of_the_user(server):
    outcome = judged(
        judge_of(server),
        prompt=lambda episode: [{"role": "system", "content": str(episode.result)}],
        score=lambda reply: len(reply),
        scale=16.0,
    )
    assert await outcome(answered("x", result="r")) == 0.5
    assert server.requests[0]["messages"] == [{"role": "system", "content": "r"}]


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_an_equal_question_is_answered_from_the_cache(server, tmp_path, is_on_disk):
    cache = str(tmp_path / "replies.sqlite") if is_on_disk else None
    outcome = judged(judge_of(server, cache=cache), prompt=PROMPT, scale=10.0)
    episodes = [answered("4", task=TASK)] * 5 + [answered("5", task=TASK)]
    assert await asyncio.gather(*map(outcome, episodes)) == [0.7] * 6
    assert len(server.requests) == 2
    same = judged(judge_of(server, cache=cache), prompt=PROMPT, scale=10.0)
    await same(answered("4", task=TASK))
    assert len(server.requests) == (2 if is_on_disk else 3)
    for change in ({"model": "other"}, {"sampling": {"temperature": 1}}):
        other = judged(judge_of(server, cache=cache, **change), prompt=PROMPT, scale=10.0)
        await other(answered("4", task=TASK))
    assert len(server.requests) == (4 if is_on_disk else 5)


async def test_a_kept_reply_without_a_score_for_this_function_is_asked_for_again(server, tmp_path):
    """The score function was mended, or another queue asks the same with another scale."""
    judge = judge_of(server, cache=str(tmp_path / "replies.sqlite"))
    server.replies = ["Score: 60", "Score: 7"]
    of_100 = judged(judge, prompt=PROMPT, scale=100.0)
    assert await of_100(answered("4", task=TASK)) == 0.6
    of_10 = judged(judge, prompt=PROMPT, scale=10.0)
    assert await of_10(answered("4", task=TASK)) == 0.7
    assert len(server.requests) == 2


@pytest.mark.parametrize("failure", [429, 500, 503, "I cannot say", "Score: 11", "Score: -1"])
async def test_a_failure_that_may_pass_is_tried_again_and_only_the_score_is_kept(server, failure):
    server.replies = [failure, failure, "Score: 9"]
    outcome = judged(judge_of(server), prompt=PROMPT, scale=10.0)
    assert await outcome(answered("4", task=TASK)) == 0.9
    assert await outcome(answered("4", task=TASK)) == 0.9
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("failure", "tries", "message"),
    [
        (503, 3, "no score after 3 tries: AgainError: status 503: no, says the server"),
        ("none", 3, "no score after 3 tries: ValueError: no score in 'none'"),
        (401, 1, "status 401: no, says the server"),
        (302, 1, "status 302: no, says the server"),
    ],
)
async def test_a_judge_that_gives_no_score_raises_and_is_no_zero(server, failure, tries, message):
    server.replies = [failure]
    outcome = judged(judge_of(server, tries_max=3), prompt=PROMPT, scale=10.0)
    with pytest.raises(JudgeError) as raised:
        await outcome(answered("4", task=TASK))
    assert str(raised.value) == message
    assert len(server.requests) == tries


async def test_a_judge_that_is_away_or_silent_raises(server):
    away = judged(judge_of(server, url="http://127.0.0.1:9/v1", tries_max=2), prompt=PROMPT)
    with pytest.raises(JudgeError, match="no score after 2 tries: ClientConnectorError"):
        await away(answered("4", task=TASK))
    server.hold.clear()
    silent = judged(judge_of(server, timeout_s=0.1, tries_max=2), prompt=PROMPT)
    with pytest.raises(JudgeError, match=r"no score after 2 tries: .*Timeout"):
        await silent(answered("4", task=TASK))
    server.hold.set()


async def test_no_more_questions_are_under_way_than_the_judge_allows(server):
    server.hold.clear()
    outcome = judged(judge_of(server, at_once=3), prompt=PROMPT, scale=10.0)
    async with asyncio.TaskGroup() as tasks:
        for number in range(9):
            tasks.create_task(outcome(answered(str(number), task=TASK)))
        async with asyncio.timeout(10):
            while server.at_once < 3:  # noqa: ASYNC110 - counted by the server
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert server.at_once == 3
        server.hold.set()
    assert (server.at_once_most, len(server.requests)) == (3, 9)


@pytest.mark.parametrize("make", [RepliesInMemory, "disk"])
def test_replies_that_were_used_longest_ago_make_room(tmp_path, make):
    replies: Replies = (
        RepliesOnDisk(tmp_path / "replies", 2) if make == "disk" else RepliesInMemory(2)
    )
    replies.put("a", "1")
    replies.put("b", "2")
    assert replies.get("a") == "1"
    replies.put("c", "3")
    assert [replies.get(key) for key in "abc"] == ["1", None, "3"]


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7", 7.0),
        ("score 3, no: **Score:** 4.5/10", 4.5),
        ("SCORE = 0", 0.0),
        ("**Score (0-10):** 7", 7.0),
        ("Score [out of 10]: 6/10", 6.0),
        ("Score (8). 2 points are lost", 8.0),
        ("Score: (3)", 3.0),
    ],
)
def test_a_score_is_the_last_number_behind_the_word(reply, score):
    assert last_score(reply, maximum=10.0) == score


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: judged(Judge(url="ftp://x", model="m"), prompt=""), r"\$.url"),
        (lambda: judged(Judge(url="http://x", model="m", at_once=0), prompt=""), r"\$.at_once"),
        (lambda: judged(Judge(url="http://x", model="m"), prompt="", scale=0), "scale must be"),
    ],
)
def test_a_judge_out_of_bounds_is_refused_by_name(make: Callable[[], object], message: str):
    with pytest.raises((ValueError, msgspec.ValidationError), match=message):
        make()


async def test_a_judge_scores_each_turn_and_equal_turns_once(server):
    server.replies = ["Score: 2", "Score: 8"]
    reward = judged_turns(
        judge_of(server, at_once=1), prompt="{task[question]} {number}: {turn}", scale=10.0
    )
    episode = answered("first", "second", task=TASK)
    assert await reward(episode) == [0.2, 0.8]
    assert await reward(episode) == [0.2, 0.8]
    asked = [each["messages"][0]["content"] for each in server.requests]
    assert asked == ["2 + 2? 1: first", "2 + 2? 2: second"]


async def test_a_turn_without_a_score_raises_and_is_no_zero(server):
    server.replies = [400]
    reward = judged_turns(judge_of(server), prompt="{turn}")
    with pytest.raises(JudgeError, match="status 400"):
        await reward(answered("first", "second", task=TASK))


async def test_a_judge_of_turns_is_weighed_beside_other_process_rewards(server):
    server.replies = ["Score: 5"]
    turns = judged_turns(judge_of(server), prompt="{turn}", scale=10.0)
    reward = weighted_async((2.0, turns), (1.0, overlong(tokens_max=1, buffer_tokens=1)))
    assert await reward(answered("first", "second", task=TASK)) == [0.0, 0.0]
    with pytest.raises(ValueError, match="needs at least one pair"):
        weighted_async()
