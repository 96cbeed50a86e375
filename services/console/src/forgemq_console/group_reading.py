"""Reads the turns of one group at the offsets that a view knows."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from tokenizers import Tokenizer

from forgemq_bus.kept_records import message_of, read_at
from forgemq_bus.log import Log, Place
from forgemq_console.core import GroupView, TokenText, group_view
from forgemq_run_view.view import RunView

ReadGroup: TypeAlias = Callable[[str, str | None], Awaitable[GroupView]]
"""A group by its id, and the episode that is wanted in full."""


def group_reader(log: Log, view: RunView, *, token_text: TokenText, episodes_max: int) -> ReadGroup:
    """A function that reads a group's turns and rewards at the offsets that the view knows."""

    async def read_group(group_id: str, episode_id: str | None) -> GroupView:
        places = [(Place(topic, p), at) for topic, p, at in view.record_offsets(group_id)]
        # In a thread: long contexts take seconds, and the stream and other pages go on meanwhile.
        return await asyncio.to_thread(
            group_view,
            group_id,
            [message_of(record) for record in await read_at(log, places)],
            episode_id=episode_id,
            token_text=token_text,
            episodes_max=episodes_max,
        )

    return read_group


def token_text_of(model: Path) -> TokenText:
    """Text of one token by the model's tokenizer; its number if the model has none."""
    path = model / "tokenizer.json"
    if not path.is_file():
        return str
    tokenizer = Tokenizer.from_file(str(path))
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
