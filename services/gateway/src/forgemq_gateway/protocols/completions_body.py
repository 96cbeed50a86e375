"""Reads the body of a completion: prompts that no chat template gives a form."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw
from msgspec.structs import replace

from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.completions import TOP_TOKENS_MAX
from forgemq_gateway.core.errors import field_of, invalid
from forgemq_gateway.core.raw_prompts import Prompt, TextPrompt, TokenPrompt
from forgemq_gateway.core.requests import DEFAULT_MODEL, FORM_BYTES_MAX, KeyedMessages, Request
from forgemq_gateway.protocols.chat_body import StreamOptions
from forgemq_gateway.protocols.field_names import FieldNames
from forgemq_gateway.protocols.json_body import NULL, decoded, named_fields
from forgemq_gateway.protocols.reply_form import FORM_FIELDS, FormFields

# What OpenAI, SGLang and vLLM take if a client says nothing.
_MAX_TOKENS = 16

# More than any setting of choices: a list is refused by its length, not after work on each of it.
_PROMPTS_MAX = 10_000

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class CompletionFields(FormFields, kw_only=True):
    """The fields of the body that we read."""

    prompt: Raw = NULL
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    echo: bool | None = False
    best_of: int | None = None
    logit_bias: dict[str, float] | None = None
    n: Annotated[int, Meta(ge=1)] | None = 1
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: str | list[str] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=TOP_TOKENS_MAX)] | None = None
    return_token_ids: bool | None = False


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "frequency_penalty",
    "presence_penalty",
)
_NAMES = FieldNames(
    protocol="completions",
    asked=(*_SAMPLING, "max_tokens", "stop", *FORM_FIELDS),
    unused=(*_SAMPLING, "min_p", "repetition_penalty"),
    digested=frozenset({"stream", "stream_options"}),
)
_FORM_LIMITS = dict.fromkeys(FORM_FIELDS, FORM_BYTES_MAX)

_FIELDS = msgspec.json.Decoder(CompletionFields)
_NAMED = named_fields(CompletionFields, (*_NAMES.asked, *_NAMES.unused))
_PROMPT = msgspec.json.Decoder(str | Annotated[list[Raw], Meta(min_length=1, max_length=2**31 - 1)])
_ONE = msgspec.json.Decoder(str | list[TokenId])
_IDS = msgspec.json.Decoder(list[TokenId])


def request_of(body: bytes) -> Request:
    """The request in this body.

    Raises:
        RefusedError: 400, naming the field.
    """
    raw, fields = decoded(body, _FIELDS, named=_NAMED, limits=_FORM_LIMITS)
    _check(fields)
    return replace(
        _NAMES.request(raw, KeyedMessages(), tools=(), form=fields),
        prompts=_prompts(fields.prompt),
        model=fields.model or DEFAULT_MODEL,
        n=fields.n or 1,
        max_tokens=fields.max_tokens or _MAX_TOKENS,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        is_stream=bool(fields.stream),
        includes_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        wants_logprobs=fields.logprobs is not None,
        top_tokens=fields.logprobs or 0,
        returns_ids=bool(fields.return_token_ids),
    )


def _check(fields: CompletionFields) -> None:
    """Refuse what would change the form of the reply and is not done."""
    if fields.suffix:
        raise invalid(
            "suffix is not available: the model writes from left to right", param="suffix"
        )
    if fields.echo:
        raise invalid("echo is not available: put the prompt before the text", param="echo")
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise invalid("best_of must be n: every completion is an answer", param="best_of")
    if fields.logit_bias:
        raise invalid("logit_bias is not available: it would change the policy", param="logit_bias")


def _prompts(raw: Raw) -> tuple[Prompt, ...]:
    """One prompt, or each of a list.

    Raises:
        RefusedError: 400: neither a text nor token ids nor a list of those.
    """
    try:
        if _is_ids(bytes(raw)):
            return (_tokens(_IDS.decode(raw)),)
        given = _PROMPT.decode(raw)
        if isinstance(given, str):
            return (TextPrompt(given),)
        if len(given) > _PROMPTS_MAX:
            raise invalid(f"prompt must be at most {_PROMPTS_MAX} prompts", param="prompt")
        return tuple(_one(_ONE.decode(each)) for each in given)
    except (msgspec.DecodeError, RecursionError) as error:
        where = field_of(error) or ""
        raise invalid(f"prompt: {error}", param=f"prompt{where}") from error


def _is_ids(data: bytes) -> bool:
    """Whether this is a list that begins with a number: one prompt, and not several."""
    head = data[:64].lstrip()
    return head[:1] == b"[" and head[1:].lstrip()[:1].isdigit()


def _one(given: Any) -> Prompt:  # noqa: ANN401 - what `_ONE` decodes
    return TextPrompt(given) if isinstance(given, str) else _tokens(given)


def _tokens(ids: list[int]) -> TokenPrompt:
    return TokenPrompt(pack_ids(ids))
