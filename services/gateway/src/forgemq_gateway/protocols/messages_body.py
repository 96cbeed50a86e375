"""Reads the body of Anthropic's messages, field by field.

Unknown fields and betas are accepted: they count in the body's digest and change nothing else. Of
blocks of an unknown kind the model reads what they say.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from forgemq_gateway.core.errors import invalid
from forgemq_gateway.core.requests import (
    DEFAULT_MODEL,
    FORM_BYTES_MAX,
    Call,
    KeyedMessages,
    Part,
    ReadItems,
    Request,
    RequestMessage,
    Role,
    Text,
    Thinking,
    ToolResult,
)
from forgemq_gateway.protocols.field_names import FieldNames
from forgemq_gateway.protocols.json_body import (
    NULL,
    decoded,
    decoded_at,
    is_array,
    items_in,
    named_fields,
    tools_in,
)
from forgemq_gateway.protocols.message_items import MessageItems
from forgemq_gateway.protocols.other_content import Kinds, Told, text_in, text_of_json, unread
from forgemq_gateway.protocols.reply_form import (
    FormFields,
    Schema,
)
from forgemq_gateway.protocols.signature import signed_request


# As in `chat_body.py`: no collection of cycles while many are made.
class ContentBlock(Struct, gc=False):
    """One block of a message's content; each type has some of these fields."""

    type: Literal[
        "text", "thinking", "redacted_thinking", "tool_use", "tool_result", "document", "image"
    ]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = NULL
    tool_use_id: str | None = None
    content: Raw = NULL
    source: Raw = NULL
    title: Raw = NULL


class GivenMessage(Struct, gc=False):
    """One message; a `system` one may stand anywhere."""

    role: Role
    content: Raw = NULL


class ToolChoice(Struct):
    """Which tools the model may call."""

    type: str | None = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class OutputFormat(Struct):
    """The form of the reply's text."""

    type: str
    schema: Schema | None = None


class OutputConfig(Struct):
    """What the reply is to be like; only its form is read."""

    format: OutputFormat | None = None


class MessagesFields(Struct):
    """The fields of the body that we read."""

    messages: Raw
    model: str | None = None
    system: Raw = NULL
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: int | None = None
    tools: Raw = NULL
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class TextSource(Struct):
    """The source of a document that is text, or blocks of text."""

    type: str
    data: str | None = None
    content: Raw = NULL


_NAMES = FieldNames(
    protocol="messages",
    asked=(
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "stop_sequences",
        "thinking",
        "output_config",
        "output_format",
        "tool_choice",
    ),
    unused=("temperature", "top_p", "top_k", "thinking"),
    digested=frozenset({"messages", "system", "stream"}),
)
_FORM_LIMITS = dict.fromkeys(("output_config", "output_format"), FORM_BYTES_MAX)

# A block that changes with every request and is no part of the prompt.
_BILLING = "x-anthropic-billing-header:"

_NO_INPUT = Raw(b"{}")

# Kinds of tools that an agent runs itself. `function` is OpenAI's: who sends it here has taken the
# form of another protocol.
_OWN_TOOLS = (None, "custom", "function")

_FIELDS = msgspec.json.Decoder(MessagesFields)
_NAMED = named_fields(MessagesFields, (*_NAMES.asked, *_NAMES.unused))
_MESSAGE = msgspec.json.Decoder(GivenMessage)
_TEXT = msgspec.json.Decoder(str | None)
_BLOCK: msgspec.json.Decoder[ContentBlock | Told] = msgspec.json.Decoder(ContentBlock)
_SOURCE = msgspec.json.Decoder(TextSource)

_KINDS = Kinds(
    _BLOCK,
    {
        "text": frozenset({"text"}),
        "thinking": frozenset({"thinking", "signature"}),
        "redacted_thinking": frozenset(),
        "tool_use": frozenset({"id", "name", "input"}),
        "tool_result": frozenset({"tool_use_id", "content"}),
        "document": frozenset({"source", "title"}),
        "image": frozenset(),
    },
)


def request_of(body: bytes, known: ReadItems | None = None) -> Request:
    """The request in this body; `known` is what KNOWN_ITEM in it stands for.

    Raises:
        RefusedError: 400, naming the field.
    """
    raw, fields = decoded(body, _FIELDS, named=_NAMED, limits=_FORM_LIMITS)
    tools = _tools(fields.tools)
    items = MessageItems(
        protocol=_NAMES.protocol, body=body, array=fields.messages, field="messages", known=known
    )
    given = items.some(_MESSAGE)
    found = items.read(_messages(given))
    system = KeyedMessages.of(_system(fields.system))
    return replace(
        _NAMES.request(raw, system + found, tools=tools, form=_form(fields)),
        items=items.place(found, added=len(given)),
        model=fields.model or DEFAULT_MODEL,
        max_tokens=fields.max_tokens,
        stop=tuple(fields.stop_sequences or ()),
        is_stream=bool(fields.stream),
    )


def _system(content: Raw) -> Iterator[RequestMessage]:
    """The system prompt as the first message; its blocks are lines of their own."""
    lines = [line for line in _system_lines(content) if line and not line.startswith(_BILLING)]
    if lines:
        yield RequestMessage(role="system", parts=(Text("\n".join(lines)),))


