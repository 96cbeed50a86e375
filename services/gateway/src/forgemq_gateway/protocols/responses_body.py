"""Reads the body of an OpenAI response, field by field; `response_items.py` reads its input.

Unknown fields and kinds of tools are accepted: they count in the body's digest and change nothing
else.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from forgemq_contracts.completions import TOP_TOKENS_MAX
from forgemq_gateway.core.conversation import Conversation
from forgemq_gateway.core.errors import invalid, unknown
from forgemq_gateway.core.requests import (
    DEFAULT_MODEL,
    FORM_BYTES_MAX,
    KeyedMessages,
    ReadItems,
    Request,
    RequestMessage,
    Text,
)
from forgemq_gateway.protocols.field_names import FieldNames
from forgemq_gateway.protocols.json_body import (
    NULL,
    decoded,
    decoded_at,
    is_array,
    named_fields,
    tools_in,
)
from forgemq_gateway.protocols.message_items import MessageItems
from forgemq_gateway.protocols.reply_form import (
    FormFields,
    NamedSchema,
    ResponseFormat,
    Schema,
)
from forgemq_gateway.protocols.response_ids import response_answered
from forgemq_gateway.protocols.response_items import ITEM, KINDS, closes, messages_in


class ResponsesFields(Struct):
    """The fields of the body that we read."""

    input: Raw = NULL
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Raw = NULL
    prompt: Raw = NULL
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

    type: str | None = "text"
    schema: Schema | None = None
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

_FIELDS = msgspec.json.Decoder(ResponsesFields)
_NAMED = named_fields(ResponsesFields, (*_NAMES.asked, *_NAMES.unused))
_TEXT = msgspec.json.Decoder(str | None)


def request_of(body: bytes, conversation: Conversation, known: ReadItems | None = None) -> Request:
    """The request in this body; `known` is what KNOWN_ITEM in it stands for.

    Raises:
        RefusedError: 400, naming the field; 404, an id that it refers to is not known.
    """
    raw, fields = decoded(body, _FIELDS, named=_NAMED, limits={"text": FORM_BYTES_MAX})
    _check(fields)
    tools = _tools(fields.tools)
    wants_logprobs = _LOGPROBS in (fields.include or ())
    found, items = _input(fields, conversation, body=body, known=known)
    before = _before(fields, conversation)
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


def _check(fields: ResponsesFields) -> None:
    """Refuse what names messages that are kept elsewhere: the model would not read them."""
    if fields.conversation != NULL:
        raise invalid(
            "conversation is not available: send its items, or previous_response_id",
            param="conversation",
        )
    if fields.prompt != NULL:
        raise invalid(
            "prompt is not available: send what it says as instructions and input", param="prompt"
        )


def _input(
    fields: ResponsesFields, conversation: Conversation, *, body: bytes, known: ReadItems | None
) -> tuple[KeyedMessages, ReadItems | None]:
    """The messages in the input, and where its items are if a later body may go on from them."""
    if not is_array(fields.input):
        text = decoded_at(fields.input, _TEXT, where="input")
        if text is None:
            return KeyedMessages(), None
        return KeyedMessages.of([RequestMessage(role="user", parts=(Text(text),))]), None
    items = MessageItems(
        protocol=_NAMES.protocol, body=body, array=fields.input, field="input", known=known
    )
    given = list(items.added(ITEM, again=KINDS.read_again))
    found = items.read(messages_in(given, conversation))
    # The items that follow may belong to the reply that the last one is of.
    is_open = not given or not closes(given[-1][1])
    return found, None if is_open else items.place(found, added=len(given))


def _before(fields: ResponsesFields, known: Conversation) -> KeyedMessages:
    """Instructions, and the conversation that is continued.

    The instructions of the request that is continued are replaced by this request's, if it has any.
    """
    before = _continued(fields.previous_response_id, known)
    if fields.instructions:
        if before.messages and before.messages[0].role == "system":
            before = before.without_first()
        system = RequestMessage(role="system", parts=(Text(fields.instructions),))
        before = KeyedMessages.of([system]) + before
    return before


def _continued(response_id: str | None, known: Conversation) -> KeyedMessages:
    if response_id is None:
        return KeyedMessages()
    messages = known.messages_until(response_answered(response_id))
    if messages is None:
        raise unknown(
            f"previous_response_id: this episode keeps no response {response_id!r}; one with "
            "store=false is not kept"
        )
    return messages


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
