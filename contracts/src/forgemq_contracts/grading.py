"""What a user's reward functions see: one finished episode.

A run's configuration names up to three plain functions per queue:

    outcome(episode: GradingEpisode) -> float
    process(episode: GradingEpisode) -> Sequence[float]     one value per completion, in order
    speed(episode: GradingEpisode) -> float
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from forgemq_contracts.episodes import ReportedReward
from forgemq_contracts.fields import CompletionId, DomainName, EpisodeId, Seconds, TruncationCause


class GradingCompletion(Struct, frozen=True, kw_only=True):
    """One completion that counts, as text and as the message that the agent received."""

    completion_id: CompletionId
    sequence: int
    text: Annotated[str, Meta(description="Sampled tokens as text, special tokens included.")]
    message: Annotated[Any, Meta(description="The assistant message in OpenAI chat form, a dict.")]
    messages_before: Annotated[
        Any, Meta(description="Messages between the parent's reply and this one, a list of dicts.")
    ]
    malformed_tool_calls: Annotated[
        int, Meta(ge=0, description="Tool calls the renderer could not parse.")
    ]
    output_tokens: int
    finish_reason: Annotated[
        str,
        Meta(description="stop; length: cut at a limit; repetition: episodes.repetition_stop."),
    ]


class GradingEpisode(Struct, frozen=True, kw_only=True):
    """One finished episode; `task` and `result` are decoded JSON."""

    episode_id: EpisodeId
    domain: DomainName
    task: Any
    result: Any
    completions: tuple[GradingCompletion, ...]
    rewards: tuple[ReportedReward, ...]
    engine_s: Seconds
    tool_s: Seconds
    virtual_s: Seconds | None
    duration_s: Seconds
    completion_s: Annotated[
        Seconds,
        Meta(
            description="Completion time: engine time on the critical path, each completion as if "
            "it had run alone in its engine, and tool_s. No queueing, pauses or retries."
        ),
    ] = 0.0
    truncated_by: Annotated[
        TruncationCause | None,
        Meta(description="The limit that ended the episode; None if the agent ended it."),
    ] = None
