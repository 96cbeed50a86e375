"""A sound request body of each protocol, with as many kinds of parts as fit into one."""

from collections.abc import Iterator
from typing import Any

HELLO = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
SOUND: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "temperature": 1.0,
    "max_tokens": 5,
    "stream": False,
    "stop": ["x"],
}
SOUND_MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "Zm9yZ2VtcTpy"},
                {"type": "tool_use", "id": "c1", "name": "find", "input": {"q": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "found"}],
                }
            ],
        },
    ],
    "tools": [{"name": "find", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
}
SOUND_RESPONSE: dict[str, Any] = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "rs_r_0", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
    ],
    "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "max_output_tokens": 5,
}
SOUND_COMPLETION: dict[str, Any] = {
    "model": "m",
    "prompt": [[1, 2], [3]],
    "n": 2,
    "max_tokens": 5,
    "logprobs": 2,
    "stop": ["x"],
    "echo": False,
    "suffix": "",
    "best_of": 2,
    "return_token_ids": True,
}
GROUP: dict[str, Any] = {
    "domain": "shop",
    "idempotency_key": "fuzzed",
    "task": {"n": 1},
    "purpose": "train",
    "group_size": 2,
    "temperature": 1.0,
}


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON value, from the outside in."""
    yield path
    if isinstance(value, dict):
        for name in value:
            yield from paths(value[name], (*path, name))
    elif isinstance(value, list):
        for number in range(len(value)):
            yield from paths(value[number], (*path, number))


def changed(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    """The value with junk at this path."""
    if not path:
        return junk
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], junk)
    return copy
