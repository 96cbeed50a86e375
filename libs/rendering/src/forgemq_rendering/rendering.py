"""`Rendering`: renders messages as token ids, extends a context, parses sampled ids."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from struct import iter_unpack
from typing import Any, TypeAlias

from jinja2 import TemplateError
from msgspec import Struct
from renderers import DefaultRenderer
from renderers.base import ParsedResponse, ParsedToolCall, Renderer
from renderers.reasoning import prompt_ends_in_reasoning

from forgemq_rendering.bridge import bridge
from forgemq_rendering.called import CONTENT_ERRORS, arguments_text
from forgemq_rendering.choice import HistoryPolicy, choose_renderer
from forgemq_rendering.continuations import continuations
from forgemq_rendering.extension import TemplateExtension
from forgemq_rendering.parsed import Parsed, ToolCall
from forgemq_rendering.plain_messages import plain_messages
from forgemq_rendering.reply_grammar import ReplyGrammar
from forgemq_rendering.tokenizer import FolderTokenizer, generation_stops

Message: TypeAlias = Mapping[str, Any]
Tool: TypeAlias = Mapping[str, Any]

# Renderers look back to the start of the open assistant message only. Passing them this many tokens
# is enough, and a long context is not copied for every request.
CONTEXT_TAIL_TOKENS = 8192

# What a template puts between a message and the assistant's: a few tokens, nearly always the same.
_OPENING_TOKENS_MAX = 32
_OPENINGS_MAX = 256

# An opaque template needs one more rendering for the end of each message: long lists get no ends.
_ENDS_MESSAGES_MAX = 16
_ENDS_TOKENS_MAX = 8192

_TOKEN_BYTES = 4  # int32


class Rendered(Struct, frozen=True, kw_only=True):
    """Tokens as int32 bytes, and their number after each message; `message_ends` may be ()."""

    tokens: bytes
    message_ends: tuple[int, ...] = ()

    @property
    def ids(self) -> list[int]:
        """The tokens as ids."""
        return [token_id for (token_id,) in iter_unpack("<i", self.tokens)]


class Rendering:
    """Messages and tokens of one model.

    Example: `rendering.render(messages)` gives the first context. After the engine sampled
    `output`, `rendering.extend(context, output, [tool_result])` gives the tokens that follow, so
    that context + output + extension is the next context and the sampled ids stay unchanged.
    """

    def __init__(
        self,
        tokenizer: FolderTokenizer,
        *,
        renderer: Renderer,
        stop_token_ids: tuple[int, ...],
        history: HistoryPolicy,
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._history = history
        self._is_opaque = isinstance(renderer, DefaultRenderer)
        # DefaultRenderer looks back to the newest of these.
        self._message_ends = frozenset(renderer.get_stop_token_ids())
        self._opens_reasoning = lru_cache(_OPENINGS_MAX)(self._begins_in_reasoning)
        self._extension = TemplateExtension(tokenizer, stop_token_ids=frozenset(stop_token_ids))
        self._reasoning_end = tokenizer.encode("</think>")
        self.stop_token_ids = stop_token_ids
        self.vocabulary_size = tokenizer.vocabulary_size
        self.name = type(renderer).__name__
        self.grammar = ReplyGrammar(tokenizer, renderer=renderer, stop_token_ids=stop_token_ids)
        known = self.grammar.call_end_id is not None
        self.continuations = continuations(
            tokenizer, has_known_calls=known, is_opaque=self._is_opaque
        )

    @classmethod
    def load(
        cls, model_path: str, *, renderer: str = "auto", history: HistoryPolicy = "append_only"
    ) -> "Rendering":
        """Load the rendering of the model in this folder.

        Args:
            model_path: Folder in Hugging Face format.
            renderer: Name in the `renderers` package, or `auto`.
            history: `template`: render sampled messages again, as the model's template does.

        Raises:
            FileNotFoundError: the folder has no fast tokenizer.
            ValueError: no such renderer, or the model names no end-of-turn token.
        """
        folder = Path(model_path)
        tokenizer = FolderTokenizer(folder)
        chosen = choose_renderer(tokenizer, folder=folder, name=renderer, history=history)
        stops = dict.fromkeys([*chosen.get_stop_token_ids(), *generation_stops(folder)])
        if not stops:
            raise ValueError(f"{folder}: no end-of-turn token in tokenizer_config.json")
        return cls(tokenizer, renderer=chosen, stop_token_ids=tuple(stops), history=history)

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Rendered:
        """Render all messages and the opening of the assistant's message.

        Raises:
            ValueError: these messages or tools cannot be rendered; says why.
        """
        try:
            return self._rendered(messages, tools)
        except (TemplateError, *CONTENT_ERRORS) as error:
            raise _unrenderable(error) from error

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        given, shown = self._shielded(plain_messages(messages)), self._shown(tools)
        with self._tokenizer.standing_in() as stand_ins:
            if self._is_opaque:
                ids = self._renderer.render_ids(given, tools=shown, add_generation_prompt=True)
                whole = stand_ins.expand(ids)
                ends = self._template_ends(given, shown, ids)
                return Rendered(
                    tokens=whole.tokens, message_ends=tuple(whole.position(end) for end in ends)
                )
            rendered = self._renderer.render(given, tools=shown, add_generation_prompt=True)
            whole = stand_ins.expand(rendered.token_ids)
        if len(given) != len(messages):
            return Rendered(tokens=whole.tokens)
        ends = _ends(rendered.message_indices, count=len(messages))
        return Rendered(
            tokens=whole.tokens, message_ends=tuple(whole.position(end) for end in ends)
        )

    def reply_tokens(
        self, messages: Sequence[Message], reply: Message, *, tools: Sequence[Tool] = ()
    ) -> bytes:
        """The tokens of this reply to the messages, as if they had been sampled; int32.

        They begin behind the opening of the assistant's message and end with the token that closes
        it, as the model's template has both.

        Raises:
            ValueError: these messages cannot be rendered, or the template opens or closes a reply
                in another way than it asks for one; says which.
        """
        try:
            prompt, whole = (
                self._rendered(messages, tools).tokens,
                self._closed([*messages, reply], tools),
            )
        except (TemplateError, *CONTENT_ERRORS) as error:
            raise _unrenderable(error) from error
        if not whole.startswith(prompt):
            raise ValueError("the model's template writes a reply behind another opening")
        for end, (token_id,) in enumerate(iter_unpack("<i", whole[len(prompt) :]), start=1):
            if token_id in self.stop_token_ids:
                return whole[len(prompt) :][: end * _TOKEN_BYTES]
        raise ValueError("the model's template closes a reply with no end-of-turn token")

    def _closed(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bytes:
        """Tokens of all messages, the last of which is the assistant's and closed."""
        given, shown = self._shielded(plain_messages(messages)), self._shown(tools)
        with self._tokenizer.standing_in() as stand_ins:
            return stand_ins.expand(self._renderer.render_ids(given, tools=shown)).tokens

    def _shielded(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages with their control tokens as text, but not those of reasoning."""
        return [self._shielded_message(message) for message in messages]

    def _shielded_message(self, message: Message) -> dict[str, Any]:
        shield = self._tokenizer.control_tokens.shield
        is_own = message["role"] == "assistant"
        shielded = {}
        for name, value in message.items():
            if name == "role":
                shielded[name] = value
            elif name == "content":
                shielded[name] = shield(value, keeps_reasoning=is_own)
            else:
                shielded[shield(name)] = shield(value)
        return shielded

    def _shown(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        shield = self._tokenizer.control_tokens.shield
        return [shield(tool) for tool in tools] or None

    def _template_ends(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        ids: list[int],
    ) -> tuple[int, ...]:
        if len(messages) > _ENDS_MESSAGES_MAX or len(ids) > _ENDS_TOKENS_MAX:
            return ()
        ends = []
        for count in range(1, len(messages) + 1):
            try:
                prefix = self._renderer.render_ids(messages[:count], tools=tools)
            except TemplateError:
                return ()
            if ids[: len(prefix)] != prefix:
                return ()
            ends.append(len(prefix))
        return tuple(ends)

    def extend(
        self,
        context: Sequence[int],
        output: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
    ) -> Rendered | None:
        """Render the tokens between context + output and the next assistant message.

        Args:
            context: Of the output; its last CONTEXT_TAIL_TOKENS ids are enough.
            output: Sampled ids, kept as they are.
            messages: The new messages, without an assistant's.
            tools: As in the render of the context.

        Returns:
            The new ids only, with message ends counted from the first of them. None if everything
            must be rendered again, because the history policy or the template rewrites messages.

        Raises:
            ValueError: these messages or tools cannot be rendered; says why.
        """
        try:
            return self._extended(context, output, messages, tools)
        except (TemplateError, *CONTENT_ERRORS) as error:
            raise _unrenderable(error) from error

    def _extended(
        self,
        context: Sequence[int],
        output: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> Rendered | None:
        if self._history == "template":
            return None
        given = self._shielded(plain_messages(messages, is_head=False))
        if not given or not output or any(m["role"] == "assistant" for m in given):
            return None
        with self._tokenizer.standing_in() as stand_ins:
            if self._is_opaque:
                ids = self._extension.after(output, given, tools)
                return None if ids is None else Rendered(tokens=stand_ins.expand(ids).tokens)
            bridged = bridge(
                self._renderer,
                (context[-CONTEXT_TAIL_TOKENS:], output),
                given,
                tools=self._shown(tools),
                reasoning_end=self._reasoning_end,
            )
            if bridged is None:
                return None
            added = stand_ins.expand(bridged.ids)
        ends = _ends(bridged.message_indices, count=len(given))
        return Rendered(
            tokens=added.tokens, message_ends=tuple(added.position(end) for end in ends)
        )

    def tokens_min(self, texts: Iterable[str]) -> int:
        """A number of tokens that messages with these texts have at least; quick."""
        return self._tokenizer.bound.tokens_min(texts)

    def parse(
        self,
        output: Sequence[int],
        *,
        completion_id: str,
        tools: Sequence[Tool] | None = (),
        context: Sequence[int] = (),
    ) -> Parsed:
        """Parse sampled ids to an assistant message; the same arguments give the same message.

        Any ids give a message: a call without a name or JSON arguments counts as malformed and
        stays text. All text can be encoded as UTF-8.

        Tool call ids derive from `completion_id`. Without tools nothing is parsed as a tool call;
        if they are None, no template gave the output a form, and all of it is content.
        `context`: ids before the output (a tail is enough): they may open the reasoning.
        """
        ids = list(output)
        if tools is None:
            return Parsed(content=self._tokenizer.decode(self._without_stop(ids)))
        before = self._before(context)
        try:
            parsed = self._renderer.parse_response(
                ids, tools=list(tools) or None, prompt_ids=self._telling(before)
            )
        except CONTENT_ERRORS:
            return Parsed(content=self._tokenizer.decode(self._without_stop(ids)), malformed=1)
        attempts = parsed.tool_calls if tools else []
        read = [(call, arguments_text(call)) for call in attempts]
        bad = [call for call, arguments in read if arguments is None]
        good = [(call.name or "", arguments) for call, arguments in read if arguments is not None]
        return Parsed(
            content=self._content(ids, parsed, bad, has_tools=bool(tools)),
            reasoning=(parsed.reasoning_content or "").strip("\n"),
            tool_calls=tuple(
                ToolCall(id=f"call_{completion_id}_{index}", name=name, arguments=arguments)
                for index, (name, arguments) in enumerate(good)
            ),
            malformed=len(bad),
        )

    def _telling(self, before: list[int]) -> list[int] | None:
        """The ids before an output if they may open its reasoning, which is why a parser asks."""
        if self._is_opaque and len(before) <= _OPENING_TOKENS_MAX:
            return before if self._opens_reasoning(tuple(before)) else None
        return before or None

    def _begins_in_reasoning(self, before: tuple[int, ...]) -> bool:
        return bool(
            prompt_ends_in_reasoning(self._tokenizer, list(before), stop_ids=self._message_ends)
        )

    def _before(self, context: Sequence[int]) -> list[int]:
        """As much of the context as the renderer looks at."""
        tail = context[-CONTEXT_TAIL_TOKENS:]
        if self._is_opaque:
            for index in range(len(tail) - 1, -1, -1):
                if tail[index] in self._message_ends:
                    return list(tail[index:])
        return list(tail)

    def _content(
        self,
        ids: list[int],
        parsed: ParsedResponse,
        bad: Sequence[ParsedToolCall],
        *,
        has_tools: bool,
    ) -> str:
        """The message's text; malformed calls stay in it, so nothing sampled is lost."""
        if not has_tools and parsed.tool_calls:
            text = self._tokenizer.decode(self._without_stop(ids))
            text = text.partition("</think>")[2] if parsed.reasoning_content else text
            # As the renderer reads a text without calls: the beginning may have been streamed.
            return text if self._is_opaque else text.strip()
        content = parsed.content.rstrip("\n") if parsed.tool_calls else parsed.content
        leftovers = [self._block_text(ids, call) for call in bad]
        return "\n".join([part for part in (content, *leftovers) if part])

    def _block_text(self, ids: list[int], call: ParsedToolCall) -> str:
        if call.token_span is None:
            return str(call.raw)
        start, end = call.token_span
        return self._tokenizer.decode(self._without_stop(ids)[start:end])

    def _without_stop(self, ids: list[int]) -> list[int]:
        end = len(ids)
        while end and ids[end - 1] in self.stop_token_ids:
            end -= 1
        return ids[:end]

    def encode(self, text: str, *, is_start: bool = True) -> list[int]:
        """Token ids of a text without a template; control tokens in it are the tokens."""
        ids = self._tokenizer.encode(self._tokenizer.control_tokens.kept(text))
        opening = self._tokenizer.opening_ids
        return [*opening, *ids] if is_start and ids[: len(opening)] != opening else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self._tokenizer.decode(ids)

    def bytes_of(self, token_id: int, *, text: str) -> bytes | None:
        """The bytes of a token with this text; None if they are not known."""
        return self._tokenizer.token_bytes.of(token_id, text=text)


def _ends(indices: Sequence[int], *, count: int) -> tuple[int, ...]:
    """Number of ids up to each message's end; one without ids ends as its predecessor."""
    last = dict.fromkeys(range(count), 0)
    for position, index in enumerate(indices):
        if index >= 0:
            last[index] = position + 1
    ends: list[int] = []
    for index in range(count):
        ends.append(max(last[index], ends[-1] if ends else 0))
    return tuple(ends)


def _unrenderable(error: Exception) -> ValueError:
    if isinstance(error, TemplateError):
        return ValueError(f"the model's chat template refuses the messages: {error}")
    return ValueError(f"the messages cannot be rendered: {type(error).__name__}: {error}")
