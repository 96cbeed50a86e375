"""The tokens of a turn that is sampled, from chunks in any order."""

from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.completions import SampledChunk
from forgemq_gateway.live_turns import LiveTurns

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
