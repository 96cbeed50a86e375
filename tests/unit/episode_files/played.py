"""A scored group of two episodes with all that a row can hold, for tests of files of episodes."""

from collections.abc import Sequence
from typing import Any

import msgspec

from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import FinishedCompletion, TurnPart, WeightSpan
from forgemq_contracts.episodes import (
    FinishedEpisode,
    ForkCount,
    GradedEpisode,
    ManifestEntry,
    ProcessReward,
    ReportedReward,
)
from forgemq_contracts.groups import EpisodeScore, ScoredCompletion, ScoredGroup
from forgemq_episode_files.rows import EpisodeRow, ScoredRecords, rows_of

A, B, C, LOST, TITLE = (digit * 32 for digit in "abcef")
CALL = {"id": "call_a_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SYSTEM = {"role": "system", "content": "You keep a shop."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Two apples?"}]}
TOOL = {"role": "tool", "tool_call_id": "call_a_0", "content": "3 apples"}
TOOLS = '[{"type":"function","function":{"name":"look","parameters":{}}}]'
REPLIES: dict[str, dict[str, Any]] = {
    A: {"role": "assistant", "content": None, "tool_calls": [CALL]},
    B: {"role": "assistant", "content": "Yes.", "reasoning_content": "Three are there."},
    LOST: {"role": "assistant", "content": "Maybe."},
    TITLE: {"role": "assistant", "content": "Apples"},
    C: {"role": "assistant", "content": "No."},
}
LOGPROBS = (-0.1, -1.5e-30, -0.0, -87.5)
"""No float64 of these but the last two is a float32."""


def completion(name: str, *, episode: str, sequence: int, **fields: Any) -> FinishedCompletion:
    made: dict[str, Any] = {
        "request_id": name,
        "attempt": 0,
        "episode_id": episode,
        "group_id": "g",
        "lane": 0,
        "epoch": 1,
        "finish_reason": "stop",
        "context": pack_ids([sequence, 8]),
        "output": pack_ids([20, 30, 2, 40]),
        "logprobs": pack_floats(LOGPROBS),
        "spans": (
            WeightSpan(start=0, end=1, lineage=0, version=3),
            WeightSpan(start=1, end=4, lineage=0, version=4),
        ),
    }
    turn = {"protocol": "chat_completions", "body_digest": "d", "sequence": sequence}
    turn |= fields.pop("turn", {})
    return FinishedCompletion(**{**made, **fields}, turn=TurnPart(**turn))


def reply(made: FinishedCompletion, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return REPLIES[made.request_id]


def json(*messages: dict[str, Any]) -> bytes:
    return msgspec.json.encode(messages)


FIRST, SECOND = "g.0.0", "g.1.0"


def group() -> ScoredRecords:
    """The first episode: a call, its answer after a lost reply, and a title; the second is cut."""
    return ScoredRecords(
        scored=ScoredGroup(
            group_id="g",
            domain="shop",
            purpose="train",
            episodes=(
                EpisodeScore(episode_id=FIRST, outcome=1.0, speed=0.25, process=-0.2, total=0.85),
                EpisodeScore(
                    episode_id=SECOND, outcome=0.0, speed=0.0, process=0.0, total=0.0,
                    is_masked=True, truncated_by="too_many_turns",
                ),
            ),
            completions=(
                ScoredCompletion(
                    completion_id=A, offset=0, episode_index=0, sequence=0,
                    return_to_go=1.05, advantage=0.1,
                ),
            ),
        ),
        episodes=_episodes(),
        grades={
            FIRST: GradedEpisode(
                episode_id=FIRST, group_id="g", grader="m:f", grader_version="", outcome=1.0,
                speed=0.25, process=(ProcessReward(completion_id=B, value=-0.2),),
            )
        },
        completions={each.request_id: each for each in _completions()},
    )  # fmt: skip


def _completions() -> list[FinishedCompletion]:
    return [
        completion(
            A,
            episode=FIRST,
            sequence=0,
            turn={"messages": json(SYSTEM, PARTS), "tools": TOOLS.encode(), "tools_digest": "t"},
        ),
        completion(
            LOST,
            episode=FIRST,
            sequence=1,
            parent_id=A,
            shared_prefix_tokens=6,
            turn={"messages": json(TOOL), "tools_digest": "t"},
        ),
        completion(
            B,
            episode=FIRST,
            sequence=2,
            parent_id=LOST,
            shared_prefix_tokens=8,
            context=b"",
            turn={
                "messages": json(SYSTEM, PARTS, REPLIES[A], TOOL),
                "is_fork": True,
                "fork_reason": "resampled",
                "tools_digest": "t",
            },
        ),
        completion(
            TITLE,
            episode=FIRST,
            sequence=3,
            turn={
                "messages": json({"role": "user", "content": "A title"}),
                "is_fork": True,
                "fork_reason": "side_request",
            },
        ),
        completion(C, episode=SECOND, sequence=0, turn={"messages": json(PARTS)}),
    ]


def _episodes() -> dict[str, FinishedEpisode]:
    return {
            FIRST: FinishedEpisode(
                episode_id=FIRST, group_id="g", domain="shop", purpose="train", group_size=2,
                index=0, attempt=0, status="completed", task=b'{"apples": 2}', result=b'"sold"',
                manifest=tuple(
                    ManifestEntry(completion_id=name, offset=at, sequence=at, output_tokens=4)
                    for at, name in ((0, A), (2, B), (3, TITLE))
                ),
                rewards=(
                    ReportedReward(reward_id="1", name="style", value=0.5),
                    ReportedReward(reward_id="2", name="style", value=0.25),
                    ReportedReward(reward_id="3", name="kind", value=1.0, completion_id=A),
                ),
                fork_reasons=(
                    ForkCount(reason="resampled", count=1),
                    ForkCount(reason="side_request", count=1),
                ),
            ),
            SECOND: FinishedEpisode(
                episode_id=SECOND, group_id="g", domain="shop", purpose="train", group_size=2,
                index=1, attempt=0, status="completed", task=b'{"apples": 2}',
                manifest=(ManifestEntry(completion_id=C, offset=4, sequence=0, output_tokens=4),),
                truncated_by="too_many_turns",
            ),
        }  # fmt: skip


def rows() -> tuple[EpisodeRow, ...]:
    return tuple(rows_of(group(), run="shop-1", reply=reply))
