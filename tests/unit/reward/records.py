"""Episodes and grades of a group, as gateway and graders write them."""

from collections.abc import Sequence

from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import FinishedCompletion, TurnPart
from forgemq_contracts.episodes import (
    FinishedEpisode,
    GradedEpisode,
    ManifestEntry,
    ProcessReward,
    ReportedReward,
)


def completion_id(index: int, sequence: int, *, group: str = "g-1") -> str:
    return f"{sum(group.encode()):08x}{index:012x}{sequence:012x}"


def finished_episode(
    index: int,
    *,
    group: str = "g-1",
    size: int = 2,
    turns: int = 1,
    status: str = "completed",
    purpose: str = "train",
    attempt: int = 0,
    rewards: Sequence[ReportedReward] = (),
    offsets: Sequence[int] | None = None,
    task: bytes = b"{}",
    result: bytes = b"",
    domain: str = "d",
    source: str = "agent",
    truncated_by: str | None = None,
) -> FinishedEpisode:
    places = offsets if offsets is not None else range(100 * index, 100 * index + turns)
    return FinishedEpisode(
        episode_id=f"{group}.{index}.{attempt}",
        group_id=group,
        domain=domain,
        purpose=purpose,
        group_size=size,
        index=index,
        attempt=attempt,
        status=status,
        manifest=tuple(
            ManifestEntry(
                completion_id=completion_id(index, sequence, group=group),
                offset=offset,
                sequence=sequence,
                output_tokens=3,
            )
            for sequence, offset in enumerate(places)
        ),
        task=task,
        result=result,
        rewards=tuple(rewards),
        source=source,
        truncated_by=truncated_by,
    )


def graded_episode(
    index: int,
    *,
    group: str = "g-1",
    outcome: float = 0.0,
    speed: float = 0.0,
    process: Sequence[float] = (),
    is_masked: bool = False,
    attempt: int = 0,
) -> GradedEpisode:
    return GradedEpisode(
        episode_id=f"{group}.{index}.{attempt}",
        group_id=group,
        grader="test:outcome",
        grader_version="1",
        outcome=outcome,
        speed=speed,
        process=tuple(
            ProcessReward(completion_id=completion_id(index, sequence, group=group), value=value)
            for sequence, value in enumerate(process)
        ),
        is_masked=is_masked,
    )


def finished_completion(
    index: int,
    sequence: int,
    *,
    group: str = "g-1",
    output: Sequence[int] = (1, 2, 3),
    finish_reason: str = "stop",
    messages: bytes = b"[]",
    tools: bytes = b"",
    asked: bytes = b"",
) -> FinishedCompletion:
    return FinishedCompletion(
        request_id=completion_id(index, sequence, group=group),
        attempt=0,
        episode_id=f"{group}.{index}.0",
        group_id=group,
        lane=0,
        epoch=0,
        finish_reason=finish_reason,
        output=pack_ids(output),
        logprobs=pack_floats([-0.5] * len(output)),
        turn=TurnPart(
            sequence=sequence,
            protocol="chat_completions",
            body_digest="",
            messages=messages,
            tools=tools,
            tools_digest="t" if tools else "",
            asked=asked,
        ),
    )
