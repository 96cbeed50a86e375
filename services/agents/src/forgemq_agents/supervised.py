"""Plays finished conversations of a supervised domain: the model reads each of their replies."""

from collections.abc import Mapping
from typing import Any

import msgspec

from forgemq_agents.completion import Message
from forgemq_agents.core.conversations import conversation_of
from forgemq_agents.episode import Episode


async def play(episode: Episode) -> None:
    """Have every reply of the episode's conversation read, then report what it earned.

    A conversation that outgrows the context window ends with the last reply that fits.
    """
    conversation = conversation_of(msgspec.json.encode(episode.task))
    episode.result = msgspec.json.decode(conversation.end.result)
    for reward in conversation.rewards:
        await episode.report_reward(reward.name, reward.value)
    await read_replies(episode, episode.task)


async def read_replies(episode: Episode, conversation: Mapping[str, Any]) -> None:
    """Have every reply read; each next request repeats it as the gateway has recorded it.

    Raises:
        ContextFullError: the next reply does not fit.
    """
    messages: list[Message] = []
    call_ids: dict[str, str] = {}  # Of the gateway, by those of the file.
    for message in conversation["messages"]:
        if message["role"] != "assistant":
            messages.append(_answering(message, call_ids))
            continue
        read = await episode.chat(messages, tools=conversation.get("tools") or (), reply=message)
        messages.append(read.message)
        own = [call["id"] for call in message.get("tool_calls") or ()]
        # A call that the model's own parser does not find stays text, and has no id.
        call_ids |= dict(zip(own, (call.id for call in read.calls), strict=False))


def _answering(message: Message, call_ids: Mapping[str, str]) -> Message:
    """The message; if it answers a call, by the id that the gateway gave the call."""
    if message["role"] != "tool":
        return message
    own = message["tool_call_id"]
    return {**message, "tool_call_id": call_ids.get(own, own)}
