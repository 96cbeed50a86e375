"""Prefix trees as arrays that tell every token's ancestors.

A forest is one or more trees in one layout of N tokens, depth first: a token's subtree is the
range [token, subtree_end). So "key is an ancestor of query, or the query itself" is
`key <= query < subtree_end[key]`, and nothing of size N x N has to exist.

Example: tokens a b c, then two children of c: d and e. The layout is a b c d e, the parents are
-1 0 1 2 2, the subtree ends 5 5 5 4 5. Query e (4) sees key c (2 <= 4 < 5) but not d (3 <= 4, but
4 is not below 4).

N tokens, M segments (runs without a branch), E entries (sampling events), S samples, G groups.
The wire form is `contracts.trees.MergedTree`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from forgemq_contracts.trees import MergedTree

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


LOGPROB_ROUNDING = 1e-3
"""Nats. An engine's log-softmax of a near-certain token may round to a little above 0."""


class InvalidTreeError(ValueError):
    """A tree's arrays contradict each other; the message names the field and the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Trees of one or more groups in one layout; every array is int64 or float64.

    Attributes:
        group_ids: G ids, in layout order.
        group_end_G: Tokens of the layout up to and including the group.
        tokens_N: Token ids.
        parent_N: Layout index of the parent token, -1 for a root.
        position_N: Depth from 0; the position for rotary embedding.
        subtree_end_N: End of the token's subtree in the layout.
        segment_start_M: First token of each segment, pre-order.
        segment_end_M: One past its last token.
        segment_parent_M: Segment index, -1 for a root.
        entry_token_E: Layout index of the sampled token.
        entry_sample_E: Sample the entry belongs to; samples are contiguous.
        entry_group_E: Index into `group_ids`.
        entry_logprob_E: Behaviour log-probability, nats.
        entry_version_E: Weight version that sampled it.
        entry_advantage_E: Of its sample.
        entry_temperature_E: Of its sample, above 0.
        entry_reference_E: Log-probability under a reference policy, nats; NaN if not recorded.
        entry_teacher_E: Log-probability under the teacher, nats; NaN without one.
        entry_is_supervised_E: True for tokens of replies that were given and not sampled.
        entry_start_E: Log-probability under the policy at the step's beginning, nats; NaN unless
            the loss asks for it (`step_updates.py`).
        entry_route_ER: int16, recorded experts of all layers; R is 0 if no group has expert routes.
        entry_is_routed_E: True if the recorded experts are those of the pass that sampled it.
        sample_count: S.
        sample_length_S: Tokens of each sample, with its whole context.
        request_tokens: Tokens of all samples, each with its whole context.
        request_pairs: Pairs that attention would visit in them.
        trunk_tokens: Tokens on the path to the last sample of an episode.
    """

    group_ids: tuple[str, ...]
    group_end_G: Integers
    tokens_N: Integers
    parent_N: Integers
    position_N: Integers
    subtree_end_N: Integers
    segment_start_M: Integers
    segment_end_M: Integers
    segment_parent_M: Integers
    entry_token_E: Integers
    entry_sample_E: Integers
    entry_group_E: Integers
    entry_logprob_E: Floats
    entry_version_E: Integers
    entry_advantage_E: Floats
    entry_temperature_E: Floats
    entry_reference_E: Floats
    entry_teacher_E: Floats
    entry_start_E: Floats
    entry_route_ER: NDArray[np.int16]
    entry_is_routed_E: NDArray[np.bool_]
    entry_is_supervised_E: NDArray[np.bool_]
    sample_count: int
    sample_length_S: Integers
    request_tokens: int
    request_pairs: int
    trunk_tokens: int

    @property
    def token_count(self) -> int:
        """N."""
        return len(self.tokens_N)

    @property
    def entry_count(self) -> int:
        """E."""
        return len(self.entry_token_E)

    @property
    def attention_pairs(self) -> int:
        """Pairs that attention visits: the sum of depth + 1 over the tokens."""
        return int(self.position_N.sum()) + self.token_count


