"""Builds what graders see of an episode: token ids as text, and as the messages the agent got."""

from collections.abc import Sequence
from typing import Any

import msgspec

from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.grading import GradingCompletion, GradingEpisode
from forgemq_rendering import Rendering, chat_message
from forgemq_reward.core.pending import HeldCompletion


def grading_episode(
    episode: FinishedEpisode, completions: Sequence[HeldCompletion], *, rendering: Rendering
) -> GradingEpisode:
    """The episode with its completions in the order of their sequence.

    Raises:
        msgspec.DecodeError: the task, the result or a turn's messages are not JSON.
    """
    sequences = {entry.completion_id: entry.sequence for entry in episode.manifest}
    return GradingEpisode(
        episode_id=episode.episode_id,
        domain=episode.domain,
        task=msgspec.json.decode(episode.task),
        result=msgspec.json.decode(episode.result) if episode.result else None,
        completions=tuple(
            _completion(held, sequence=sequences[held.completion_id], rendering=rendering)
            for held in completions
        ),
        rewards=episode.rewards,
        engine_s=episode.engine_s,
        tool_s=episode.tool_s,
        virtual_s=episode.virtual_s,
        duration_s=episode.duration_s,
        completion_s=completion_s(episode),
        truncated_by=episode.truncated_by,
    )


def completion_s(episode: FinishedEpisode) -> float:
    """Engine time on the critical path, as if alone in the engines, and tool time, seconds.

    A record without the first has the engine time as it was measured.
    """
    engine_s = episode.engine_s if episode.alone_s is None else episode.alone_s
    return engine_s + episode.tool_s


def _completion(held: HeldCompletion, *, sequence: int, rendering: Rendering) -> GradingCompletion:
    output = unpack_ids(held.output)
    parsed = rendering.parse(
        output,
        completion_id=held.completion_id,
        tools=None if held.tools is None else msgspec.json.decode(held.tools, type=list[Any]),
        context=unpack_ids(held.context_tail),
    ).up_to(held.stop_string)
    return GradingCompletion(
        completion_id=held.completion_id,
        sequence=sequence,
        text=rendering.decode(output),
        message=chat_message(parsed),
        messages_before=msgspec.json.decode(held.messages),
        malformed_tool_calls=parsed.malformed,
        output_tokens=len(output),
        finish_reason=held.finish_reason,
    )
