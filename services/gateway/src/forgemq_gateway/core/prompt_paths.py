"""Which completion of an episode a prompt continues.

A prompt continues a completion if it begins with that completion's prompt and its text. The tokens
of both are then kept as they are; a text between them has no boundary to be split at.
"""

import hashlib
from collections.abc import Iterator

from msgspec import Struct

from forgemq_gateway.core.digests import DIGEST_BYTES
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.raw_prompts import Prompt, TextPrompt


class Continued(Struct, frozen=True):
    """A completion that a text continues, and the text behind that completion's prompt."""

    completion: KnownCompletion
    behind: str


def prompt_key(prompt: Prompt) -> str:
    """Match key of a prompt: its kind, its length in bytes and its digest."""
    data = _bytes_of(prompt)
    return _key(prompt, len(data), hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest())


def is_prompt_key(key: str) -> bool:
    """Whether this is the match key of a prompt, and not of a message."""
    return key.startswith(("text:", "ids:"))


class PromptPaths:
    """The prompts of one episode, and the completions of each."""

    def __init__(self) -> None:
        self._completions: dict[str, list[KnownCompletion]] = {}
        self._sizes: dict[str, set[int]] = {"text": set(), "ids": set()}

    def note(self, key: str) -> None:
        """Note a prompt that was asked for."""
        kind, size, _ = key.split(":")
        self._sizes[kind].add(int(size))
        self._completions.setdefault(key, [])

    def forget(self, key: str) -> None:
        """Forget a noted prompt that led to nothing."""
        del self._completions[key]

    def add(self, completion: KnownCompletion, *, key: str) -> None:
        """Add what a noted prompt led to."""
        self._completions[key].append(completion)

    def begins_with_one(self, prompt: Prompt) -> bool:
        """Whether the prompt begins with a shorter one that was asked for."""
        size = len(_bytes_of(prompt))
        return any(start < size for start, _ in self._starts(prompt))

    def continued(self, prompt: TextPrompt) -> Continued | None:
        """The completion with the longest prompt and text that this text begins with.

        Of several with the same text it is the newest. Cost O(text), once over for all prompts.
        """
        data = prompt.text.encode()
        best: tuple[int, int] = (0, -1)
        found: Continued | None = None
        for start, key in self._starts(prompt):
            for completion in self._completions[key]:
                text = completion.reply.text.encode()
                rank = (start + len(text), completion.offset)
                if text and rank > best and data.startswith(text, start):
                    best, found = rank, Continued(completion, data[start:].decode())
        return found

    def _starts(self, prompt: Prompt) -> Iterator[tuple[int, str]]:
        """Length and key of each known prompt that this one begins with, the shortest first."""
        data, hasher, done = _bytes_of(prompt), hashlib.blake2b(digest_size=DIGEST_BYTES), 0
        for size in sorted(self._sizes[_kind(prompt)]):
            if size > len(data):
                return
            hasher.update(data[done:size])
            done = size
            key = _key(prompt, size, hasher.copy().hexdigest())
            if key in self._completions:
                yield size, key


def _key(prompt: Prompt, size: int, digest: str) -> str:
    return f"{_kind(prompt)}:{size}:{digest}"


def _kind(prompt: Prompt) -> str:
    return "text" if isinstance(prompt, TextPrompt) else "ids"


def _bytes_of(prompt: Prompt) -> bytes:
    return prompt.text.encode() if isinstance(prompt, TextPrompt) else prompt.tokens