def read_tree(tree: MergedTree, *, is_supervised: bool = False) -> Forest:
    """The forest of one group, from its wire form; supervised if its domain is.

    Raises:
        InvalidTreeError: an array has a wrong length or breaks a rule of the layout.
    """
    tokens_N = _integers(tree.tokens, "tokens")
    start_M = _integers(tree.segment_start, "segment_start")
    length_M = _integers(tree.segment_length, "segment_length")
    parent_M = _integers(tree.segment_parent, "segment_parent")
    _check_segments(start_M, length_M, parent_M, token_count=len(tokens_N))
    depth_M, end_M = _segment_depths_and_ends(start_M, length_M, parent_M)
    within_N = np.arange(len(tokens_N)) - np.repeat(start_M, length_M)
    parent_N = np.arange(-1, len(tokens_N) - 1)
    parent_N[start_M] = np.where(parent_M < 0, -1, (start_M + length_M)[parent_M] - 1)
    entries = _read_entries(tree, parent_N=parent_N)
    position_N = np.repeat(depth_M, length_M) + within_N
    leaf_S = _leaves(tree, token_count=len(tokens_N), sample_count=entries.sample_count)
    length_S = position_N[leaf_S] + 1
    subtree_end_N = np.repeat(end_M, length_M)
    return Forest(
        group_ids=(tree.group_id,),
        group_end_G=np.array([len(tokens_N)], dtype=np.int64),
        tokens_N=tokens_N,
        parent_N=parent_N,
        position_N=position_N,
        subtree_end_N=subtree_end_N,
        segment_start_M=start_M,
        segment_end_M=start_M + length_M,
        segment_parent_M=parent_M,
        entry_token_E=entries.token_E,
        entry_sample_E=entries.sample_E,
        entry_group_E=np.zeros(len(entries.token_E), dtype=np.int64),
        entry_logprob_E=entries.logprob_E,
        entry_version_E=entries.version_E,
        entry_advantage_E=entries.advantage_E,
        entry_temperature_E=entries.temperature_E,
        entry_reference_E=entries.reference_E,
        entry_teacher_E=entries.teacher_E,
        entry_start_E=np.full(len(entries.token_E), np.nan),
        entry_route_ER=entries.route_ER,
        entry_is_routed_E=_is_of_newest_version(entries) & bool(entries.route_ER.shape[1]),
        entry_is_supervised_E=np.full(len(entries.token_E), is_supervised),
        sample_count=entries.sample_count,
        sample_length_S=length_S,
        request_tokens=int(length_S.sum()),
        request_pairs=int((length_S * (length_S + 1) // 2).sum()),
        trunk_tokens=_trunk_tokens(tree, leaf_S=leaf_S, subtree_end_N=subtree_end_N),
    )


def joined(forests: Sequence[Forest]) -> Forest:
    """Several forests side by side in one layout; no token sees tokens of another forest.

    Raises:
        ValueError: no forest was given.
    """
    if not forests:
        raise ValueError("joined needs at least one forest")
    if len(forests) == 1:
        return forests[0]
    tokens = _offsets([forest.token_count for forest in forests])
    segments = _offsets([len(forest.segment_start_M) for forest in forests])
    samples = _offsets([forest.sample_count for forest in forests])
    groups = _offsets([len(forest.group_ids) for forest in forests])

    def shifted(name: str, offsets: list[int]) -> Integers:
        arrays = [getattr(forest, name) for forest in forests]
        return np.concatenate([a + offset for a, offset in zip(arrays, offsets, strict=True)])

    def shifted_parents(name: str, offsets: list[int]) -> Integers:
        arrays = [getattr(forest, name) for forest in forests]
        return np.concatenate(
            [np.where(a < 0, -1, a + offset) for a, offset in zip(arrays, offsets, strict=True)]
        )

    return Forest(
        group_ids=tuple(group for forest in forests for group in forest.group_ids),
        group_end_G=shifted("group_end_G", tokens),
        tokens_N=np.concatenate([forest.tokens_N for forest in forests]),
        parent_N=shifted_parents("parent_N", tokens),
        position_N=np.concatenate([forest.position_N for forest in forests]),
        subtree_end_N=shifted("subtree_end_N", tokens),
        segment_start_M=shifted("segment_start_M", tokens),
        segment_end_M=shifted("segment_end_M", tokens),
        segment_parent_M=shifted_parents("segment_parent_M", segments),
        entry_token_E=shifted("entry_token_E", tokens),
        entry_sample_E=shifted("entry_sample_E", samples),
        entry_group_E=shifted("entry_group_E", groups),
        entry_logprob_E=np.concatenate([forest.entry_logprob_E for forest in forests]),
        entry_version_E=np.concatenate([forest.entry_version_E for forest in forests]),
        entry_advantage_E=np.concatenate([forest.entry_advantage_E for forest in forests]),
        entry_temperature_E=np.concatenate([forest.entry_temperature_E for forest in forests]),
        entry_reference_E=np.concatenate([forest.entry_reference_E for forest in forests]),
        entry_teacher_E=np.concatenate([forest.entry_teacher_E for forest in forests]),
        entry_start_E=np.concatenate([forest.entry_start_E for forest in forests]),
        entry_route_ER=_joined_expert_routes([forest.entry_route_ER for forest in forests]),
        entry_is_routed_E=np.concatenate([forest.entry_is_routed_E for forest in forests]),
        entry_is_supervised_E=np.concatenate([forest.entry_is_supervised_E for forest in forests]),
        sample_count=sum(forest.sample_count for forest in forests),
        sample_length_S=np.concatenate([forest.sample_length_S for forest in forests]),
        request_tokens=sum(forest.request_tokens for forest in forests),
        request_pairs=sum(forest.request_pairs for forest in forests),
        trunk_tokens=sum(forest.trunk_tokens for forest in forests),
    )


def _joined_expert_routes(routes: Sequence[NDArray[np.int16]]) -> NDArray[np.int16]:
    width = max(route.shape[1] for route in routes)
    return np.concatenate(
        [
            route if route.shape[1] == width else np.zeros((len(route), width), dtype=np.int16)
            for route in routes
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entries:
    token_E: Integers
    sample_E: Integers
    logprob_E: Floats
    version_E: Integers
    advantage_E: Floats
    temperature_E: Floats
    reference_E: Floats
    teacher_E: Floats
    route_ER: NDArray[np.int16]
    sample_count: int


def _read_entries(tree: MergedTree, *, parent_N: Integers) -> _Entries:
    token_E = _integers(tree.entry_token, "entry_token")
    count = len(token_E)
    logprob_E = _floats(tree.entry_logprob, "entry_logprob", count=count)
    version_E = _integers(tree.entry_version, "entry_version")
    if len(version_E) != count:
        raise InvalidTreeError(f"entry_version: {len(version_E)} values for {count} entries")
    if count and (token_E.min() < 0 or token_E.max() >= len(parent_N)):
        raise InvalidTreeError(f"entry_token: must be in 0..{len(parent_N) - 1}")
    if count and parent_N[token_E].min() < 0:
        raise InvalidTreeError("entry_token: a root has no context to be sampled from")
    if count and logprob_E.max() > LOGPROB_ROUNDING:
        raise InvalidTreeError(f"entry_logprob: must be at most 0, got {logprob_E.max()}")
    first_S = _integers(tree.sample_first_entry, "sample_first_entry")
    if len(first_S) == 0 or first_S[0] != 0 or first_S[-1] != count or (np.diff(first_S) < 0).any():
        raise InvalidTreeError(f"sample_first_entry: must rise from 0 to {count}")
    samples = len(first_S) - 1
    advantage_S = _floats(tree.sample_advantage, "sample_advantage", count=samples)
    temperature_S = _floats(tree.sample_temperature, "sample_temperature", count=samples)
    if samples and temperature_S.min() <= 0:
        raise InvalidTreeError(f"sample_temperature: above 0, got {temperature_S.min()}")
    entries_S = np.diff(first_S)
    return _Entries(
        token_E=token_E,
        sample_E=np.repeat(np.arange(samples), entries_S),
        logprob_E=logprob_E,
        version_E=version_E,
        advantage_E=np.repeat(advantage_S, entries_S),
        temperature_E=np.repeat(temperature_S, entries_S),
        reference_E=_known(tree.entry_reference_logprob, "entry_reference_logprob", count=count),
        teacher_E=_known(tree.entry_teacher_logprob, "entry_teacher_logprob", count=count),
        route_ER=_expert_routes(tree, count=count),
        sample_count=samples,
    )


def _known(data: bytes, field: str, *, count: int) -> Floats:
    return _floats(data, field, count=count) if data else np.full(count, np.nan)


def _expert_routes(tree: MergedTree, *, count: int) -> NDArray[np.int16]:
    size = len(tree.entry_route)
    if size == 0 or count == 0:
        return np.zeros((count, 0), dtype=np.int16)
    if size % (2 * count):
        raise InvalidTreeError(f"entry_route: {size} bytes are no int16 array of {count} rows")
    return np.frombuffer(tree.entry_route, dtype="<i2").reshape(count, -1)


def _is_of_newest_version(entries: _Entries) -> NDArray[np.bool_]:
    """Whether an entry's version is that of its sample's last entry; samples are contiguous."""
    last_S = np.searchsorted(entries.sample_E, np.arange(entries.sample_count), "right") - 1
    is_newest: NDArray[np.bool_] = entries.version_E == entries.version_E[last_S[entries.sample_E]]
    return is_newest


def _leaves(tree: MergedTree, *, token_count: int, sample_count: int) -> Integers:
    leaf_S = _integers(tree.sample_leaf, "sample_leaf")
    if len(leaf_S) != sample_count:
        raise InvalidTreeError(f"sample_leaf: {len(leaf_S)} values for {sample_count} samples")
    if sample_count and (leaf_S.min() < 0 or leaf_S.max() >= token_count):
        raise InvalidTreeError(f"sample_leaf: must be in 0..{token_count - 1}")
    return leaf_S


def _trunk_tokens(tree: MergedTree, *, leaf_S: Integers, subtree_end_N: Integers) -> int:
    episode_S = _integers(tree.sample_episode, "sample_episode")
    turn_S = _integers(tree.sample_turn, "sample_turn")
    if not len(episode_S) == len(turn_S) == len(leaf_S):
        raise InvalidTreeError(
            f"sample_episode, sample_turn: {len(episode_S)} and {len(turn_S)} values for "
            f"{len(leaf_S)} samples"
        )
    # Mark the leaf of each episode's last sample; a token is on the trunk if its subtree has a
    # mark, that is if the running count of marks differs between both ends of its range.
    order = np.lexsort((turn_S, episode_S))
    is_last = np.append(np.diff(episode_S[order]) != 0, [True] * bool(len(order)))
    marks = np.zeros(len(subtree_end_N) + 1, dtype=np.int64)
    marks[leaf_S[order[is_last]] + 1] = 1
    below = np.cumsum(marks)
    return int((below[subtree_end_N] > below[:-1]).sum())


def _check_segments(
    start_M: Integers, length_M: Integers, parent_M: Integers, *, token_count: int
) -> None:
    count = len(start_M)
    if count == 0:
        raise InvalidTreeError("segment_start: a tree has at least one segment")
    if len(length_M) != count or len(parent_M) != count:
        raise InvalidTreeError(
            f"segment_length, segment_parent: {len(length_M)} and {len(parent_M)} values "
            f"for {count} segments"
        )
    if length_M.min() < 1:
        raise InvalidTreeError(f"segment_length: at least 1, got {length_M.min()}")
    expected_M = np.concatenate([[0], np.cumsum(length_M)])
    if not np.array_equal(start_M, expected_M[:-1]) or expected_M[-1] != token_count:
        raise InvalidTreeError(f"segment_start: segments must cover {token_count} tokens in order")
    # Pre-order: a segment's parent is on the path from the root to the previous segment.
    path: list[int] = []
    for segment, parent in enumerate(parent_M.tolist()):
        while path and path[-1] != parent:
            path.pop()
        if not path and parent != -1:
            raise InvalidTreeError(
                f"segment_parent: segment {segment} names {parent}, which is not on the path "
                "before it; segments are in pre-order"
            )
        path.append(segment)


def _segment_depths_and_ends(
    start_M: Integers, length_M: Integers, parent_M: Integers
) -> tuple[Integers, Integers]:
    """Position of each segment's first token, and the end of its subtree in the layout."""
    parents, lengths = parent_M.tolist(), length_M.tolist()
    depths = [0] * len(parents)
    ends = (start_M + length_M).tolist()
    for segment, parent in enumerate(parents):
        if parent >= 0:
            depths[segment] = depths[parent] + lengths[parent]
    # In reverse, so that a child's end is final before its parent takes it over.
    for segment in range(len(parents) - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0 and ends[segment] > ends[parent]:
            ends[parent] = ends[segment]
    return np.array(depths, dtype=np.int64), np.array(ends, dtype=np.int64)


def _integers(data: bytes, field: str) -> Integers:
    if len(data) % 4:
        raise InvalidTreeError(f"{field}: {len(data)} bytes are no int32 array")
    return np.frombuffer(data, dtype="<i4").astype(np.int64)


def _floats(data: bytes, field: str, *, count: int) -> Floats:
    if len(data) != 4 * count:
        raise InvalidTreeError(f"{field}: {len(data)} bytes for {count} float32 values")
    values = np.frombuffer(data, dtype="<f4").astype(np.float64)
    if not np.isfinite(values).all():
        raise InvalidTreeError(f"{field}: every value must be finite")
    return values


def _offsets(counts: list[int]) -> list[int]:
    return [0, *np.cumsum(counts[:-1]).tolist()]
