"""Records of one group by number, and a tree read back from its wire form."""

import numpy as np

from forgemq_contracts.arrays import pack_floats, pack_ids, unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion, TurnPart, WeightSpan
from forgemq_contracts.groups import (
    EpisodeScore,
    MergedGroup,
    RetiredGroup,
    ScoredCompletion,
    ScoredGroup,
)
from forgemq_contracts.messages import Message, Output
from forgemq_contracts.trees import MergedTree
from forgemq_merger.core.merger import MergerCore

GROUP = "g-1"


def name(number: int) -> str:
    return f"{number:032x}"


def finished(number: int, parent: int | None, shared: int, context, output, /, **changes):
    fields = {
        "request_id": name(number),
        "attempt": 0,
        "episode_id": f"{GROUP}.0.0",
        "group_id": GROUP,
        "lane": 0,
        "epoch": 1,
        "finish_reason": "stop",
        "turn": TurnPart(sequence=number, protocol="chat_completions", body_digest="d"),
        "parent_id": None if parent is None else name(parent),
        "shared_prefix_tokens": shared,
        "context": pack_ids(context),
        "output": pack_ids(output),
        "logprobs": pack_floats(-0.5 - number - i / 16 for i in range(len(output))),
        "spans": (WeightSpan(start=0, end=len(output), lineage=1, version=number),)
        if output
        else (),
    }
    return FinishedCompletion(**{**fields, **changes})


def scored(*numbers: int, offsets: dict[int, int] | None = None, **changes) -> ScoredGroup:
    completions = tuple(
        ScoredCompletion(
            completion_id=name(number),
            offset=number if offsets is None else offsets[number],
            episode_index=number % 3,
            sequence=number,
            return_to_go=1.0,
            advantage=number - 1.5,
        )
        for number in numbers
    )
    episode = EpisodeScore(episode_id=f"{GROUP}.0.0", outcome=1, speed=0, process=0, total=1)
    fields = {
        "group_id": GROUP,
        "domain": "shop",
        "purpose": "train",
        "episodes": (episode,),
        "completions": completions,
    }
    return ScoredGroup(**{**fields, **changes})


def retired(group_id: str = GROUP) -> RetiredGroup:
    return RetiredGroup(group_id=group_id, domain="shop", purpose="train", reason="trained")


def message(record, offset: int = 0) -> Message:
    return Message(topic="any", partition=4, offset=offset, timestamp_ms=0, record=record)


def feed(core: MergerCore, *records) -> list[Output]:
    """Messages with completions at offsets 0, 1, 2 and so on; all other records at 0."""
    outputs: list[Output] = []
    for offset, record in enumerate(records):
        outputs.extend(core.handle(message(record, offset)))
    return outputs


def restored(snapshot: bytes, *records) -> MergerCore:
    """A core from this snapshot, with what it names of these records."""
    core = MergerCore(4)
    core.restore(snapshot)
    for named in core.references():
        for offset in named.offsets:
            core.recall(message(records[offset], offset))
    return core


def only_summary(outputs: list[Output]) -> MergedGroup:
    assert [output.topic for output in outputs] == ["merged-groups-v1"]
    summary = outputs[0].record
    assert isinstance(summary, MergedGroup)
    return summary


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def parents_of(tree: MergedTree) -> list[int]:
    starts, lengths = ints(tree.segment_start), ints(tree.segment_length)
    parents = list(range(-1, len(unpack_ids(tree.tokens)) - 1))
    for start, parent in zip(starts, ints(tree.segment_parent), strict=True):
        parents[start] = -1 if parent < 0 else starts[parent] + lengths[parent] - 1
    return parents


def read_back(tree: MergedTree) -> dict[str, dict]:
    """Each sample from the wire: its tokens, and its entries' depths, log p and versions."""
    parents, tokens = parents_of(tree), unpack_ids(tree.tokens)
    first = ints(tree.sample_first_entry)
    samples = {}
    for index, sample_id in enumerate(tree.sample_ids):
        at, path = ints(tree.sample_leaf)[index], []
        while at >= 0:
            path.append(at)
            at = parents[at]
        path.reverse()
        entries = slice(first[index], first[index + 1])
        samples[sample_id] = {
            "tokens": [tokens[i] for i in path],
            "positions": [path.index(i) for i in ints(tree.entry_token)[entries]],
            "logprobs": unpack_floats(tree.entry_logprob)[entries],
            "versions": ints(tree.entry_version)[entries],
            "advantage": unpack_floats(tree.sample_advantage)[index],
            "temperature": unpack_floats(tree.sample_temperature)[index],
            "turn": ints(tree.sample_turn)[index],
            "episode": ints(tree.sample_episode)[index],
        }
    return samples
