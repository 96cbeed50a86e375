"""Which form the client demands of a reply: OpenAI's fields, and those of SGLang and vLLM."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from forgemq_gateway.core.errors import invalid
from forgemq_gateway.core.json_schemas import unenforced
from forgemq_gateway.core.requests import ReplyForm
from forgemq_gateway.protocols.tool_choices import ANY_CALLS, chosen
from forgemq_rendering.reply_grammar import Format, choice_format, json_format

Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(min_length=1)]
Schema = dict[str, Any]


class NamedSchema(Struct):
    """The schema of `response_format`; `strict`: refuse what cannot be enforced."""

    schema: Schema | None = None
    strict: bool | None = False


class ResponseFormat(Struct):
    """The form of the reply's text."""

    type: str | None = "text"
    json_schema: NamedSchema | None = None


class StructuredOutputs(Struct):
    """As vLLM calls it."""

    json: Schema | str | None = None
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None


class FormFields(Struct, kw_only=True):
    """The fields of a body that decide the form of the reply."""

    response_format: ResponseFormat | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = None
    json_schema: Schema | str | None = None
    regex: Text | None = None
    ebnf: Text | None = None


FORM_FIELDS: tuple[str, ...] = FormFields.__struct_fields__


class Demand(Struct, frozen=True, kw_only=True):
    """What a client demands of a reply.

    Attributes:
        form: None: the reply may be anything.
        is_one_call: It may have one call at most.
        is_choice_unused: `tool_choice` asks for what is not done.
    """

    form: ReplyForm | None
    is_one_call: bool
    is_choice_unused: bool


def demand_of(fields: FormFields, tools: Sequence[Mapping[str, Any]]) -> Demand:
    """What is demanded of the reply.

    A call that must be there comes instead of an answer; one that may be there, as its alternative.

    Raises:
        RefusedError: 400, naming the field: it cannot be met.
    """
    functions = tuple(dict.fromkeys(tool["function"]["name"] for tool in tools))
    answers = [answer for answer in _answers(fields) if answer[1] is not None]
    if len(answers) > 1:
        raise invalid(f"{answers[0][0]} is there already", param=answers[1][0])
    choice = ANY_CALLS if fields.tool_choice is None else chosen(fields.tool_choice, functions)
    form = None
    if choice.required:
        form = ReplyForm(functions=choice.required, param="tool_choice")
    elif answers:
        param, answer = answers[0]
        offered = functions if choice.offered is None else choice.offered
        form = ReplyForm(answer=answer, functions=offered, param=param)
    return Demand(
        form=form,
        is_one_call=fields.parallel_tool_calls is False or choice.is_one,
        is_choice_unused=choice.is_unused or (form is None and bool(choice.offered)),
    )


def _answers(fields: FormFields) -> list[tuple[str, Format | None]]:
    """Each field that may demand an answer of a form, and the format if it does."""
    if not _may_demand(fields):
        return []
    outputs = fields.structured_outputs or StructuredOutputs()
    whole = "structured_outputs"
    return [
        ("response_format", _response_format(fields.response_format)),
        *((name, _json(name, value)) for name, value in _schemas(fields, outputs.json)),
        *((name, _regex(value)) for name, value in _regexes(fields, outputs.regex)),
        ("guided_choice", _choice(fields.guided_choice)),
        (f"{whole}.choice", _choice(outputs.choice)),
        ("guided_grammar", _grammar(fields.guided_grammar)),
        (f"{whole}.grammar", _grammar(outputs.grammar)),
        ("ebnf", _grammar(fields.ebnf)),
    ]


def _may_demand(fields: FormFields) -> bool:
    """Whether any of the fields is there; nearly all requests have none."""
    return not (
        fields.response_format is None
        and fields.structured_outputs is None
        and fields.guided_json is None
        and fields.json_schema is None
        and fields.guided_regex is None
        and fields.regex is None
        and fields.guided_choice is None
        and fields.guided_grammar is None
        and fields.ebnf is None
    )


def _schemas(
    fields: FormFields, of_outputs: Schema | str | None
) -> list[tuple[str, Schema | str | None]]:
    return [
        ("guided_json", fields.guided_json),
        ("json_schema", fields.json_schema),
        ("structured_outputs.json", of_outputs),
    ]


def _regexes(fields: FormFields, of_outputs: str | None) -> list[tuple[str, str | None]]:
    return [
        ("guided_regex", fields.guided_regex),
        ("regex", fields.regex),
        ("structured_outputs.regex", of_outputs),
    ]


def _response_format(wanted: ResponseFormat | None) -> Format | None:
    match wanted:
        case None | ResponseFormat("text" | None):
            return None
        case ResponseFormat("json_object"):
            return json_format({"type": "object"})
        case ResponseFormat("json_schema", NamedSchema(wanted_schema, strict)):
            schema = wanted_schema or {}
            ignored = unenforced(schema) if strict else None
            if ignored is not None:
                raise invalid(
                    f"the schema has {ignored}, which is not enforced: leave it out, or send "
                    "strict false",
                    param="response_format",
                )
            return json_format(schema)
    raise invalid(
        "response_format must be of type 'text', 'json_object' or 'json_schema' (with the schema), "
        f"got {wanted.type!r}",
        param="response_format",
    )


def _json(param: str, schema: Schema | str | None) -> Format | None:
    if not isinstance(schema, str):
        return None if schema is None else json_format(schema)
    try:
        return json_format(msgspec.json.decode(schema, type=Schema))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"{param} must be a JSON Schema: {error}", param=param) from error


def _regex(pattern: str | None) -> Format | None:
    return None if pattern is None else {"type": "regex", "pattern": pattern}


def _choice(texts: Sequence[str] | None) -> Format | None:
    return None if texts is None else choice_format(texts)


def _grammar(text: str | None) -> Format | None:
    return None if text is None else {"type": "grammar", "grammar": text}
