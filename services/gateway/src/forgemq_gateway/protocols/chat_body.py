"""Reads the body of a chat completion, field by field.

Unknown fields are accepted: they count in the body's digest and change nothing else. Of blocks of
an unknown kind the model reads what they say.
"""

from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from forgemq_contracts.completions import TOP_TOKENS_MAX
from forgemq_gateway.core.errors import RefusedError, invalid
from forgemq_gateway.core.requests import (
    DEFAULT_MODEL,
    FORM_BYTES_MAX,
    Call,
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
    raw_fields,
    raw_items,
    raw_struct,
    tools_in,
)
from forgemq_gateway.protocols.message_items import MessageItems
from forgemq_gateway.protocols.other_content import Kinds, Told, text_in, text_of_json, unread
from forgemq_gateway.protocols.reply_form import FORM_FIELDS, FormFields

# Structs of which one body may have very many have `gc=False`: they are in no cycle, and to make
# them must not start the collector of cycles, which holds the interpreter.


Media: TypeAlias = Literal["image_url", "input_audio", "image", "file", "video_url"]


class ContentBlock(Struct, gc=False):
    """One part of a message's content."""

    type: Literal["text", "refusal"] | Media | None = None
    text: str | None = None


class CalledFunction(Struct, gc=False):
    """Name and arguments of a tool call; some clients send the arguments as an object."""

    name: str
    arguments: Raw = Raw(b'"{}"')


class CalledCustom(Struct, gc=False):
    """Name and input of a call of a tool that takes any text."""

    name: str
    input: str | None = None


