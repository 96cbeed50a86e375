"""What an agent says about its context: recorded with the turn, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from forgemq_contracts.context_cuts import CONTEXT_HEADER, CONTEXT_HEADER_BYTES_MAX, CUTS_MAX
from forgemq_contracts.episodes import ForkCount
from tests.unit.gateway.scripted_lane import Asked
from tests.unit.gateway.talk import Talk, talk

CHAT = "/v1/chat/completions"
CUT = {"function": "mine", "form": "rule"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def chat(talking: Talk, *messages: Any, cuts: Any = None) -> Any:
    told = {} if cuts is None else {CONTEXT_HEADER: json.dumps(cuts)}
    return await talking.post(CHAT, {"model": "m", "messages": messages}, **told)


def yes(_: Asked) -> str:
    return "yes"


async def test_a_cut_is_recorded_with_the_turn_and_makes_its_fork_a_compaction(model: Path) -> None:
    """Without the header these messages are those of another conversation."""
    async with talk(model, yes) as talking:
        first = (await chat(talking, user("a"))).json()["id"].removeprefix("chatcmpl-")
        told = {**CUT, "after_id": first, "is_written": True, "parameters": {"kept": 2, "by": "x"}}
        assert (await chat(talking, user("a: yes"), cuts=[told])).status_code == 200
        assert (await chat(talking, user("other"))).status_code == 200
        before, cut, other = await talking.finished()
        ended = await talking.end()
    assert before.turn.cuts == other.turn.cuts == ()
    (recorded,) = cut.turn.cuts
    assert (recorded.function, recorded.form, recorded.after_id) == ("mine", "rule", first)
    assert (recorded.is_written, recorded.parameters) == (True, {"kept": 2, "by": "x"})
    assert (cut.turn.fork_reason, other.turn.fork_reason) == ("compaction", "side_request")
    assert ended.fork_reasons == (
        ForkCount(reason="compaction", count=1),
        ForkCount(reason="side_request", count=1),
    )


async def test_a_cut_that_changed_no_message_is_recorded_and_is_no_fork(model: Path) -> None:
    async with talk(model, yes) as talking:
        await chat(talking, user("a"))
        await chat(talking, user("a"), said("yes"), user("b"), cuts=[CUT])
        _, second = await talking.finished()
        ended = await talking.end()
    assert (len(second.turn.cuts), second.turn.fork_reason) == (1, None)
    assert ended.forks == 0


async def test_the_header_is_no_part_of_what_is_asked_so_a_retry_joins_its_turn(
    model: Path,
) -> None:
    async with talk(model, yes) as talking:
        once = await chat(talking, user("a"), cuts=[CUT])
        headers = {"x-stainless-retry-count": "1"}
        again = await talking.post(CHAT, {"model": "m", "messages": [user("a")]}, **headers)
        finished = await talking.finished()
    assert once.json()["id"] == again.json()["id"]
    assert len(finished) == 1


@pytest.mark.parametrize(
    ("told", "rule"),
    [
        ("no json", "must be a JSON array of context cuts"),
        ("{}", "must be a JSON array of context cuts"),
        ('[{"function": "f"}]', "missing required field `form`"),
        ('[{"function": "", "form": "tool"}]', "length >= 1"),
        ('[{"function": "f", "form": "whim"}]', "Invalid enum value 'whim'"),
        ('[{"function": "f", "form": "tool", "parameters": {"a": []}}]', "got `array`"),
        ('[{"function": "f", "form": "tool", "after_id": "x"}]', "matching regex"),
        (
            json.dumps([{**CUT, "after_id": "a" * 32}]),
            f"names {'a' * 32}, which is no completion of this episode",
        ),
        (json.dumps([CUT] * (CUTS_MAX + 1)), f"must have at most {CUTS_MAX} cuts, got 17"),
        ("[" + " " * CONTEXT_HEADER_BYTES_MAX + "]", f"at most {CONTEXT_HEADER_BYTES_MAX} bytes"),
    ],
)
async def test_a_wrong_header_is_400_with_its_name_and_rule_and_samples_nothing(
    model: Path, told: str, rule: str
) -> None:
    async with talk(model, yes) as talking:
        body = {"model": "m", "messages": [user("a")]}
        refused = await talking.post(CHAT, body, **{CONTEXT_HEADER: told})
        assert talking.seen() == []
        right = await talking.post(CHAT, body, **{CONTEXT_HEADER: json.dumps([CUT])})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == CONTEXT_HEADER
    assert error["message"].startswith(f"{CONTEXT_HEADER}: ")
    assert rule in error["message"]
    assert right.status_code == 200


async def test_every_protocol_takes_the_header(model: Path) -> None:
    told = {CONTEXT_HEADER: json.dumps([CUT])}
    async with talk(model, yes) as talking:
        for path, body in (
            ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": [user("a")]}),
            ("/v1/responses", {"model": "m", "input": "b"}),
            ("/v1/completions", {"model": "m", "prompt": "c"}),
        ):
            answer = await talking.post(path, body, **told)
            assert answer.status_code == 200, answer.text
        finished = await talking.finished()
    assert [[cut.function for cut in each.turn.cuts] for each in finished] == [["mine"]] * 3


async def test_a_claim_says_how_long_a_context_may_be(model: Path) -> None:
    async with talk(model, yes, context_tokens_max=512) as talking:
        claim = await talking.world.claim(talking.episode_id.split(".")[0])
    assert claim["context_tokens_max"] == 512
