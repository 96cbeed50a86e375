"""How fast does the merger turn decoded records into prefix trees on the wire, on one core?

Linear tokens are those of the group with every request as a sample by itself. The clock runs over
`MergerCore.handle` of every decoded completion and of the scored group, and over the encoding of
what comes out: the tree, its checksum and its summary. It is CPU time of this one thread; decoding
the records and drawing their tokens happen before.

Case `records_to_wire` is 16 rollouts of 40 turns after a prompt of 16k tokens. The others are
smaller, or share less. The slowest cases begin with `worst_`: turns of a few tokens, and requests
that share nothing.

`over_decode` compares with decoding the same records from their wire bytes in the same run, so it
says the same on a fast machine and on a slow one.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from measurement import Measurement, arguments

from forgemq_contracts import topics
from forgemq_contracts.completions import FinishedCompletion, TurnPart, WeightSpan
from forgemq_contracts.groups import EpisodeScore, MergedGroup, ScoredCompletion, ScoredGroup
from forgemq_contracts.messages import Message, Output
from forgemq_merger.core.merger import MergerCore

VOCABULARY = 150_000  # about that of Qwen3
REPEATS = 9  # odd, so that the median is one of them
GROUP = "group-0"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shape of a group's episodes; lengths in tokens.

    `reasoning` tokens are sampled in each turn and left out of the history after it. With
    `cut_every` the history is cut to the prompt after that many turns. If `is_shared` is False,
    every request has its own history, so nothing merges.
    """

    rollouts: int
    turns: int
    prompt: int
    act: int
    observe: int
    reasoning: int = 0
    cut_every: int = 0
    is_shared: bool = True


WORKLOADS = {
    "records_to_wire": Workload(rollouts=16, turns=40, prompt=16_000, act=200, observe=300),
    "swe_16x40_8k": Workload(rollouts=16, turns=40, prompt=8_000, act=200, observe=300),
    "swe_16x80_8k": Workload(rollouts=16, turns=80, prompt=8_000, act=400, observe=600),
    "tau2_16x20": Workload(rollouts=16, turns=20, prompt=6_000, act=120, observe=180),
    "tools_8x10": Workload(rollouts=8, turns=10, prompt=2_000, act=240, observe=360),
    "stripped_16x40": Workload(
        rollouts=16, turns=40, prompt=8_000, act=200, observe=300, reasoning=400
    ),
    "cut_16x60": Workload(rollouts=16, turns=60, prompt=8_000, act=200, observe=300, cut_every=15),
    "single_turn_16x1": Workload(rollouts=16, turns=1, prompt=4_000, act=4_000, observe=0),
    "worst_short_turns": Workload(rollouts=16, turns=40, prompt=200, act=4, observe=8),
    "worst_nothing_shared": Workload(
        rollouts=16, turns=40, prompt=8_000, act=200, observe=300, is_shared=False
    ),
}


def records(workload: Workload) -> tuple[list[FinishedCompletion], ScoredGroup]:
    """The group's completions in the order in which they finish, and its scored group."""
    generator = np.random.default_rng(0)

    def draw(count: int) -> bytes:
        return generator.integers(0, VOCABULARY, count, dtype=np.int32).tobytes()

    prompt = draw(workload.prompt)
    completions: list[FinishedCompletion] = []
    last: list[FinishedCompletion | None] = [None] * workload.rollouts
    lengths = [0] * workload.rollouts
    for turn in range(workload.turns):
        for rollout in range(workload.rollouts):
            parent = last[rollout]
            is_cut = bool(workload.cut_every) and turn % workload.cut_every == 0
            if parent is None or not workload.is_shared:
                shared, parent = 0, None
                history = turn * (workload.act + workload.observe)
                context = prompt if workload.is_shared else draw(workload.prompt + history)
            elif is_cut:
                shared, context = workload.prompt, draw(workload.observe)
            elif workload.reasoning:
                # Reasoning leaves the history, so the answer after it is rendered again as context.
                shared = lengths[rollout] - workload.act - workload.reasoning
                context = parent.output[4 * workload.reasoning :] + draw(workload.observe)
            else:
                shared, context = lengths[rollout], draw(workload.observe)
            output = draw(workload.reasoning + workload.act)
            finished = _finished(
                len(completions), parent, shared, context=context, output=output, rollout=rollout
            )
            lengths[rollout] = shared + (len(context) + len(output)) // 4
            last[rollout] = finished
            completions.append(finished)
    return completions, _scored(completions, rollouts=workload.rollouts)


