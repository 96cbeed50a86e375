"""Writes the beginning of an answer while the rest of it is sampled.

Only what no continuation changes is written (`core/settled.py`), so what has left is the beginning
of what the record of the same tokens gives. If the record has other tokens, because another attempt
sampled them, the caller refuses the client instead of delivering an answer that nobody sampled.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from forgemq_gateway.client import Client
from forgemq_gateway.clock import Clock
from forgemq_gateway.composer import Composer
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import sampled_otherwise
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.replies import Answer
from forgemq_gateway.core.settled import continues, is_live
from forgemq_gateway.core.turns import OpenTurn
from forgemq_gateway.live_turns import LiveTurn, LiveTurns
from forgemq_gateway.turn_source import Awaited


class LiveAnswer:
    """The answer of one client as it grows."""

    def __init__(
        self,
        client: Client,
        turn: OpenTurn,
        heard: LiveTurn,
        *,
        episode: HeldEpisode,
        composer: Composer,
        clock: Clock,
    ) -> None:
        self._client = client
        self._turn = turn
        self._heard = heard
        self._episode = episode
        self._composer = composer
        self._clock = clock
        self._read = b""

    @property
    def news(self) -> "asyncio.Future[None]":
        """Done when there are more tokens."""
        return self._heard.news

    async def write_news(self) -> bool:
        """Write what is settled by the tokens that came, those that come meanwhile included.

        Returns:
            Whether the client got anything: of a call, for one, nothing is settled.
        """
        has_written = False
        while (output := self._heard.output) != self._read:
            self._read = output
            has_written |= await self._write_settled(output)
        return has_written

    async def _write_settled(self, output: bytes) -> bool:
        """Write what these tokens settle, if it goes on from what was written."""
        reply = await self._composer.settled(output, turn=self._turn, episode=self._episode)
        written = self._client.written
        if reply == written or not continues(reply, written):
            return False
        prepared = self._turn.prepared
        answer = Answer(
            request_id=self._turn.request_id,
            created_s=self._clock.wall_ms() // 1000,
            model=self._client.request.model,
            reply=reply,
            finish_reason="stop",  # Not written: it is part of the end.
            context_tokens=0 if prepared is None else prepared.context_tokens,
            output_tokens=0,
        )
        await self._client.write_more(answer)
        return True


def check_continues(client: Client, completions: Sequence[KnownCompletion]) -> None:
    """Return if the recorded answer begins with what the client has of it.

    Raises:
        RefusedError: it does not. The completion is not delivered: an answer of which the client
            has another beginning is part of the episode only if a later request has it.
    """
    if not continues(completions[0].reply, client.written):
        raise sampled_otherwise()


class LiveAnswers:
    """Decides which clients read along."""

    def __init__(self, turns: LiveTurns, *, composer: Composer, clock: Clock) -> None:
        self._turns = turns
        self._composer = composer
        self._clock = clock

    def following(
        self, client: Client, episode: HeldEpisode, awaited: Sequence[Awaited]
    ) -> AbstractContextManager[LiveAnswer | None]:
        """The growing answer of this client; None if its answer comes as a whole."""
        turn = awaited[0].turn
        if turn is None or not is_live(client.request, episode.opened):
            return nullcontext()
        return self._growing(client, turn, episode)

    @contextmanager
    def _growing(
        self, client: Client, turn: OpenTurn, episode: HeldEpisode
    ) -> Iterator[LiveAnswer]:
        with self._turns.watch(turn.request_id) as heard:
            yield LiveAnswer(
                client,
                turn,
                heard,
                episode=episode,
                composer=self._composer,
                clock=self._clock,
            )