def _system_lines(content: Raw) -> list[str]:
    if is_array(content):
        blocks = items_in(content, _BLOCK, where="system", again=_KINDS.read_again)
        return [block.text or "" for _, block in blocks]
    return [decoded_at(content, _TEXT, where="system") or ""]


def _messages(given: Iterable[tuple[str, GivenMessage]]) -> Iterator[RequestMessage]:
    for where, message in given:
        if is_array(message.content):
            place = f"{where}.content"
            blocks = items_in(message.content, _BLOCK, where=place, again=_KINDS.read_again)
            yield from _of_blocks(message.role, list(blocks))
        else:
            text = decoded_at(message.content, _TEXT, where=f"{where}.content")
            yield RequestMessage(role=message.role, parts=(Text(text or ""),))


def _of_blocks(
    role: Role, blocks: list[tuple[str, ContentBlock | Told]]
) -> Iterator[RequestMessage]:
    """The messages in one message's blocks: each tool's result is a message of its own."""
    parts: list[Part] = []
    has_result = False
    answered = next(filter(None, (_answered_by(block) for _, block in blocks)), "")
    for where, block in blocks:
        part = _part(block, role=role, where=where)
        if isinstance(part, ToolResult):
            has_result = True
            if parts:
                yield RequestMessage(role=role, parts=tuple(parts))
                parts = []
            yield RequestMessage(role="tool", parts=(part,))
        elif part is not None:
            parts.append(part)
    if parts or not has_result:
        yield RequestMessage(role=role, parts=tuple(parts), answered_id=answered)


def _answered_by(block: ContentBlock | Told) -> str:
    """The request that a reply answered, if this is its signed reasoning; else ""."""
    if isinstance(block, Told) or not block.signature:
        return ""
    return signed_request(block.signature)


def _part(block: ContentBlock | Told, *, role: Role, where: str) -> Part | None:
    """The block as a part; None for one that the model has no use for."""
    if isinstance(block, Told):
        # What the model did not say is no part of its reply, which is known by its text.
        return None if role == "assistant" and not block.is_plain else Text(block.line)
    text = block.text or ""
    match block.type:
        case "text":
            return None if text.startswith(_BILLING) else Text(text)
        case "thinking":
            return Thinking(block.thinking or "")
        case "tool_use":
            given = _NO_INPUT if block.input == NULL else block.input
            return Call(block.id or "", block.name or "", bytes(given).decode())
        case "tool_result":
            return ToolResult(block.tool_use_id or "", _result_text(block.content, where=where))
        case "document":
            return Text(_document_text(block, role=role, where=where))
        case "image":
            return Text(unread(block.type, role=role, where=where))
    return Text(text) if text else None


def _result_text(raw: Raw, *, where: str) -> str:
    where = f"{where}.content"
    if not is_array(raw):
        return decoded_at(raw, _TEXT, where=where) or ""
    blocks = items_in(raw, _BLOCK, where=where, again=_KINDS.read_again)
    parts = [_part(block, role="tool", where=place) for place, block in blocks]
    return "".join(part.text for part in parts if isinstance(part, Text))


def _document_text(block: ContentBlock, *, role: Role, where: str) -> str:
    """The document's text, below its title if it has one.

    Raises:
        RefusedError: 400: it is no text, and in no tool's result.
    """
    source = decoded_at(block.source, _SOURCE, where=f"{where}.source")
    match source.type:
        case "text":
            text = source.data or ""
        case "content":
            text = text_in(source.content, where=f"{where}.source.content")
        case _:
            text = unread(f"document from {source.type}", role=role, where=where)
    title = text_of_json(block.title, where=f"{where}.title")
    return f"{title}\n{text}\n" if title else text


def _form(fields: MessagesFields) -> FormFields:
    """The demanded form of the reply in the fields that all protocols share.

    Raises:
        RefusedError: 400: a kind of format that is not known.
    """
    choice = fields.tool_choice or ToolChoice()
    kind = choice.type or "auto"
    config = fields.output_config or OutputConfig()
    wanted = config.format or fields.output_format
    schema = None
    if wanted is not None and wanted.type != "text":
        if wanted.type != "json_schema":
            raise invalid(
                f"the format must be json_schema, got {wanted.type!r}", param="output_config"
            )
        schema = wanted.schema or {}
    named = {"type": "function", "function": {"name": choice.name}}
    return FormFields(
        tool_choice=named if kind == "tool" else kind,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        json_schema=schema,
    )


def _tools(raw: Raw) -> tuple[dict[str, Any], ...]:
    """Tools with a schema in chat form; the provider's own kinds are accepted and left out.

    Raises:
        RefusedError: 400: an integer of over 64 bits, nested too deep, or a tool without a name or
            schema.
    """
    offered = tools_in(raw)
    for index, tool in enumerate(offered):
        if tool.get("type") in _OWN_TOOLS and not isinstance(tool.get("input_schema"), dict):
            raise invalid(
                "a tool must have its parameters in the field input_schema",
                param=f"tools[{index}].input_schema",
            )
    return tuple(
        _chat_tool(tool, index=index)
        for index, tool in enumerate(offered)
        if isinstance(tool.get("input_schema"), dict)
    )


def _chat_tool(tool: dict[str, Any], *, index: int) -> dict[str, Any]:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise invalid("a tool must have a name", param=f"tools[{index}].name")
    function = {"name": name, "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}
