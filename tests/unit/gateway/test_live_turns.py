"""The tokens of a turn that is sampled, from chunks in any order."""

import asyncio
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.completions import SampledChunk
from forgemq_gateway.client import Client
from forgemq_gateway.clock import Clock
from forgemq_gateway.composer import Composer
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.live_answers import LiveAnswer
from forgemq_gateway.live_turns import LiveTurns
from forgemq_gateway.protocols.chat_body import request_of
from forgemq_gateway.protocols.chat_completions import ChatCompletions
from forgemq_rendering import Rendering
from tests.simulation.attempts_records import opened_episode, prepared_turn

ATTEMPTS = (list(range(100, 110)), list(range(200, 207)))
CHUNKS = st.lists(
    st.tuples(st.sampled_from([0, 1]), st.integers(0, 9), st.integers(1, 5)), max_size=30
)


def chunk_of(attempt: int, start: int, count: int) -> SampledChunk:
    tokens = ATTEMPTS[attempt][start : start + count]
    return SampledChunk(
        request_id="r" * 32, attempt=attempt, group_id="g", start=start, tokens=pack_ids(tokens)
    )


@given(told=CHUNKS)
async def test_the_output_is_what_is_known_of_the_newest_attempt_without_a_gap(
    told: list[tuple[int, int, int]],
) -> None:
    """Chunks come twice, late, overlapping, behind gaps and of an attempt that was given up."""
    turns, newest, length = LiveTurns(), -1, 0
    with turns.watch("r" * 32) as turn:
        for attempt, start, count in told:
            before, news = turn.output, turn.news
            turns.take(chunk_of(attempt, start, count))
            if attempt > newest:
                newest, length = attempt, 0
            end = min(start + count, len(ATTEMPTS[attempt]))
            if attempt == newest and start <= length:
                length = max(length, end)
            assert turn.output == pack_ids(ATTEMPTS[newest][:length])
            assert news.done() == (turn.output not in (before, b""))
    with turns.watch("r" * 32) as turn:
        assert turn.output == b""


async def test_tokens_that_come_while_others_are_written_do_not_wait_for_the_next(
    model: Path,
) -> None:
    rendering = Rendering.load(str(model))
    episode = HeldEpisode(opened_episode("g-1"), lease_until_s=0.0)
    turn = episode.begin("body", matched=None, requested_ms=0, deadline_ms=1)
    turn.prepared = prepared_turn(turn, parent=None)
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    request = request_of(json.dumps(body).encode())
    turns, sent, protocol = LiveTurns(), list[bytes](), ChatCompletions()

    def tell(text: str) -> None:
        tokens = pack_ids(rendering.encode(text))
        turns.take(
            SampledChunk(
                request_id=turn.request_id, attempt=0, group_id="g-1", start=0, tokens=tokens
            )
        )

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        tell("good day, fox")

    client = Client(
        protocol=protocol,
        request=request,
        send=send,
        leaving=asyncio.get_running_loop().create_future(),
        stream=protocol.stream(request),
    )
    with turns.watch(turn.request_id) as heard:
        answer = LiveAnswer(
            client,
            turn,
            heard,
            episode=episode,
            composer=Composer({"append_only": rendering}, context_tokens_max=4096),
            clock=Clock(),
        )
        tell("good day")
        assert await answer.write_news()
    assert b"fox" in b"".join(sent)
