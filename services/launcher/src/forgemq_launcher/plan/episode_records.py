"""The records of a planned episode, as gateway, agents, graders and lanes write them."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from forgemq_contracts import topics
from forgemq_contracts.completions import (
    DeliveredCompletion,
    FinishedCompletion,
    RequestedCompletion,
    TurnPart,
    WeightSpan,
)
from forgemq_contracts.episodes import (
    FinishedEpisode,
    GradedEpisode,
    ManifestEntry,
    OpenedEpisode,
    ProcessReward,
    Sampling,
)
from forgemq_contracts.partitions import episode_id, group_id
from forgemq_contracts.run import Queue
from forgemq_contracts.topic import Topic
from forgemq_launcher.plan.episodes import EpisodeShape

TEXT_BYTES_PER_TOKEN = 4
"""Of a message in a record, for each of its tokens: about that of English."""
RESULT_BYTES = 54
"""What an agent reports at an episode's end."""
NOW_MS = 1_800_000_000_000
SHA256 = "f" * 64
OFFSET = 12_345

GROUP_ID = group_id(run="planned", domain="planned", idempotency_key="1")
EPISODE_ID = episode_id(group=GROUP_ID, index=1, attempt=0)


class PlannedQueue(Struct, frozen=True, kw_only=True):
    """A queue with its usual episode.

    Attributes:
        queue: Of the run.
        shape: Of its episodes.
        routes: Numbers of experts that a sampled token records: layers times experts chosen.
    """

    queue: Queue
    shape: EpisodeShape
    routes: int = 0


def request_id(turn: int) -> str:
    """Of a completion; as long as a real one."""
    return f"{turn:032x}"


def task_of(shape: EpisodeShape) -> bytes:
    """A task of the length that the shape has."""
    frame = b'{"task":""}'
    return frame[:-2] + b"x" * max(0, shape.task_bytes - len(frame)) + frame[-2:]


def episode_records(planned: PlannedQueue) -> Iterator[tuple[Topic, Struct]]:
    """The records of one episode with all its turns."""
    queue, shape = planned.queue, planned.shape
    yield (
        topics.OPENED_EPISODES,
        OpenedEpisode(
            episode_id=EPISODE_ID,
            group_id=GROUP_ID,
            index=1,
            attempt=0,
            key_sha256=SHA256,
            sampling=Sampling(max_tokens=shape.sampled),
            history="append_only",
            lease_s=60.0,
            opened_ms=NOW_MS,
        ),
    )
    for turn in range(shape.turns):
        yield from _turn_records(planned, turn)
    yield topics.FINISHED_EPISODES, _finished_episode(queue, shape)
    process = [
        ProcessReward(completion_id=request_id(turn), value=0.5) for turn in range(shape.turns)
    ]
    yield (
        topics.GRADED_EPISODES,
        GradedEpisode(
            episode_id=EPISODE_ID,
            group_id=GROUP_ID,
            grader=" ".join(name for name in (queue.outcome, queue.process, queue.speed) if name),
            grader_version="1",
            outcome=1.0,
            speed=0.5,
            process=tuple(process) if queue.process else (),
        ),
    )


def _finished_episode(queue: Queue, shape: EpisodeShape) -> FinishedEpisode:
    manifest = [
        ManifestEntry(
            completion_id=request_id(turn),
            offset=OFFSET,
            sequence=turn,
            output_tokens=shape.sampled,
            parent_id=request_id(turn - 1) if turn else None,
        )
        for turn in range(shape.turns)
    ]
    return FinishedEpisode(
        episode_id=EPISODE_ID,
        group_id=GROUP_ID,
        domain=queue.domain,
        purpose="train",
        group_size=queue.group_size,
        index=1,
        attempt=0,
        status="completed",
        manifest=tuple(manifest),
        task=task_of(shape),
        result=b'"' + b"x" * (RESULT_BYTES - 2) + b'"',
        engine_s=1.5,
        alone_s=1.5,
        duration_s=2.5,
    )


def _turn_records(planned: PlannedQueue, turn: int) -> Iterator[tuple[Topic, Struct]]:
    shape = planned.shape
    common = _of_both(shape, turn)
    requested = RequestedCompletion(
        **common,
        sampling=Sampling(max_tokens=shape.sampled),
        deadline_ms=NOW_MS,
        requested_ms=NOW_MS,
        is_delta=bool(turn),
    )
    finished = FinishedCompletion(
        **common,
        finish_reason="stop",
        output=bytes(4 * shape.sampled),
        logprobs=bytes(4 * shape.sampled),
        spans=(WeightSpan(start=0, end=shape.sampled, lineage=1, version=100),),
        routes=bytes(2 * planned.routes * shape.sampled),
        queued_s=0.001,
        engine_s=1.5,
        alone_s=1.5,
        cached_tokens=1 + common["shared_prefix_tokens"],
    )
    delivered = DeliveredCompletion(
        request_id=request_id(turn),
        episode_id=EPISODE_ID,
        group_id=GROUP_ID,
        delivered_ms=NOW_MS,
    )
    yield topics.REQUESTED_COMPLETIONS, requested
    yield topics.FINISHED_COMPLETIONS, finished
    yield topics.DELIVERED_COMPLETIONS, delivered


def _of_both(shape: EpisodeShape, turn: int) -> dict[str, Any]:
    """Fields of a request that its answer has too."""
    new = shape.observed if turn else shape.prompt
    shared = shape.prompt + turn * (shape.sampled + shape.observed) - new if turn else 0
    message = {"role": "tool" if turn else "user", "content": "x" * (new * TEXT_BYTES_PER_TOKEN)}
    return {
        "request_id": request_id(turn),
        "attempt": 0,
        "episode_id": EPISODE_ID,
        "group_id": GROUP_ID,
        "lane": 0,
        "epoch": 1,
        "parent_id": request_id(turn - 1) if turn else None,
        "shared_prefix_tokens": shared,
        "context": bytes(4 * new),
        "turn": TurnPart(
            sequence=turn,
            protocol="chat_completions",
            body_digest="f" * 32,
            messages=msgspec.json.encode([message]),
            message_digests=("f" * 32,),
            message_ends=(shared + new,),
            after_offset=OFFSET,
        ),
    }
