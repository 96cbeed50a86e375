"""Messages in the form that every chat template accepts."""

from collections.abc import Mapping, Sequence
from typing import Any

# OpenAI's names of the same role at another time; templates know one of each.
_ROLES = {"developer": "system", "function": "tool"}


def plain_messages(
    messages: Sequence[Mapping[str, Any]], *, is_head: bool = True
) -> list[dict[str, Any]]:
    """Messages as every template accepts them: text content, and one system message at the head.

    `developer` becomes `system`, and `function` becomes `tool`. System messages after the head
    become user messages: most templates ignore or refuse them there.

    Args:
        messages: In OpenAI chat form.
        is_head: False if other messages precede these.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        role = _ROLES.get(message["role"], message["role"])
        text = text_of(message.get("content"))
        if role == "system" and is_head and len(plain) == 1 and plain[0]["role"] == "system":
            plain[0]["content"] += "\n\n" + text
            continue
        if role == "system" and (plain or not is_head):
            role = "user"
        kept = {key: value for key, value in message.items() if value is not None}
        plain.append({**kept, "role": role, "content": text})
    return plain


def text_of(content: object) -> str:
    """The text of a message's content: a string, blocks with text, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [block.get("text", "") for block in content if isinstance(block, Mapping)]
        return "".join(part for part in parts if isinstance(part, str))
    raise TypeError(f"content must be a string or a list of blocks, got {type(content).__name__}")
