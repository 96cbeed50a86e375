"""Reads the body of Anthropic's messages, field by field.

Unknown fields and betas are accepted: they count in the body's digest and change nothing else.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

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
    tools_in,
)
from forgemq_gateway.protocols.message_items import MessageItems
from forgemq_gateway.protocols.reply_form import (
    FormFields,
    Schema,
)
from forgemq_gateway.protocols.signature import signed_request


# As in `chat_body.py`: no collection of cycles while many are made.
class ContentBlock(Struct, gc=False):
    """One block of a message's content; each type has some of these fields."""

    type: str
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: Raw = Raw(b"{}")
    tool_use_id: str = ""
    content: Raw = NULL
    source: Raw = NULL


class GivenMessage(Struct, gc=False):
    """One message; a `system` one may stand anywhere."""

    role: Role
    content: Raw


class ToolChoice(Struct):
    """Which tools the model may call."""

    type: str = "auto"
    name: str = ""
    disable_parallel_tool_use: bool | None = False


class OutputFormat(Struct):
    """The form of the reply's text."""

    type: str
    schema: Schema = {}


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
    """The source of a document that is text."""

    type: str
    data: str = ""


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

_FIELDS = msgspec.json.Decoder(MessagesFields)
_MESSAGE = msgspec.json.Decoder(GivenMessage)
_TEXT = msgspec.json.Decoder(str)
_OPTIONAL_TEXT = msgspec.json.Decoder(str | None)
_BLOCK = msgspec.json.Decoder(ContentBlock)
_SOURCE = msgspec.json.Decoder(TextSource)


def request_of(body: bytes, known: ReadItems | None = None) -> Request:
    """The request in this body; `known` is what KNOWN_ITEM in it stands for.

    Raises:
        RefusedError: 400, naming the field.
    """
    raw, fields = decoded(body, _FIELDS, limits=_FORM_LIMITS)
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
        return [block.text for _, block in items_in(content, _BLOCK, where="system")]
    return [decoded_at(content, _OPTIONAL_TEXT, where="system") or ""]


def _messages(given: Iterable[tuple[str, GivenMessage]]) -> Iterator[RequestMessage]:
    for where, message in given:
        if is_array(message.content):
            blocks = items_in(message.content, _BLOCK, where=f"{where}.content")
            yield from _of_blocks(message.role, list(blocks))
        else:
            text = decoded_at(message.content, _TEXT, where=f"{where}.content")
            yield RequestMessage(role=message.role, parts=(Text(text),))


def _of_blocks(role: Role, blocks: list[tuple[str, ContentBlock]]) -> Iterator[RequestMessage]:
    """The messages in one message's blocks: each tool's result is a message of its own."""
    parts: list[Part] = []
    has_result = False
    answered = next(filter(None, (signed_request(block.signature) for _, block in blocks)), "")
    for where, block in blocks:
        part = _part(block, where=where)
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


def _part(block: ContentBlock, *, where: str) -> Part | None:
    """The block as a part; None for one that the model has no use for."""
    match block.type:
        case "text":
            return None if block.text.startswith(_BILLING) else Text(block.text)
        case "thinking":
            return Thinking(block.thinking)
        case "tool_use":
            return Call(block.id, block.name, bytes(block.input).decode())
        case "tool_result":
            return ToolResult(block.tool_use_id, _result_text(block.content, where=where))
        case "document":
            return Text(_document_text(block.source, where=where))
        case "image":
            raise _unread(block.type, where=where)
    return Text(block.text) if block.text else None


def _result_text(raw: Raw, *, where: str) -> str:
    where = f"{where}.content"
    if not is_array(raw):
        return decoded_at(raw, _OPTIONAL_TEXT, where=where) or ""
    parts = [_part(block, where=place) for place, block in items_in(raw, _BLOCK, where=where)]
    return "".join(part.text for part in parts if isinstance(part, Text))


def _document_text(raw: Raw, *, where: str) -> str:
    source = decoded_at(raw, _SOURCE, where=f"{where}.source")
    if source.type != "text":
        raise _unread(f"document from {source.type}", where=where)
    return source.data


def _unread(kind: str, *, where: str) -> Exception:
    return invalid(
        f"content of type {kind} is not supported: the model reads text", param=f"{where}.type"
    )


def _form(fields: MessagesFields) -> FormFields:
    """The demanded form of the reply in the fields that all protocols share.

    Raises:
        RefusedError: 400: a kind of choice or format that is not known.
    """
    choice = fields.tool_choice or ToolChoice()
    choices: dict[str, str | dict[str, Any]] = {
        "auto": "auto",
        "none": "none",
        "any": "required",
        "tool": {"type": "function", "function": {"name": choice.name}},
    }
    if choice.type not in choices:
        raise invalid(
            f"tool_choice must be auto, any, tool or none, got {choice.type!r}",
            param="tool_choice.type",
        )
    config = fields.output_config or OutputConfig()
    wanted = config.format or fields.output_format
    if wanted is not None and wanted.type != "json_schema":
        raise invalid(f"the format must be json_schema, got {wanted.type!r}", param="output_config")
    return FormFields(
        tool_choice=choices[choice.type],
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        json_schema=None if wanted is None else wanted.schema,
    )


def _tools(raw: Raw) -> tuple[dict[str, Any], ...]:
    """Tools with a schema in chat form; the provider's own kinds are accepted and left out.

    Raises:
        RefusedError: 400: an integer of over 64 bits, nested too deep, or a tool without a name.
    """
    offered = tools_in(raw)
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
