"""Which form the client demands of a reply: OpenAI's fields, and those of SGLang and vLLM."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from forgemq_gateway.core.errors import invalid
from forgemq_gateway.core.json_schemas import unenforced
from forgemq_gateway.core.requests import ReplyForm
from forgemq_rendering.reply_grammar import Format, choice_format, json_format

Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(min_length=1)]
Schema = dict[str, Any]


class NamedSchema(Struct):
    """The schema of `response_format`; `strict`: refuse what cannot be enforced."""

    schema: Schema = {}
    strict: bool | None = False


class ResponseFormat(Struct):
    """The form of the reply's text."""

    type: str = "text"
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


def is_one_call(fields: FormFields) -> bool:
    """Whether the reply may have one call at most."""
    return fields.parallel_tool_calls is False or isinstance(fields.tool_choice, dict)


def reply_form(fields: FormFields, tools: Sequence[Mapping[str, Any]]) -> ReplyForm | None:
    """The demanded form; None if the reply may be anything.

    A call that must be there comes instead of an answer; one that may be there, as its alternative.

    Raises:
        RefusedError: 400, naming the field: it is not known, or cannot be met.
    """
    functions = tuple(dict.fromkeys(tool["function"]["name"] for tool in tools))
    answers = [answer for answer in _answers(fields) if answer[1] is not None]
    if len(answers) > 1:
        raise invalid(f"{answers[0][0]} is there already", param=answers[1][0])
    required = _required(fields, functions)
    if required:
        return ReplyForm(functions=required, param="tool_choice")
    if not answers:
        return None
    param, answer = answers[0]
    offered = () if fields.tool_choice == "none" else functions
    return ReplyForm(answer=answer, functions=offered, param=param)


def _required(fields: FormFields, functions: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the functions one of which must be called; () if none must."""
    choice = fields.tool_choice
    if choice in (None, "none", "auto"):
        return ()
    name = _named(choice) if isinstance(choice, dict) else None
    if choice != "required" and name is None:
        raise invalid(
            "tool_choice must be 'none', 'auto', 'required' or a function "
            f'({{"type": "function", "function": {{"name": ...}}}}), got {choice!r}',
            param="tool_choice",
        )
    if not functions:
        raise invalid("tool_choice needs tools that are functions", param="tool_choice")
    if name is not None and name not in functions:
        raise invalid(f"tool_choice names {name!r}, which is not in tools", param="tool_choice")
    return functions if name is None else (name,)


def _named(choice: Mapping[str, Any]) -> str | None:
    function = choice.get("function")
    if choice.get("type") != "function" or not isinstance(function, Mapping):
        return None
    name = function.get("name")
    return name if isinstance(name, str) else None


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
        case None | ResponseFormat("text"):
            return None
        case ResponseFormat("json_object"):
            return json_format({"type": "object"})
        case ResponseFormat("json_schema", NamedSchema(schema, strict)):
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
