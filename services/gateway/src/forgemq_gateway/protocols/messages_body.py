"""Reads the body of Anthropic's messages, field by field.

Unknown fields and betas are accepted: they count in the body's digest and change nothing else.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from forgemq_gateway.core.errors import invalid
from forgemq_gateway.core.requests import (
    DEFAULT_MODEL,
    FORM_BYTES_MAX,
    MESSAGES_MAX,
    Call,
    Part,
    Request,
    RequestMessage,
    Role,
    Text,
    Thinking,
    ToolResult,
)
from forgemq_gateway.protocols.field_names import FieldNames
from forgemq_gateway.protocols.json_body import NULL, decoded, tools_in
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


Content = str | Annotated[list[ContentBlock], Meta(max_length=MESSAGES_MAX)]


class GivenMessage(Struct):
    """One message; a `system` one may stand anywhere."""

    role: Role
    content: Content


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

    messages: Annotated[list[GivenMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    model: str | None = None
    system: Content | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: int | None = None
    tools: list[Any] | None = None
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
_RESULT = msgspec.json.Decoder(Content | None)
_SOURCE = msgspec.json.Decoder(TextSource)


def request_of(body: bytes) -> Request:
    """The request in this body.

    Raises:
        RefusedError: 400, naming the field.
    """
    raw, fields = decoded(body, _FIELDS, limits=_FORM_LIMITS)
    tools = _tools(raw["tools"]) if fields.tools else ()
    messages = (*_system(fields.system), *_messages(fields.messages))
    return replace(
        _NAMES.request(raw, messages, tools=tools, form=_form(fields)),
        model=fields.model or DEFAULT_MODEL,
        max_tokens=fields.max_tokens,
        stop=tuple(fields.stop_sequences or ()),
        is_stream=bool(fields.stream),
    )


def _system(content: Content | None) -> Iterator[RequestMessage]:
    """The system prompt as the first message; its blocks are lines of their own."""
    blocks = [content] if isinstance(content, str) else [block.text for block in content or ()]
    texts = [text for text in blocks if text and not text.startswith(_BILLING)]
    if texts:
        yield RequestMessage(role="system", parts=(Text("\n".join(texts)),))


def _messages(messages: list[GivenMessage]) -> Iterator[RequestMessage]:
    for index, message in enumerate(messages):
        if isinstance(message.content, str):
            yield RequestMessage(role=message.role, parts=(Text(message.content),))
        else:
            yield from _of_blocks(message.role, message.content, where=f"messages[{index}]")


def _of_blocks(role: Role, blocks: list[ContentBlock], *, where: str) -> Iterator[RequestMessage]:
    """The messages in one message's blocks: each tool's result is a message of its own."""
    parts: list[Part] = []
    has_result = False
    answered = next(filter(None, (signed_request(block.signature) for block in blocks)), "")
    for number, block in enumerate(blocks):
        part = _part(block, where=f"{where}.content[{number}]")
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
    try:
        content = _RESULT.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"content: {error}", param=f"{where}.content") from error
    if isinstance(content, str) or content is None:
        return content or ""
    parts = [
        _part(block, where=f"{where}.content[{number}]") for number, block in enumerate(content)
    ]
    return "".join(part.text for part in parts if isinstance(part, Text))


def _document_text(raw: Raw, *, where: str) -> str:
    try:
        source = _SOURCE.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"source: {error}", param=f"{where}.source") from error
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