def _finished(
    number: int,
    parent: FinishedCompletion | None,
    shared: int,
    *,
    context: bytes,
    output: bytes,
    rollout: int,
) -> FinishedCompletion:
    count = len(output) // 4
    return FinishedCompletion(
        request_id=f"{number:032x}",
        attempt=0,
        episode_id=f"{GROUP}.{rollout}.0",
        group_id=GROUP,
        lane=0,
        epoch=1,
        finish_reason="stop",
        turn=TurnPart(sequence=number, protocol="chat_completions", body_digest="d"),
        parent_id=None if parent is None else parent.request_id,
        shared_prefix_tokens=shared,
        context=context,
        output=output,
        logprobs=np.linspace(-3, 0, count, dtype=np.float32).tobytes(),
        spans=(WeightSpan(start=0, end=count, lineage=1, version=3),),
    )


def _scored(completions: Sequence[FinishedCompletion], *, rollouts: int) -> ScoredGroup:
    return ScoredGroup(
        group_id=GROUP,
        domain="load",
        purpose="train",
        episodes=tuple(
            EpisodeScore(episode_id=f"{GROUP}.{n}.0", outcome=1, speed=0, process=0, total=1)
            for n in range(rollouts)
        ),
        completions=tuple(
            ScoredCompletion(
                completion_id=completion.request_id,
                offset=offset,
                episode_index=offset % rollouts,
                sequence=offset // rollouts,
                return_to_go=1.0,
                advantage=offset % 5 - 2.0,
            )
            for offset, completion in enumerate(completions)
        ),
    )


def measure(workload: Workload, report: Callable[[str, float, str], None]) -> None:
    """Merge the group REPEATS times and add rows with the medians."""
    completions, scored = records(workload)
    inputs = [_message(record, offset) for offset, record in enumerate(completions)]
    inputs.append(_message(scored, 0))
    seconds = []
    outputs, values = list[Output](), list[bytes]()
    for _ in range(REPEATS):
        core, outputs = MergerCore(0), []
        started_s = time.thread_time()
        for message in inputs:
            outputs.extend(core.handle(message))
        values = [topics.encode(output.record) for output in outputs]
        seconds.append(time.thread_time() - started_s)
    merged = outputs[-1].record
    assert isinstance(merged, MergedGroup), "a scored group ends in its summary"
    assert not merged.not_trainable, merged.detail
    median_s = statistics.median(seconds)
    decode_s = statistics.median(_decode_s([*completions, scored]) for _ in range(REPEATS))
    report("over_decode", median_s / decode_s, "x")
    report("tokens_per_second", merged.request_tokens / median_s, "linear tokens/s")
    report("tree_tokens_per_second", merged.tree_tokens / median_s, "tree tokens/s")
    report("completions_per_second", len(completions) / median_s, "1/s")
    report("time_ms", 1000 * median_s, "ms")
    report("time_worst_ms", 1000 * max(seconds), "ms")
    report("request_tokens", merged.request_tokens, "tokens")
    report("tree_tokens", merged.tree_tokens, "tokens")
    report("wire_bytes", sum(map(len, values)), "bytes")


def _decode_s(records: Sequence[FinishedCompletion | ScoredGroup]) -> float:
    """CPU seconds to decode these records from their wire bytes, as a service does before."""
    values = [(type(record), msgspec.msgpack.encode(record)) for record in records]
    decoders = {kind: msgspec.msgpack.Decoder(kind) for kind, _ in values}
    started_s = time.thread_time()
    for kind, value in values:
        decoders[kind].decode(value)
    return time.thread_time() - started_s


def _message(record: FinishedCompletion | ScoredGroup, offset: int) -> Message:
    return Message(topic="any", partition=0, offset=offset, timestamp_ms=0, record=record)


def main() -> int:
    """Measure all workloads, or those that --case names."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="merger",
        question="How fast do decoded records become prefix trees on the wire, on one core?",
        conditions={"clock": f"CPU time of one thread, median of {REPEATS} groups"},
    )
    for case, workload in WORKLOADS.items():
        if options.case and case not in options.case:
            continue
        measurement.conditions[case] = repr(workload)
        measure(workload, lambda *row, case=case: measurement.row(case, *row))
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
