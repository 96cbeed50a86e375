"""What comparing a prefix tree with its group's other records shows.

G4: each sample is rebuilt from the tree and compared with what the engine sampled. G2: each
completion is followed from the episode's manifest through the scores into the tree, so that none
is lost. If a record is not on the log, what depends on it is named as unknown.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from forgemq_contracts.arrays import pack_floats, unpack_floats, unpack_ids
from forgemq_contracts.audit import TreeFacts
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.domains import trains_truncated
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.groups import ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.trees import MergedTree
from forgemq_run_view.trajectory import context_bytes, versions

DIFFERENCES_KEPT_MAX = 10
"""Enough to see what is wrong; a broken tree differs everywhere."""


class TreeSample(Struct, frozen=True, kw_only=True):
    """One completion rebuilt from a prefix tree."""

    completion_id: str
    path: bytes
    entry_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    logprobs: bytes
    versions: tuple[int, ...]
    temperature: float
    advantage: float


def tree_samples(tree: MergedTree) -> Iterator[TreeSample]:
    """The samples of a tree in its order; `path` is context and output as int32 bytes."""
    starts = unpack_ids(tree.segment_start)
    parents = unpack_ids(tree.segment_parent)
    lengths = unpack_ids(tree.segment_length)
    firsts = unpack_ids(tree.sample_first_entry)
    entry_tokens = unpack_ids(tree.entry_token)
    entry_versions = unpack_ids(tree.entry_version)
    temperatures = unpack_floats(tree.sample_temperature)
    advantages = unpack_floats(tree.sample_advantage)
    leaves = unpack_ids(tree.sample_leaf)
    for index, completion_id in enumerate(tree.sample_ids):
        low, high = firsts[index], firsts[index + 1]
        runs = _runs(leaves[index], starts=starts, lengths=lengths, parents=parents)
        yield TreeSample(
            completion_id=completion_id,
            path=b"".join(tree.tokens[4 * first : 4 * end] for first, end in runs),
            entry_tokens=tuple(entry_tokens[low:high]),
            output_tokens=_last(runs, count=high - low),
            logprobs=tree.entry_logprob[4 * low : 4 * high],
            versions=tuple(entry_versions[low:high]),
            temperature=temperatures[index],
            advantage=advantages[index],
        )


def first_ends(messages: Iterable[Message]) -> tuple[FinishedEpisode, ...]:
    """The end that counts of each episode of a group: its first on the log."""
    ends: dict[int, tuple[int, FinishedEpisode]] = {}
    for message in messages:
        record = message.record
        if not isinstance(record, FinishedEpisode):
            continue
        known = ends.get(record.index)
        if known is None or message.offset < known[0]:
            ends[record.index] = (message.offset, record)
    return tuple(record for _, (_, record) in sorted(ends.items()))


def tree_facts(
    tree: MergedTree,
    *,
    sha256: str,
    completions: Mapping[str, FinishedCompletion],
    scored: ScoredGroup | None,
    ends: Iterable[FinishedEpisode],
    configuration: RunConfiguration,
) -> TreeFacts:
    """Compare every sample of a tree with its completion, its score and its manifest.

    Args:
        tree: As on merged-trees.
        sha256: Of its wire bytes.
        completions: The completions of the group, by request id.
        scored: The group's advantages; None if they are not on the log.
        ends: The end that counts of each episode of the group.
        configuration: Of the run; it says which episodes train.
    """
    differences: list[str] = []
    request_pairs = 0
    advantages = (
        {each.completion_id: each.advantage for each in scored.completions} if scored else None
    )
    for sample in tree_samples(tree):
        length = len(sample.path) // 4
        request_pairs += length * (length + 1) // 2
        completion = completions.get(sample.completion_id)
        if completion is None:
            differences.append(f"{sample.completion_id}: no such completion on the log")
            continue
        differences += _differences(sample, completion=completion, completions=completions)
        if advantages is not None and pack_floats(
            [advantages.get(sample.completion_id, float("nan"))]
        ) != pack_floats([sample.advantage]):
            differences.append(f"{sample.completion_id}: advantage is not the scored one")
    lost, unknown = _followed(
        tree,
        completions=completions,
        scored=scored,
        ends=tuple(ends),
        configuration=configuration,
    )
    entry_versions = unpack_ids(tree.entry_version)
    return TreeFacts(
        group_id=tree.group_id,
        sha256=sha256,
        completion_ids=tree.sample_ids,
        entries=len(entry_versions),
        version_min=min(entry_versions, default=None),
        request_pairs=request_pairs,
        differences=_named(tree, differences),
        lost=_named(tree, lost),
        unknown=_named(tree, unknown),
    )


def _named(tree: MergedTree, texts: list[str]) -> tuple[str, ...]:
    return tuple(f"{tree.group_id} {text}" for text in texts[:DIFFERENCES_KEPT_MAX])


def _followed(
    tree: MergedTree,
    *,
    completions: Mapping[str, FinishedCompletion],
    scored: ScoredGroup | None,
    ends: tuple[FinishedEpisode, ...],
    configuration: RunConfiguration,
) -> tuple[list[str], list[str]]:
    """What was lost between the manifests and the tree, and what cannot be known."""
    if scored is None:
        return [], ["its scores are not on the log"]
    lost, unknown = _unscored(scored, ends, configuration=configuration)
    there = set(tree.sample_ids)
    for each in scored.completions:
        if each.completion_id in there:
            continue
        completion = completions.get(each.completion_id)
        if completion is None:
            unknown.append(f"{each.completion_id} was scored and its completion is not on the log")
        elif completion.support == "full" and completion.output:
            lost.append(f"{each.completion_id} was scored and is not in the tree")
    return lost, unknown


def _unscored(
    scored: ScoredGroup, ends: tuple[FinishedEpisode, ...], *, configuration: RunConfiguration
) -> tuple[list[str], list[str]]:
    """Completions of manifests that have no score, and what cannot be known.

    The manifest of an episode that was left out of the loss as a whole is not followed: it was
    masked, or a limit ended it and `rewards.truncated` leaves those out.
    """
    trained = {each.episode_index for each in scored.completions}
    is_cut_trained = trains_truncated(configuration, domain=scored.domain)
    left_out = {
        each.episode_id
        for index, each in enumerate(scored.episodes)
        if index not in trained
        and (each.is_masked or (each.truncated_by is not None and not is_cut_trained))
    }
    counted = {each.episode_id for each in scored.episodes}
    known = {(each.episode_index, each.completion_id) for each in scored.completions}
    lost = [
        f"episode {end.episode_id} ended and has no score"
        for end in ends
        if end.episode_id not in counted
    ]
    lost += [
        f"{entry.completion_id} is in the manifest of {end.episode_id} and was not scored"
        for end in ends
        if end.episode_id in counted - left_out
        for entry in end.manifest
        if (end.index, entry.completion_id) not in known
    ]
    size = ends[0].group_size if ends else len(scored.episodes)
    if len(ends) < size or not ends:
        return lost, [f"{len(ends)} of {size} ends of episodes are on the log"]
    return lost, []


def _differences(
    sample: TreeSample,
    *,
    completion: FinishedCompletion,
    completions: Mapping[str, FinishedCompletion],
) -> list[str]:
    try:
        expected = context_bytes(completion, completions) + completion.output
    except KeyError as error:
        return [f"{sample.completion_id}: context cannot be rebuilt, {error}"]
    checks = {
        "tokens are not those sent and sampled": sample.path == expected,
        "loss entries are not the sampled tokens": sample.entry_tokens == sample.output_tokens
        and 4 * len(sample.entry_tokens) == len(completion.output),
        "log-probabilities are not the engine's": sample.logprobs == completion.logprobs,
        "weight versions are not the engine's": sample.versions == versions(completion),
        "temperature is not the one sampled at": pack_floats([sample.temperature])
        == pack_floats([completion.temperature]),
        f"support was {completion.support}, not full": completion.support == "full",
    }
    return [f"{sample.completion_id}: {text}" for text, holds in checks.items() if not holds]


def _runs(
    leaf: int, *, starts: list[int], lengths: list[int], parents: list[int]
) -> list[tuple[int, int]]:
    """Token ranges of the path from the root to the token `leaf`, in path order."""
    segment = bisect_right(starts, leaf) - 1
    runs = [(starts[segment], leaf + 1)]
    while parents[segment] >= 0:
        segment = parents[segment]
        runs.append((starts[segment], starts[segment] + lengths[segment]))
    runs.reverse()
    return runs


def _last(runs: list[tuple[int, int]], *, count: int) -> tuple[int, ...]:
    """Tree indices of the last tokens of a path."""
    indices: list[int] = []
    for first, end in reversed(runs):
        if len(indices) >= count:
            break
        indices[:0] = range(max(first, end - (count - len(indices))), end)
    return tuple(indices)
