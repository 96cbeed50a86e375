"""From a scored group and its completions to the tree on the wire and its summary."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forgemq_contracts import topics
from forgemq_contracts.curriculum import SOLVED_OUTCOME_MIN
from forgemq_contracts.groups import MergedGroup, NotTrainable, ScoredCompletion, ScoredGroup
from forgemq_contracts.trees import MergedTree
from forgemq_merger.core.completions import KeptCompletion
from forgemq_merger.core.prefix_tree import Delta, PrefixTree, build, kept_lengths

# The wire is little-endian on every machine.
INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")
FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_MIN = float(np.finfo(np.float32).tiny)


class UnmergeableError(Exception):
    """The group cannot train, and the message says why: an infrastructure failure, not a reward."""


@dataclass(frozen=True, slots=True)
class MergedSample:
    """One completion that trains.

    Attributes:
        index: Of its delta.
        length: Tokens of its context and output together.
    """

    index: int
    length: int
    completion: KeptCompletion
    score: ScoredCompletion


def merge_group(
    scored: ScoredGroup,
    completions: Sequence[KeptCompletion],
    *,
    partition: int,
    tree_tokens_max: int | None = None,
    has_teacher: bool = False,
) -> tuple[MergedTree | None, MergedGroup]:
    """The group's tree and its summary; without a tree the summary says why.

    Args:
        scored: The group with one advantage per completion.
        completions: In log order.
        partition: Of the group-keyed topics.
        tree_tokens_max: A larger tree fails its group; None: no limit.
        has_teacher: A completion without a teacher's log-probabilities fails its group.
    """
    if scored.not_trainable:
        return None, not_merged(
            scored, partition=partition, reason=scored.not_trainable, detail=scored.detail
        )
    try:
        needed = _needed(scored, completions)
        deltas = _deltas(needed)
        samples = _samples(scored, needed, deltas)
        tree = build(deltas, kept=_kept(samples, deltas))
        _check_size(len(tree.tokens), tree_tokens_max=tree_tokens_max)
        merged = _wire(scored, samples, tree, has_teacher=has_teacher)
    except UnmergeableError as error:
        return None, not_merged(scored, partition=partition, reason="failed", detail=str(error))
    return merged, _summary(scored, samples, tree, merged=merged, partition=partition)


def not_merged(
    scored: ScoredGroup, *, partition: int, reason: NotTrainable, detail: str
) -> MergedGroup:
    """The summary of a group without a tree."""
    return MergedGroup(
        group_id=scored.group_id,
        domain=scored.domain,
        purpose=scored.purpose,
        partition=partition,
        not_trainable=reason,
        detail=detail,
        scored=_scored(scored),
        solved=_solved(scored),
    )


def _scored(group: ScoredGroup) -> int:
    return sum(not episode.is_masked for episode in group.episodes)


def _solved(group: ScoredGroup) -> int:
    return sum(
        episode.outcome >= SOLVED_OUTCOME_MIN for episode in group.episodes if not episode.is_masked
    )


def _needed(scored: ScoredGroup, completions: Sequence[KeptCompletion]) -> list[KeptCompletion]:
    """The completions that train, and all their ancestors, in log order."""
    by_id = {completion.completion_id: completion for completion in completions}
    needed: set[str] = set()
    for score in scored.completions:
        if score.completion_id not in by_id:
            raise UnmergeableError(f"completion {score.completion_id} is not in the log")
        completion = by_id[score.completion_id]
        if not completion.has_entries:
            continue
        while completion.completion_id not in needed:
            needed.add(completion.completion_id)
            if completion.parent_id is None:
                break
            if completion.parent_id not in by_id:
                raise UnmergeableError(
                    f"completion {completion.parent_id}, parent of {completion.completion_id}, "
                    "is not in the log"
                )
            completion = by_id[completion.parent_id]
    return [completion for completion in completions if completion.completion_id in needed]


def _deltas(completions: Sequence[KeptCompletion]) -> list[Delta]:
    """The same completions with indices for parents."""
    index_of: dict[str, int] = {}
    deltas: list[Delta] = []
    for index, completion in enumerate(completions):
        name, shared = completion.completion_id, completion.shared_prefix_tokens
        parent = -1 if completion.parent_id is None else index_of.get(completion.parent_id, -1)
        shareable = deltas[parent].length if parent >= 0 else 0
        if shared > shareable:
            raise UnmergeableError(
                f"completion {name} shares {shared} tokens where {shareable} came before it"
            )
        tokens = np.frombuffer(completion.context + completion.output, INT32)
        deltas.append(Delta(parent, shared, tokens))
        index_of[name] = index
    return deltas


def _samples(
    scored: ScoredGroup, completions: Sequence[KeptCompletion], deltas: Sequence[Delta]
) -> list[MergedSample]:
    index_of = {completion.completion_id: index for index, completion in enumerate(completions)}
    samples = []
    for score in scored.completions:
        index = index_of.get(score.completion_id)
        if index is not None and completions[index].has_entries:
            _check(completions[index], score, length=deltas[index].length)
            samples.append(MergedSample(index, deltas[index].length, completions[index], score))
    if not samples:
        raise UnmergeableError("no completion of the group was sampled with full support")
    return samples


def _check(completion: KeptCompletion, score: ScoredCompletion, *, length: int) -> None:
    """Refuse a completion that cannot train although its records obey their contracts.

    Records hold float64, the tree float32: what is out of float32's range would become infinite,
    or 0, on the wire.
    """
    name = completion.completion_id
    if completion.temperature <= 0:
        raise UnmergeableError(f"completion {name}: full support at temperature 0")
    if not FLOAT32_MIN <= completion.temperature <= FLOAT32_MAX:
        raise UnmergeableError(
            f"completion {name}: temperature {completion.temperature} is out of float32's range"
        )
    if abs(score.advantage) > FLOAT32_MAX:
        raise UnmergeableError(
            f"completion {name}: advantage {score.advantage} is no finite float32"
        )
    if length == completion.output_tokens:
        raise UnmergeableError(f"completion {name}: no context before the first sampled token")
    if not completion.spans:
        raise UnmergeableError(f"completion {name}: no weight spans")


def _check_size(tokens: int, *, tree_tokens_max: int | None) -> None:
    if tree_tokens_max is not None and tokens > tree_tokens_max:
        raise UnmergeableError(
            f"its tree has {tokens} tokens, trainer.tree_tokens_max is {tree_tokens_max}"
        )


def _kept(samples: Sequence[MergedSample], deltas: Sequence[Delta]) -> list[int]:
    wanted = [False] * len(deltas)
    for sample in samples:
        wanted[sample.index] = True
    return kept_lengths(deltas, wanted=wanted)


def _wire(
    scored: ScoredGroup, samples: Sequence[MergedSample], tree: PrefixTree, *, has_teacher: bool
) -> MergedTree:
    counts = [sample.completion.output_tokens for sample in samples]
    leaves = [tree.leaf(sample.index, sample.length) for sample in samples]
    return MergedTree(
        group_id=scored.group_id,
        domain=scored.domain,
        tokens=_bytes(tree.tokens, INT32),
        segment_start=_bytes(tree.segment_start, INT32),
        segment_length=_bytes(tree.segment_length, INT32),
        segment_parent=_bytes(tree.segment_parent, INT32),
        entry_token=_bytes(_entry_tokens(samples, tree), INT32),
        entry_logprob=b"".join(sample.completion.logprobs for sample in samples),
        entry_version=_bytes(_entry_versions(samples), INT32),
        sample_first_entry=_bytes(np.cumsum([0, *counts]), INT32),
        sample_advantage=_bytes([sample.score.advantage for sample in samples], FLOAT32),
        sample_temperature=_bytes([sample.completion.temperature for sample in samples], FLOAT32),
        sample_leaf=_bytes(leaves, INT32),
        sample_episode=_bytes([sample.score.episode_index for sample in samples], INT32),
        sample_turn=_bytes([sample.score.sequence for sample in samples], INT32),
        sample_ids=tuple(sample.completion.completion_id for sample in samples),
        lineage=max(span.lineage for sample in samples for span in sample.completion.spans),
        entry_route=_entry_routes(samples),
        entry_teacher_logprob=_entry_teacher(samples, has_teacher=has_teacher),
    )


def _entry_teacher(samples: Sequence[MergedSample], *, has_teacher: bool) -> bytes:
    """The teacher's log-probabilities of all entries; empty in a run without a teacher.

    Raises:
        UnmergeableError: The teacher was not asked about a sample, or did not answer. The group
            fails here and not in its step, which would train the fewer groups.
    """
    lacking = [sample for sample in samples if not sample.completion.teacher_logprobs]
    if lacking and (has_teacher or len(lacking) < len(samples)):
        raise UnmergeableError(
            f"completion {lacking[0].completion.completion_id}: no log-probabilities of the "
            f"teacher, as {len(lacking)} of {len(samples)} that train"
        )
    return b"".join(sample.completion.teacher_logprobs for sample in samples)


def _entry_routes(samples: Sequence[MergedSample]) -> bytes:
    """Expert routes of all entries; empty if one sample has none.

    The trainer replays the routes of all entries or of none: with b"" it routes by itself.

    Raises:
        UnmergeableError: Rows differ in length, so the samples are of different models.
    """
    if not all(sample.completion.routes for sample in samples):
        return b""
    first = samples[0].completion
    for completion in (sample.completion for sample in samples):
        if completion.route_bytes != first.route_bytes:
            raise UnmergeableError(
                f"completion {completion.completion_id}: routes of {completion.route_bytes} bytes "
                f"a token, those of {first.completion_id} have {first.route_bytes}"
            )
    return b"".join(sample.completion.routes for sample in samples)


def _entry_tokens(samples: Sequence[MergedSample], tree: PrefixTree) -> npt.NDArray[np.int64]:
    """Layout index of every sampled token, sample by sample."""
    ranges = [
        span
        for sample in samples
        for span in tree.ranges(
            sample.index, sample.length - sample.completion.output_tokens, sample.length
        )
    ]
    # A sample's tokens are few contiguous ranges of the layout. Their indices are made without a
    # loop over tokens: count up through all of them, and shift each range to where it starts.
    starts = np.array([start for start, _ in ranges], np.int64)
    sizes = np.array([stop - start for start, stop in ranges], np.int64)
    shift: npt.NDArray[np.int64] = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    return np.arange(len(shift), dtype=np.int64) + shift


def _entry_versions(samples: Sequence[MergedSample]) -> npt.NDArray[np.int64]:
    spans = [span for sample in samples for span in sample.completion.spans]
    versions = np.array([span.version for span in spans], np.int64)
    counts = np.array([span.end - span.start for span in spans], np.int64)
    repeated: npt.NDArray[np.int64] = np.repeat(versions, counts)
    return repeated


def _summary(
    scored: ScoredGroup,
    samples: Sequence[MergedSample],
    tree: PrefixTree,
    *,
    merged: MergedTree,
    partition: int,
) -> MergedGroup:
    spans = [span for sample in samples for span in sample.completion.spans]
    return MergedGroup(
        group_id=scored.group_id,
        domain=scored.domain,
        purpose=scored.purpose,
        partition=partition,
        tree_sha256=hashlib.sha256(topics.encode(merged)).hexdigest(),
        tree_tokens=len(tree.tokens),
        loss_tokens=sum(sample.completion.output_tokens for sample in samples),
        attention_pairs=tree.attention_pairs,
        request_tokens=sum(sample.length for sample in samples),
        append_tokens=_append_tokens(samples, tree),
        version_min=min(span.version for span in spans),
        scored=_scored(scored),
        solved=_solved(scored),
    )


def _append_tokens(samples: Sequence[MergedSample], tree: PrefixTree) -> int:
    """Tokens of append-only merging: each sequence is trained inside its continuation, if any.

    In layout order a subtree is one interval. So a sample is continued by another one of its
    episode exactly if the episode's next leaf lies inside the sample's own subtree.
    """
    leaves = sorted(
        (sample.score.episode_index, tree.leaf(sample.index, sample.length), position)
        for position, sample in enumerate(samples)
    )
    total = 0
    for rank, (episode, _, position) in enumerate(leaves):
        sample = samples[position]
        following = leaves[rank + 1] if rank + 1 < len(leaves) else None
        is_continued = (
            following is not None
            and following[0] == episode
            and following[1] < tree.subtree_end(sample.index, sample.length)
        )
        total += 0 if is_continued else sample.length
    return total


def _bytes(values: npt.ArrayLike, dtype: "np.dtype[np.int32] | np.dtype[np.float32]") -> bytes:
    return np.asarray(values).astype(dtype, copy=False).tobytes()
