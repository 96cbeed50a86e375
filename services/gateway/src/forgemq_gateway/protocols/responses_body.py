"""Reads the body of an OpenAI response, field by field.

Unknown fields, items and kinds of tools are accepted: they count in the body's digest and change
nothing else. A reply comes back as several items; together they are one message again.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from forgemq_contracts.completions import TOP_TOKENS_MAX
from forgemq_gateway.core.conversation import Conversation, reply_message
from forgemq_gateway.core.digests import parted_reasoning
from forgemq_gateway.core.errors import invalid, unknown
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
    NamedSchema,
    ResponseFormat,
    Schema,
)
from forgemq_gateway.protocols.response_ids import answered_by, response_answered
from forgemq_gateway.protocols.signature import signed_request


# As in `chat_body.py`: no collection of cycles while many are made.
class ItemPart(Struct, gc=False):
    """One part of an item's content or summary."""

    type: str
    text: str = ""
    refusal: str = ""


class Item(Struct, gc=False):
    """One item of the input; each type has some of these fields."""

    type: str = "message"
    role: Role = "user"
    content: Raw = NULL
    summary: Raw = NULL
    encrypted_content: str | None = None
    id: str | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    input: str = ""
    output: Raw = NULL


class ResponsesFields(Struct):
    """The fields of the body that we read."""

    input: Raw
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = False
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_TOKENS_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    tools: Raw = NULL
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: "TextFields | None" = None


class TextFields(Struct):
    """The form of the reply's text."""

    format: "TextFormat | None" = None


class TextFormat(Struct):
    """Which form it is."""

    type: str = "text"
    schema: Schema = {}
    strict: bool | None = False


_NAMES = FieldNames(
    protocol="responses",
    asked=(
        "temperature",
        "top_p",
        "max_output_tokens",
        "reasoning",
        "text",
        "tool_choice",
        "parallel_tool_calls",
        "store",
    ),
    unused=("temperature", "top_p", "reasoning"),
    digested=frozenset({"input", "instructions", "previous_response_id", "stream"}),
)

# What a client names in `include` to get log-probabilities.
_LOGPROBS = "message.output_text.logprobs"

_MEDIA = frozenset({"input_image", "input_file", "input_audio"})
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ASSISTANTS = frozenset({"reasoning", "function_call", "custom_tool_call", "item_reference"})

_FIELDS = msgspec.json.Decoder(ResponsesFields)
_ITEM = msgspec.json.Decoder(Item)
_TEXT = msgspec.json.Decoder(str)
_OPTIONAL_TEXT = msgspec.json.Decoder(str | None)
_PART = msgspec.json.Decoder(ItemPart)


def request_of(body: bytes, conversation: Conversation, known: ReadItems | None = None) -> Request:
    """The request in this body; `known` is what KNOWN_ITEM in it stands for.

    Raises:
        RefusedError: 400, naming the field; 404, an id that it refers to is not known.
    """
    raw, fields = decoded(body, _FIELDS, limits={"text": FORM_BYTES_MAX})
    tools = _tools(fields.tools)
    wants_logprobs = _LOGPROBS in (fields.include or ())
    found, items = _input(fields, conversation, body=body, known=known)
    before = KeyedMessages.of(_before(fields, conversation))
    if not (before.messages or found.messages):
        raise invalid("input must have at least one item", param="input")
    return replace(
        _NAMES.request(raw, before + found, tools=tools, form=_form(fields)),
        items=items,
        model=fields.model or DEFAULT_MODEL,
        max_tokens=fields.max_output_tokens,
        is_stream=bool(fields.stream),
        wants_logprobs=wants_logprobs,
        top_tokens=(fields.top_logprobs or 0) if wants_logprobs else 0,
    )


def _input(
    fields: ResponsesFields, conversation: Conversation, *, body: bytes, known: ReadItems | None
) -> tuple[KeyedMessages, ReadItems | None]:
    """The messages in the input, and where its items are if a later body may go on from them."""
    if not is_array(fields.input):
        text = decoded_at(fields.input, _TEXT, where="input")
        return KeyedMessages.of([RequestMessage(role="user", parts=(Text(text),))]), None
    items = MessageItems(
        protocol=_NAMES.protocol, body=body, array=fields.input, field="input", known=known
    )
    given = list(items.added(_ITEM))
    found = items.read(_of_items(given, conversation))
    # The items that follow may belong to the reply that the last one is of.
    is_open = not given or not _closes(given[-1][1])
    return found, None if is_open else items.place(found, added=len(given))


def _before(fields: ResponsesFields, known: Conversation) -> tuple[RequestMessage, ...]:
    """Instructions, and the conversation that is continued.

    The instructions of the request that is continued are replaced by this request's, if it has any.
    """
    before = _continued(fields.previous_response_id, known)
    if fields.instructions:
        if before and before[0].role == "system":
            before = before[1:]
        before = (RequestMessage(role="system", parts=(Text(fields.instructions),)), *before)
    return before


def _continued(response_id: str | None, known: Conversation) -> tuple[RequestMessage, ...]:
    if response_id is None:
        return ()
    messages = known.messages_until(response_answered(response_id))
    if messages is None:
        raise unknown(
            f"previous_response_id: this episode keeps no response {response_id!r}; one with "
            "store=false is not kept"
        )
    return messages


