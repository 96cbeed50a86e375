"""OpenAI chat completions: the request as far as we read it, checked field by field.

Fields we do not know are accepted: they count in the body's digest and change nothing else.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from forgemq_gateway.core.digests import body_digest, digest_of, message_digest
from forgemq_gateway.core.errors import field_of, invalid

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentBlock(Struct, omit_defaults=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(Struct, omit_defaults=True):
    """Name and arguments of a tool call; some clients send the arguments as an object."""

    name: str
    arguments: str | dict[str, Any] | None = "{}"


class CalledTool(Struct, omit_defaults=True):
    """One tool call of an echoed assistant turn."""

    function: CalledFunction
    id: str = ""
    type: str = "function"


class ChatMessage(Struct, omit_defaults=True):
    """One message; what a client adds beyond these fields is dropped."""

    role: Role
    content: str | list[ContentBlock] | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
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

    type: str = "function"
    function: ToolFunction | None = None


class ChatFields(Struct):
    """The fields of the body that we read."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    n: int | None = 1
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class ChatRequest(Struct, frozen=True, kw_only=True):
    """One checked request.

    Attributes:
        digests: Match key of each message by its content.
        call_ids: Id of each message's first tool call, '' where it has none.
        tools: As the client sent them.
        asked: What the client said about sampling, JSON.
    """

    model: str
    messages: list[ChatMessage]
    digests: tuple[str, ...]
    call_ids: tuple[str, ...]
    tools: tuple[dict[str, Any], ...]
    tools_json: bytes
    tools_digest: str
    body_digest: str
    asked: bytes
    max_tokens: int | None
    stop: tuple[str, ...]
    is_stream: bool
    includes_usage: bool
    wants_logprobs: bool


# The name of the one model there is; clients may ask for any other and get this one.
DEFAULT_MODEL = "policy"

# What a client may say about sampling; recorded as asked, beside what was used.
_SAMPLING_FIELDS = (
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
    "response_format",
    "tool_choice",
    "parallel_tool_calls",
)
_DELIVERY_FIELDS = frozenset({"messages", "stream", "stream_options"})

_MEDIA_BLOCKS = frozenset({"image_url", "input_audio", "image", "file", "video_url"})

_FIELDS = msgspec.json.Decoder(ChatFields)
_RAW = msgspec.json.Decoder(dict[str, Raw])


def read_chat_request(body: bytes) -> ChatRequest:
    """The request in this body.

    Raises:
        RefusedError: 400, naming the field.
    """
    try:
        body.decode()  # JSON is UTF-8, also in the parts that are decoded later or only kept.
        raw = _RAW.decode(body)
        fields = _FIELDS.decode(body)
        asked = msgspec.json.encode({n: raw[n] for n in _SAMPLING_FIELDS if n in raw})
    except msgspec.ValidationError as error:
        raise invalid(str(error), param=field_of(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}", param=None) from error
    _check(fields)
    tools = _tools(raw["tools"]) if fields.tools else ()
    tools_json = msgspec.json.encode(tools) if tools else b""
    digests = tuple(match_key(message) for message in fields.messages)
    rest = {name: bytes(value) for name, value in raw.items() if name not in _DELIVERY_FIELDS}
    return ChatRequest(
        model=fields.model or DEFAULT_MODEL,
        messages=fields.messages,
        digests=digests,
        call_ids=tuple(m.tool_calls[0].id if m.tool_calls else "" for m in fields.messages),
        tools=tools,
        tools_json=tools_json,
        tools_digest=digest_of(tools_json) if tools else "",
        body_digest=body_digest("chat_completions", digests, rest),
        asked=asked,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        is_stream=bool(fields.stream),
        includes_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        wants_logprobs=bool(fields.logprobs),
    )


def match_key(message: ChatMessage) -> str:
    """Digest by which this message is found again in a later history."""
    return message_digest(
        message.role,
        text_of(message),
        tool_calls=[
            (call.id, call.function.name, _arguments(call.function))
            for call in message.tool_calls or ()
        ],
        tool_call_id=message.tool_call_id or "",
    )


def text_of(message: ChatMessage) -> str:
    """The message's text: blocks joined, null as the empty text."""
    if isinstance(message.content, list):
        return "".join(block.text or "" for block in message.content)
    return message.content or ""


def _arguments(function: CalledFunction) -> str:
    if isinstance(function.arguments, dict):
        return msgspec.json.encode(function.arguments).decode()
    return function.arguments or "{}"


def rendering_message(message: ChatMessage) -> dict[str, Any]:
    """The message as the rendering library takes it."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    for call in plain.get("tool_calls") or ():
        function = call["function"]
        if not isinstance(function.get("arguments", ""), str):
            function["arguments"] = msgspec.json.encode(function["arguments"]).decode()
        function.setdefault("arguments", "{}")
    return plain


def _check(fields: ChatFields) -> None:
    if fields.n is not None and fields.n != 1:
        raise invalid(
            f"n must be 1, got {fields.n}: send the request again for another sample", param="n"
        )
    if fields.top_logprobs:
        raise invalid(
            "top_logprobs is not available, only the sampled token's", param="top_logprobs"
        )
    for place, message in enumerate(fields.messages):
        if message.role == "tool" and not message.tool_call_id:
            raise invalid(
                "a tool message needs tool_call_id", param=f"messages[{place}].tool_call_id"
            )
        if isinstance(message.content, list):
            _check_blocks(message.content, place=place)


def _check_blocks(blocks: list[ContentBlock], *, place: int) -> None:
    for part, block in enumerate(blocks):
        if block.type in _MEDIA_BLOCKS:
            raise invalid(
                f"content of type {block.type} is not supported: the model reads text",
                param=f"messages[{place}].content[{part}].type",
            )


def _tools(raw: Raw) -> tuple[dict[str, Any], ...]:
    """Function tools as sent; other kinds (web search, namespaces) are accepted and left out.

    Raises:
        RefusedError: 400: an integer of over 64 bits, or nested too deep.
    """
    try:
        offered = msgspec.json.decode(raw, type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise invalid(f"tools: {error}", param=f"tools{field_of(error) or ''}") from error
    except RecursionError as error:
        raise invalid(f"tools are nested too deep: {error}", param="tools") from error
    return tuple(tool for tool in offered if isinstance(tool.get("function"), dict))
