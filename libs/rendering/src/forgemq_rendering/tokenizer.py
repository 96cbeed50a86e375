"""A tokenizer for `renderers` over the `tokenizers` package, without transformers and torch.

Implements two protocols of `renderers`: Tokenizer and ChatTemplateTokenizer. Not OffsetTokenizer:
`renderers` walks each token's offsets in Python to know which tokens are content, and nobody asks.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from forgemq_rendering.chat_template import RenderText, compile_chat_template
from forgemq_rendering.control_tokens import ControlTokens
from forgemq_rendering.pieces import Pieces, StandIns
from forgemq_rendering.token_bound import TokenBound, is_bytewise
from forgemq_rendering.token_bytes import TokenBytes

# The batch call releases the GIL and computes no offsets; for shorter texts its set-up costs more
# than that gains. The same holds for a stand-in.
_LONG_CHARACTERS_MIN = 4096

# Templates and parsers ask for the same marks and roles with each turn, 4 microseconds for each
# part of one.
_MARK_CHARACTERS_MAX = 32
_MARKS_MAX = 1024

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class FolderTokenizer:
    """The tokenizer in a Hugging Face folder.

    Args:
        folder: Holds tokenizer.json, and optionally tokenizer_config.json and
            chat_template.jinja.

    Raises:
        FileNotFoundError: tokenizer.json is missing.
        ValueError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: the gateway needs the fast tokenizer's file; save the "
                "tokenizer again with a fast tokenizer class"
            )
        self.name_or_path = str(folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no class of its own.
            raise ValueError(f"{path}: {error}") from error
        self._mark = lru_cache(_MARKS_MAX)(self._short)
        self._whole_mark = lru_cache(_MARKS_MAX)(self._marked)
        self._token_id = lru_cache(_MARKS_MAX)(self._tokenizer.token_to_id)
        config = read_json(folder / "tokenizer_config.json")
        tokens = {name: _token_text(config.get(name)) for name in _NAMED_TOKENS}
        self.named_tokens = {name: text for name, text in tokens.items() if text}
        self.eos_token_id = self._id_of(self.named_tokens.get("eos_token"))
        self.unk_token_id = self._id_of(self.named_tokens.get("unk_token"))
        added = self._tokenizer.get_added_tokens_decoder()
        self.all_special_tokens = [token.content for token in added.values() if token.special]
        self.control_tokens = ControlTokens(
            [(token.content, token.special) for token in added.values()],
            encode=self._tokenise,
            ids={token.content: token_id for token_id, token in added.items()},
        )
        self.bound = TokenBound(self._tokenizer)
        self.token_bytes = TokenBytes(self._tokenizer, is_bytewise=is_bytewise(self._tokenizer))
        self.vocabulary_size = max(self._tokenizer.get_vocab().values()) + 1
        opening = self._tokenizer.encode("", add_special_tokens=True).ids
        begin_id = self._id_of(self.named_tokens.get("bos_token"))
        self.opening_ids = opening if opening == [begin_id] else []
        self._pieces = Pieces(self._tokenise)
        self._rendering = threading.local()
        # One tuple, which any thread may replace: what `decode` gave last.
        self._decoded: tuple[list[int], bool, str] = ([], False, "")
        self.chat_template = _chat_template(folder, config)
        self.render_text: RenderText | None = (
            compile_chat_template(self.chat_template, tokens=self.named_tokens)
            if self.chat_template
            else None
        )

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    @contextmanager
    def standing_in(self) -> Iterator[StandIns]:
        """In this thread, `encode` gives one negative id for each long piece of a text."""
        self._rendering.stand_ins = stand_ins = StandIns()
        try:
            yield stand_ins
        finally:
            self._rendering.stand_ins = None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; control tokens are recognised unless shielded, none are added."""
        del add_special_tokens  # The templates write all of them.
        if len(text) <= _MARK_CHARACTERS_MAX:
            return list(self._whole_mark(text))
        return self._encode(text)

    def _marked(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.control_tokens.pieces(text):
            ids += self._piece(piece)
        return ids

    def _piece(self, text: str) -> list[int]:
        stand_ins: StandIns | None = getattr(self._rendering, "stand_ins", None)
        if stand_ins is None or len(text) < _LONG_CHARACTERS_MIN:
            return self._tokenise(text)
        return [stand_ins.put(self._pieces.of(text))]

    def _tokenise(self, text: str) -> list[int]:
        if len(text) <= _MARK_CHARACTERS_MAX:
            return list(self._mark(text))
        if len(text) < _LONG_CHARACTERS_MIN:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _short(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int] | int, *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; an id outside the vocabulary, also a negative one, has no text."""
        given = [token_ids] if isinstance(token_ids, int) else token_ids
        ids = [token_id for token_id in given if token_id >= 0]
        # Parsers ask for the same output twice: where its reasoning ends, and what it says.
        known_ids, known_skip, known_text = self._decoded
        if skip_special_tokens is known_skip and ids == known_ids:
            return known_text
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._decoded = ids, skip_special_tokens, text
        return text

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:  # noqa: ANN401 - theirs
        """Id of one token (None if unknown), or a list of ids."""
        if isinstance(tokens, str):
            found = self._token_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **settings: object,
    ) -> Any:  # noqa: ANN401 - ids or text, as transformers has it
        """Render messages with the tokenizer's chat template, as ids or as text."""
        if self.render_text is None:
            raise ValueError(f"{self.name_or_path}: the tokenizer has no chat template")
        settings.pop("return_dict", None)
        text = self.render_text(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **settings
        )
        return self.encode(text) if tokenize else text


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; {} if the file is missing."""
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold a JSON object")  # noqa: TRY004 - the file is wrong
    return loaded


def generation_stops(folder: Path) -> list[int]:
    """Ids at which the model's own configuration ends an output."""
    stops = read_json(folder / "generation_config.json").get("eos_token_id")
    if isinstance(stops, int):
        return [stops]
    return [int(token_id) for token_id in stops or []]


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template", "")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use", named.get("default", ""))
    return str(template)