def _of_items(items: Iterable[tuple[str, Item]], known: Conversation) -> Iterator[RequestMessage]:
    """The messages in these items: those of one reply are one message."""
    reply = _OpenReply()
    for where, item in items:
        if item.type in _ASSISTANTS or (item.type == "message" and item.role == "assistant"):
            if reply.is_over_at(item):
                yield from reply.closed()
            reply.add(item, known, where=where)
            continue
        message = _other(item, where=where)
        if message is not None:
            yield from reply.closed()
            yield message
    yield from reply.closed()


class _OpenReply:
    """The items of one reply, as far as they have come."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._answered_id = ""
        self._is_whole = False

    def is_over_at(self, item: Item) -> bool:
        """Whether this item begins another reply: by its id, or because it comes too late."""
        answered = _answered_by(item)
        if answered and self._answered_id:
            return answered != self._answered_id
        rank = _RANKS.get(item.type, 0)
        if any(_rank_of(part) > rank for part in self._parts):
            return True
        # A text that is all reasoning is no answer yet: clients write a message for each of both.
        said = "".join(part.text for part in self._parts if isinstance(part, Text))
        return rank == 1 and bool(said) and bool(parted_reasoning(said)[1].strip())

    def add(self, item: Item, known: Conversation, *, where: str) -> None:
        """Add an item; a reference stands for the whole reply that it is of."""
        answered = _answered_by(item)
        if item.type == "item_reference":
            reply = known.reply_to(answered)
            if reply is None:
                raise unknown(f"{where}.id: this episode has no item {item.id!r}")
            self._parts = list(reply_message(reply, request_id=answered).parts)
            self._is_whole = True
        elif not self._is_whole:
            self._parts.append(_assistant_part(item, where=where))
        self._answered_id = self._answered_id or answered

    def closed(self) -> Iterator[RequestMessage]:
        """The reply as a message, if it has any part; then begin again."""
        if self._parts:
            yield RequestMessage(
                role="assistant", parts=tuple(self._parts), answered_id=self._answered_id
            )
        self._parts, self._answered_id, self._is_whole = [], "", False


# The order in which a reply has its parts.
_RANKS = {"reasoning": 0, "message": 1, "function_call": 2, "custom_tool_call": 2}


def _rank_of(part: Part) -> int:
    return 0 if isinstance(part, Thinking) else 1 if isinstance(part, Text) else 2


def _answered_by(item: Item) -> str:
    """The request that the item's reply answered; "" if the item does not say."""
    return answered_by(item.id or "") or signed_request(item.encrypted_content or "")


def _assistant_part(item: Item, *, where: str) -> Part:
    match item.type:
        case "reasoning":
            content = _text(item.content, where=f"{where}.content")
            return Thinking(content or _text(item.summary, where=f"{where}.summary"))
        case "function_call":
            return Call(item.call_id, item.name, item.arguments)
        case "custom_tool_call":
            given = msgspec.json.encode({"input": item.input}).decode()
            return Call(item.call_id, item.name, given)
    return Text(_text(item.content, where=f"{where}.content"))


def _closes(item: Item) -> bool:
    """Whether no later item belongs to a reply before this one."""
    return item.type in _RESULTS or (item.type == "message" and item.role != "assistant")


def _other(item: Item, *, where: str) -> RequestMessage | None:
    """A message that is not the model's; None for an item that it has no use for."""
    match item.type:
        case "message":
            text = _text(item.content, where=f"{where}.content")
            return RequestMessage(role=item.role, parts=(Text(text),))
        case result if result in _RESULTS:
            text = _text(item.output, where=f"{where}.output")
            return RequestMessage(role="tool", parts=(ToolResult(item.call_id, text),))
    return None


def _text(content: Raw, *, where: str) -> str:
    """A text, or that of an item's parts joined."""
    if not is_array(content):
        return decoded_at(content, _OPTIONAL_TEXT, where=where) or ""
    parts = items_in(content, _PART, where=where)
    return "".join(_part_text(part, where=place) for place, part in parts)


def _part_text(part: ItemPart, *, where: str) -> str:
    if part.type in _MEDIA:
        raise invalid(
            f"content of type {part.type} is not supported: the model reads text",
            param=f"{where}.type",
        )
    return part.text or part.refusal


def _form(fields: ResponsesFields) -> FormFields:
    """The demanded form of the reply in the fields that all protocols share."""
    choice = fields.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    form = fields.text.format if fields.text else None
    wanted = None
    if form is not None:
        schema = NamedSchema(form.schema, form.strict) if form.type == "json_schema" else None
        wanted = ResponseFormat(form.type, schema)
    return FormFields(
        tool_choice=choice,
        parallel_tool_calls=fields.parallel_tool_calls,
        response_format=wanted,
    )


def _tools(raw: Raw) -> tuple[dict[str, Any], ...]:
    """Function tools in chat form; other kinds (web search, namespaces) are left out.

    Raises:
        RefusedError: 400: an integer of over 64 bits, nested too deep, or a tool without a name.
    """
    return tuple(
        _chat_tool(tool, index=index)
        for index, tool in enumerate(tools_in(raw))
        if tool.get("type") == "function"
    )


def _chat_tool(tool: dict[str, Any], *, index: int) -> dict[str, Any]:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise invalid("a function must have a name", param=f"tools[{index}].name")
    function = {"name": name, "description": tool.get("description") or ""}
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": {**function, "parameters": parameters}}
