"""Grammars of whole replies: calls in the model's own format, or an answer of a given format.

A format is a part of XGrammar's structural tags. Markup is named by token id: its characters,
sampled one by one, would be text for the parser of calls.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from renderers import DefaultRenderer
from renderers.base import Renderer
from renderers.reasoning import prompt_ends_in_reasoning

from forgemq_rendering.tokenizer import FolderTokenizer

Format: TypeAlias = Mapping[str, Any]

# Hand-written renderers that write calls as JSON between `<tool_call>` and `</tool_call>`.
_JSON_CALL_RENDERERS = frozenset({"Qwen3Renderer", "Qwen3VLRenderer"})

# Blanks in a row inside JSON: enough to indent ten levels by two. Without a limit a weak model
# fills its whole turn with blanks, which every grammar of JSON allows.
_WHITESPACE_MAX = 20


class ReplyGrammar:
    """Makes the structural tag of a reply.

    Attributes:
        call_end_id: The token that ends a call; None if no grammar knows the model's calls.
    """

    def __init__(
        self, tokenizer: FolderTokenizer, *, renderer: Renderer, stop_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = tuple(stop_token_ids)
        self._think_ids = _pair(tokenizer, "<think>", "</think>")
        has_json_calls = (
            renderer.config.tool_parser == "qwen3"
            if isinstance(renderer, DefaultRenderer)
            else type(renderer).__name__ in _JSON_CALL_RENDERERS
        )
        pair = _pair(tokenizer, "<tool_call>", "</tool_call>") if has_json_calls else None
        self._call_ids = pair
        self.call_end_id = None if pair is None else pair[1]

    def structural_tag(
        self,
        *,
        answer: Format | None,
        tools: Sequence[Mapping[str, Any]],
        is_one_call: bool,
        context: Sequence[int],
    ) -> str:
        """JSON of the structural tag: reasoning if the model has any, then an answer or calls.

        Args:
            answer: Format of a text without calls; None: there must be a call.
            tools: Those that may be called.
            is_one_call: At most one call.
            context: Ids before the reply (a tail is enough): they may open the reasoning.

        Raises:
            ValueError: there are tools, and no grammar knows the model's calls.
        """
        forms = [] if answer is None else [answer]
        if tools:
            forms.append(self._calls(tools, is_one_call=is_one_call))
        whole = _sequence([*self._reasoning(context), _either(forms)])
        return msgspec.json.encode({"type": "structural_tag", "format": whole}).decode()

    def _calls(self, tools: Sequence[Mapping[str, Any]], *, is_one_call: bool) -> Format:
        if self._call_ids is None:
            raise ValueError("there is no grammar for the calls of this model")
        begin, end = self._call_ids
        call = _either([_json_call(tool["function"], begin, end) for tool in tools])
        if is_one_call:
            return call
        further = _sequence([_text("\n"), call])
        return _sequence([call, {"type": "star", "content": further}])

    def _reasoning(self, context: Sequence[int]) -> list[Format]:
        if self._think_ids is None:
            return []
        begin, end = self._think_ids
        excluded = [begin, end, *self._stop_token_ids]
        to_its_end = [
            {"type": "any_tokens", "exclude_tokens": excluded},
            _token(end),
            _text("\n\n"),
        ]
        stops = frozenset(self._stop_token_ids)
        if prompt_ends_in_reasoning(self._tokenizer, list(context), stop_ids=stops):
            return to_its_end
        return [{"type": "optional", "content": _sequence([_token(begin), *to_its_end])}]


def json_format(schema: Mapping[str, Any]) -> Format:
    """JSON that matches the schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _WHITESPACE_MAX}


def choice_format(texts: Sequence[str]) -> Format:
    """One of these texts."""
    return _either([_text(text) for text in texts])


def _json_call(function: Mapping[str, Any], begin: int, end: int) -> Format:
    name = msgspec.json.encode(function["name"]).decode()
    content = [
        _text(f'\n{{"name": {name}, "arguments": '),
        json_format(function.get("parameters") or {"type": "object"}),
        _text("}\n"),
    ]
    return {
        "type": "tag",
        "begin": _token(begin),
        "content": _sequence(content),
        "end": _token(end),
    }


def _pair(tokenizer: FolderTokenizer, begin: str, end: str) -> tuple[int, int] | None:
    ids = tokenizer.convert_tokens_to_ids([begin, end])
    unknown = (None, tokenizer.unk_token_id)
    return None if ids[0] in unknown or ids[1] in unknown else (ids[0], ids[1])


def _token(token_id: int) -> Format:
    return {"type": "token", "token": token_id}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(formats: Sequence[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "sequence", "elements": formats}


def _either(formats: Sequence[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}
