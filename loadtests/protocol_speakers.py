"""What a client of each protocol sends for a list of messages, and the text it reads back.

Only what a load test needs: messages are plain text, so one form serves all protocols that have
messages, and their texts one behind the other are the prompt of completions.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct


class Said(Struct, frozen=True, kw_only=True):
    """An answer as far as a load test reads it: its text, and the tokens that it was counted as."""

    text: str
    context_tokens: int
    output_tokens: int


class Speaker(Struct, frozen=True, kw_only=True):
    """One protocol.

    Attributes:
        path: Where its requests go.
        asked: The member of a body that has all messages, from these JSON objects.
        limit_name: The field that bounds the sampled tokens.
        text_of: The text in a whole answer.
        text_in: The text in one event of a stream; "" if it has none.
    """

    path: str
    asked: Callable[[list[bytes]], bytes]
    limit_name: str
    text_of: Callable[[dict[str, Any]], str]
    text_in: Callable[[dict[str, Any]], str]

    def body(self, messages: list[bytes], *, tokens_max: int, is_stream: bool) -> bytes:
        """A request for the next turn; `messages` are JSON objects."""
        return b'{"model":"policy","%s":%d%s,%s}' % (
            self.limit_name.encode(),
            tokens_max,
            b',"stream":true,"stream_options":{"include_usage":true}' if is_stream else b"",
            self.asked(messages),
        )

    def said(self, answer: bytes, *, is_stream: bool) -> Said:
        """What the body of an answer with status 200 says."""
        if not is_stream:
            whole = msgspec.json.decode(answer)
            return _said(self.text_of(whole), whole["usage"])
        told = list(events(answer))
        usages = (event.get("usage") or event.get("response", {}).get("usage") for event in told)
        usage = [each for each in usages if each][-1]
        return _said("".join(self.text_in(event) for event in told), usage)


def events(stream: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for line in stream.splitlines():
        if line.startswith(b"data: {"):
            yield msgspec.json.decode(line[len(b"data: ") :])


def _said(text: str, usage: dict[str, int]) -> Said:
    asked = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
    written = usage.get("completion_tokens", usage.get("output_tokens", 0))
    cached = usage.get("cache_read_input_tokens", 0)
    return Said(text=text, context_tokens=asked + cached, output_tokens=written)


def _messages(messages: list[bytes]) -> bytes:
    return b'"messages":[%s]' % b",".join(messages)


def _input(messages: list[bytes]) -> bytes:
    return b'"input":[%s]' % b",".join(messages)


def _prompt(messages: list[bytes]) -> bytes:
    texts = (msgspec.json.decode(message)["content"] for message in messages)
    return b'"prompt":%s' % msgspec.json.encode("".join(texts))


def _completion_text(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def _completion_delta(event: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def _chat_text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"] or ""


def _chat_delta(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _messages_text(answer: dict[str, Any]) -> str:
    return "".join(block.get("text", "") for block in answer["content"])


def _messages_delta(event: dict[str, Any]) -> str:
    text: str = event.get("delta", {}).get("text", "")
    return text


def _responses_text(answer: dict[str, Any]) -> str:
    items = (item for item in answer["output"] if item["type"] == "message")
    return "".join(part["text"] for item in items for part in item["content"])


def _responses_delta(event: dict[str, Any]) -> str:
    return event["delta"] if event["type"] == "response.output_text.delta" else ""


SPEAKERS = {
    "chat": Speaker(
        path="/v1/chat/completions",
        asked=_messages,
        limit_name="max_tokens",
        text_of=_chat_text,
        text_in=_chat_delta,
    ),
    "completions": Speaker(
        path="/v1/completions",
        asked=_prompt,
        limit_name="max_tokens",
        text_of=_completion_text,
        text_in=_completion_delta,
    ),
    "messages": Speaker(
        path="/v1/messages",
        asked=_messages,
        limit_name="max_tokens",
        text_of=_messages_text,
        text_in=_messages_delta,
    ),
    "responses": Speaker(
        path="/v1/responses",
        asked=_input,
        limit_name="max_output_tokens",
        text_of=_responses_text,
        text_in=_responses_delta,
    ),
}
