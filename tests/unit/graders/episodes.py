"""Episodes whose completions say these texts."""

from typing import Any

from forgemq_contracts.grading import GradingCompletion, GradingEpisode


def answered(*contents: str, task: Any = None, result: Any = None) -> GradingEpisode:
    return GradingEpisode(
        episode_id="g-1.0.0",
        domain="d",
        task=task,
        result=result,
        completions=tuple(
            GradingCompletion(
                completion_id=f"{sequence:032x}",
                sequence=sequence,
                text=content,
                message={"role": "assistant", "content": content},
                messages_before=[],
                malformed_tool_calls=0,
                output_tokens=1,
                finish_reason="stop",
            )
            for sequence, content in enumerate(contents)
        ),
        rewards=(),
        engine_s=0.0,
        tool_s=0.0,
        virtual_s=None,
        duration_s=0.0,
    )
