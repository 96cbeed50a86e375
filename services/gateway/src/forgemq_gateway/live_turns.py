"""Tokens of turns that are still sampled, for the clients that read along."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from forgemq_contracts.completions import SampledChunk
from forgemq_gateway.core.known_completion import TOKEN_BYTES


class LiveTurn:
    """What the newest attempt of one turn has sampled, without a gap from its start.

    Attributes:
        output: The tokens so far.
        news: Done when `output` has changed; then another one takes its place.
    """

    def __init__(self) -> None:
        self.output = b""
        self.news = _future()
        self.watchers = 0
        self._attempt = -1

    def take(self, chunk: SampledChunk) -> None:
        """Add what is new of a chunk.

        Nothing is, of one behind a gap or of an attempt before the newest. A chunk may begin with
        the tokens of an earlier one, if the log had that one and its lane got no word of it.
        """
        if chunk.attempt > self._attempt:
            self._attempt, self.output = chunk.attempt, b""
        start = chunk.start * TOKEN_BYTES
        is_newest = chunk.attempt == self._attempt
        if is_newest and start <= len(self.output) < start + len(chunk.tokens):
            self.output = self.output[:start] + chunk.tokens
            news, self.news = self.news, _future()
            news.set_result(None)


class LiveTurns:
    """Turns that clients watch. Nothing is kept of others: it is on the log when they end."""

    def __init__(self) -> None:
        self._watched: dict[str, LiveTurn] = {}

    def take(self, chunk: SampledChunk) -> None:
        """Tell those who watch the turn of a new chunk."""
        turn = self._watched.get(chunk.request_id)
        if turn is not None:
            turn.take(chunk)

    @contextmanager
    def watch(self, request_id: str) -> Iterator[LiveTurn]:
        """Keep the chunks of a turn that come from here on."""
        turn = self._watched.setdefault(request_id, LiveTurn())
        turn.watchers += 1
        try:
            yield turn
        finally:
            turn.watchers -= 1
            if not turn.watchers:
                del self._watched[request_id]


def _future() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()
