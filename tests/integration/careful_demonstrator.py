"""Finished conversations at the demo's shop desk, by a demonstrator that makes no mistake."""

import json
import random
from collections.abc import Iterator
from typing import Any

from shop_desk.calls import ARGUMENT, TOOLS, read_calls
from shop_desk.demonstrator import Habits, demonstrations
from shop_desk.shop import draw_order

CAREFUL = dict.fromkeys(
    (
        "bad_call",
        "notes_needlessly",
        "notes_wrong_price",
        "guesses_price",
        "wrong_count",
        "answers_without_total",
    ),
    0.0,
) | {"notes_when_full": 1.0}


def conversations(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """Contexts of demonstrated episodes; those of one episode follow one another."""
    choose, made = random.Random(seed), 0
    while True:
        for shown in demonstrations(draw_order(choose), choose, Habits(**CAREFUL)):
            if made == count:
                return
            made += 1
            messages = [{"role": "user", "content": shown.question}, *_turns(shown.turns)]
            yield {"messages": messages, "tools": list(TOOLS)}


def with_replies_of_others(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The control: each conversation with the assistant's messages of another one, as many."""
    by_length: dict[int, list[int]] = {}
    for number, one in enumerate(given):
        by_length.setdefault(len(one["messages"]), []).append(number)
    partner = {
        number: numbers[(place + 1) % len(numbers)]
        for numbers in by_length.values()
        for place, number in enumerate(numbers)
    }
    return [_exchanged(one, given[partner[number]]) for number, one in enumerate(given)]


def _exchanged(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    first = own["messages"][0]
    return {**own, "messages": [first, *other["messages"][1:]]}


def _turns(turns: Any) -> Iterator[dict[str, Any]]:
    for number, (text, replies) in enumerate(turns):
        calls = read_calls(text)
        if not calls:
            yield {"role": "assistant", "content": text}
            continue
        ids = [f"call_{number}_{place}" for place in range(len(calls))]
        yield {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": each,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps({ARGUMENT[call.name]: call.argument}),
                    },
                }
                for each, call in zip(ids, calls, strict=True)
            ],
        }
        for each, reply in zip(ids, replies, strict=True):
            yield {"role": "tool", "tool_call_id": each, "content": reply}
