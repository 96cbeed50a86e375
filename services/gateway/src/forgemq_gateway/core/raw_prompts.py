"""Prompts that the model continues without a chat template: texts and token ids."""

from typing import TypeAlias

from msgspec import Struct


class TextPrompt(Struct, frozen=True):
    """A text."""

    text: str


class TokenPrompt(Struct, frozen=True):
    """Token ids as int32 bytes."""

    tokens: bytes


Prompt: TypeAlias = TextPrompt | TokenPrompt