class CalledTool(Struct, gc=False):
    """One tool call of an echoed reply."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str | None = None


class ChatMessage(Struct, gc=False):
    """One message; what a client adds beyond these fields is dropped."""

    role: Role
    content: Raw = NULL
    tool_calls: Raw = NULL
    tool_call_id: str | None = None
    id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class StreamOptions(Struct):
    """How a stream ends."""

    include_usage: bool | None = False


class ToolFunction(Struct):
    """The part of a tool that must be there."""

    name: Annotated[str, Meta(min_length=1)]


class OfferedTool(Struct):
    """A tool as far as it is checked; it is rendered as the client sent it."""

    function: ToolFunction | None = None


class ChatFields(FormFields, kw_only=True):
    """The fields of the body that we read."""

    messages: Raw
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tools: Raw = NULL
    functions: list[Raw] | None = None
    logit_bias: dict[str, float] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    n: Annotated[int, Meta(ge=1)] | None = 1
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_TOKENS_MAX)] | None = None
    forgemq_reply: ChatMessage | None = None


_NAMES = FieldNames(
    protocol="chat_completions",
    asked=(
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "reasoning_effort",
        *FORM_FIELDS,
    ),
    unused=(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "reasoning_effort",
        "chat_template_kwargs",
    ),
    digested=frozenset({"messages", "stream", "stream_options"}),
)
_FORM_LIMITS = dict.fromkeys(FORM_FIELDS, FORM_BYTES_MAX)

_MEDIA_BLOCKS = frozenset(get_args(Media))

_FIELDS = msgspec.json.Decoder(ChatFields)
_NAMED = named_fields(ChatFields, (*_NAMES.asked, *_NAMES.unused))
_MESSAGE = msgspec.json.Decoder(ChatMessage)
_RAW_MESSAGE = msgspec.json.Decoder(raw_struct(ChatMessage.__struct_fields__))
_TEXT = msgspec.json.Decoder(str | None)
_BLOCK: msgspec.json.Decoder[ContentBlock | Told] = msgspec.json.Decoder(ContentBlock)
_CALL = msgspec.json.Decoder(CalledTool)
_OFFERED = msgspec.json.Decoder(OfferedTool)

_KINDS = Kinds(
    _BLOCK,
    {
        **dict.fromkeys(("text", "refusal", None), frozenset({"text"})),
        **dict.fromkeys(_MEDIA_BLOCKS, frozenset()),
    },
)


def request_of(body: bytes, known: ReadItems | None = None) -> Request:
    """The request in this body; `known` is what KNOWN_ITEM in it stands for.

    Raises:
        RefusedError: 400, naming the field.
    """
    raw, fields = decoded(body, _FIELDS, named=_NAMED, limits=_FORM_LIMITS)
    _check(fields)
    tools = _tools(fields.tools)
    items = MessageItems(
        protocol=_NAMES.protocol, body=body, array=fields.messages, field="messages", known=known
    )
    given = items.some(_MESSAGE, again=_message_again)
    found = items.read(_message(message, where=place) for place, message in given)
    return replace(
        _NAMES.request(raw, found, tools=tools, form=fields),
        items=items.place(found, added=len(given)),
        model=fields.model or DEFAULT_MODEL,
        n=fields.n or 1,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        is_stream=bool(fields.stream),
        includes_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        wants_logprobs=bool(fields.logprobs),
        top_tokens=fields.top_logprobs or 0,
        reply=_given_reply(fields),
    )


def _given_reply(fields: ChatFields) -> RequestMessage | None:
    """The reply that is read in place of a sampled one; None: the model samples.

    Raises:
        RefusedError: 400: it is no reply, or the request asks for more than one.
    """
    if fields.forgemq_reply is None:
        return None
    reply = _message(fields.forgemq_reply, where="forgemq_reply")
    if reply.role != "assistant" or not reply.parts:
        raise invalid(
            "forgemq_reply must be a message of the assistant with content or calls",
            param="forgemq_reply",
        )
    if (fields.n or 1) > 1:
        raise invalid("n must be 1 with forgemq_reply: it is the one reply", param="n")
    return reply


def _message_again(item: Raw, where: str, error: RefusedError) -> ChatMessage:
    """A message that is refused, read with its reasoning as text, and without a foreign id.

    Raises:
        RefusedError: 400, naming the field, which is another one.
    """
    if bytes(memoryview(item)[:1]) != b"{":
        raise error
    fields = raw_fields(decoded_at(item, _RAW_MESSAGE, where=where))
    thought = _reasoning(fields.get("reasoning_content", NULL), where=f"{where}.reasoning_content")
    fields["reasoning_content"] = Raw(msgspec.json.encode(thought or None))
    if text_of_json(fields.get("id", NULL), where=f"{where}.id") is None:
        fields["id"] = NULL  # Only what some clients call `tool_call_id` is read.
    return decoded_at(Raw(msgspec.json.encode(fields)), _MESSAGE, where=where)


def _reasoning(raw: Raw, *, where: str) -> str:
    """A text, or the texts of blocks, which are pieces of one."""
    pieces = raw_items(raw, where=where) if is_array(raw) else (raw,)
    return "".join(text_in(piece, where=where) for piece in pieces)


def _message(message: ChatMessage, *, where: str) -> RequestMessage:
    """The message with ordered parts; chat completions has reasoning, text and calls apart."""
    parts: list[Part] = []
    if message.reasoning_content is not None:
        parts.append(Thinking(message.reasoning_content))
    text = _text(message.content, where=f"{where}.content", role=message.role)
    answered = message.tool_call_id
    if message.role == "tool":
        answered = answered or message.id or ""  # Some clients call it `id`, or leave it out.
    if answered is not None:
        parts.append(ToolResult(answered, text))
    elif text:
        parts.append(Text(text))
    if message.tool_calls != NULL:
        calls = items_in(message.tool_calls, _CALL, where=f"{where}.tool_calls")
        parts += [_call(call, where=place) for place, call in calls]
    return RequestMessage(role=message.role, parts=tuple(parts), name=message.name)


def _call(call: CalledTool, *, where: str) -> Call:
    """One call of an echoed reply.

    Raises:
        RefusedError: 400: it names no function.
    """
    if call.function is not None:
        arguments = _arguments(call.function.arguments, where=f"{where}.function.arguments")
        return Call(call.id or "", call.function.name, arguments)
    if call.custom is None:
        raise invalid("a call must have a function", param=f"{where}.function")
    given = msgspec.json.encode({"input": call.custom.input or ""}).decode()
    return Call(call.id or "", call.custom.name, given)


def _text(content: Raw, *, where: str, role: Role) -> str:
    """The text of a message's content, that of its blocks joined.

    Raises:
        RefusedError: 400: a block that the model cannot read.
    """
    if not is_array(content):
        return decoded_at(content, _TEXT, where=where) or ""
    blocks = items_in(content, _BLOCK, where=where, again=_KINDS.read_again)
    return "".join(_block_text(block, where=place, role=role) for place, block in blocks)


def _block_text(block: ContentBlock | Told, *, where: str, role: Role) -> str:
    if isinstance(block, Told):
        # What the model did not say is no part of its reply, which is known by its text.
        return "" if role == "assistant" and not block.is_plain else block.line
    if block.type is not None and block.type in _MEDIA_BLOCKS:
        return unread(block.type, role=role, where=where)
    return block.text or ""


def _arguments(raw: Raw, *, where: str) -> str:
    """The arguments as JSON text; an object is not decoded, however large it is.

    Raises:
        RefusedError: 400: they are neither text nor an object.
    """
    data = bytes(raw)
    if data == b"null":
        return "{}"
    if data.startswith(b"{"):
        return data.decode()
    try:
        return msgspec.json.decode(data, type=str)
    except msgspec.MsgspecError as error:
        raise invalid(f"arguments must be JSON text or an object: {error}", param=where) from error


def _check(fields: ChatFields) -> None:
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs needs logprobs true", param="top_logprobs")
    _check_form(fields)


def _check_form(fields: ChatFields) -> None:
    """Refuse what would change the form of the reply and is not done."""
    if fields.functions:
        raise invalid(
            "functions is not available: send tools, which took its place", param="functions"
        )
    if fields.logit_bias:
        raise invalid("logit_bias is not available: it would change the policy", param="logit_bias")
    if fields.continue_final_message or fields.add_generation_prompt is False:
        name = (
            "continue_final_message" if fields.continue_final_message else "add_generation_prompt"
        )
        raise invalid(f"{name}: a reply is always a message of its own", param=name)


def _tools(raw: Raw) -> tuple[dict[str, Any], ...]:
    """Function tools as sent; other kinds (web search, namespaces) are accepted and left out.

    Raises:
        RefusedError: 400: a function without its fields or a name, an integer of over 64 bits, or
            nested too deep.
    """
    offered = tools_in(raw, _OFFERED)
    for index, tool in enumerate(offered):
        if tool.get("type") in (None, "function") and tool.get("function") is None:
            raise invalid(
                "a tool must have its name, description and parameters in the field function",
                param=f"tools[{index}].function",
            )
    return tuple(tool for tool in offered if isinstance(tool.get("function"), dict))
