"""Completions that the weights in training have just sampled, as trees that a probe can run.

Trees come only when whole groups end; in a short step none may. Completions come all the time, a
second after the engines have loaded the weights. They are kept with their ancestors, of which a
completion has only what is new in it, and never train from here.

Lifecycle: `observe` every finished completion; `trees` before an update, as often as wanted. Of a
chain that began before the first one observed, or that was forgotten, nothing is probed.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from forgemq_contracts.accounting import is_candidate
from forgemq_contracts.completions import FinishedCompletion, TurnPart
from forgemq_contracts.rules import ITEM_BYTES
from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.tree import Integers

TREES_MAX = 64
"""Completions given to one probe: enough to fill the budget of a small step; in a large one each
has thousands of tokens."""

OBJECT_BYTES = 800
"""Memory of a kept completion beside its arrays: identifiers, numbers and spans. Of completions of
60 tokens that is more than their tokens and log-probabilities."""

_NO_TURN = TurnPart(sequence=0, protocol="chat_completions", body_digest="")
"""In place of a kept completion's messages and tools, which may be larger than all its tokens, as
may the likeliest tokens that a client asked for."""

OTHER_VERSION = -1
"""Stands in a probe's tree for every version but the wanted one of the wanted lineage."""


class HeldWeights(NamedTuple):
    """One version of one life of the trainer; version 0 is the base model in every life."""

    lineage: int
    version: int


class FreshCompletions:
    """The newest completions, within a bound on their bytes; the oldest are forgotten first."""

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._by_id: dict[str, FinishedCompletion] = {}

    def observe(self, completion: FinishedCompletion) -> None:
        """Keep a completion; of several of one request the first one counts."""
        if not is_candidate(completion) or completion.request_id in self._by_id:
            return
        completion = msgspec.structs.replace(
            completion, turn=_NO_TURN, top_tokens=None, teacher_logprobs=b""
        )
        self._by_id[completion.request_id] = completion
        self._bytes += _size(completion)
        while self._bytes > self._bytes_max:
            oldest = self._by_id.pop(next(iter(self._by_id)))
            self._bytes -= _size(oldest)

    def trees(self, weights: HeldWeights, *, but: frozenset[str]) -> tuple[MergedTree, ...]:
        """One tree for each of the newest completions that these weights sampled in.

        Args:
            weights: Those in training.
            but: Groups that are not wanted.
        """
        found: list[MergedTree] = []
        for completion in reversed(self._by_id.values()):
            if len(found) == TREES_MAX:
                break
            if completion.group_id in but or not _is_sampled_by(completion, weights):
                continue
            chain = _chain(completion, self._by_id)
            if chain is not None:
                found.append(_tree(chain, weights))
        return tuple(found)


class _ChainLink(NamedTuple):
    """A completion of a chain, and how many tokens of the path it and its ancestors give."""

    completion: FinishedCompletion
    end: int

    @property
    def first_output(self) -> int:
        """Place on the path of the first token that it sampled."""
        return self.completion.shared_prefix_tokens + _tokens(self.completion.context)

    @property
    def outputs(self) -> int:
        """Tokens on the path that it sampled."""
        return max(0, self.end - self.first_output)

    @property
    def own_bytes(self) -> int:
        """Of the tokens that the path has from it."""
        return ITEM_BYTES * (self.end - self.completion.shared_prefix_tokens)


def _size(completion: FinishedCompletion) -> int:
    return (
        OBJECT_BYTES
        + len(completion.context)
        + len(completion.output)
        + len(completion.logprobs)
        + len(completion.routes)
    )


def _is_comparable(completion: FinishedCompletion) -> bool:
    """Whether its log-probabilities are those of the policy's whole distribution."""
    return completion.support == "full" and completion.temperature > 0


def _is_sampled_by(completion: FinishedCompletion, weights: HeldWeights) -> bool:
    is_theirs = _versions(completion, weights) != OTHER_VERSION
    return _is_comparable(completion) and bool(is_theirs.any())


def _versions(completion: FinishedCompletion, weights: HeldWeights) -> Integers:
    """The wanted version where these weights sampled, `OTHER_VERSION` elsewhere."""
    versions = np.full(_tokens(completion.output), OTHER_VERSION, dtype=np.int64)
    for span in completion.spans:
        is_theirs = span.version == weights.version and (
            span.version == 0 or span.lineage == weights.lineage
        )
        if is_theirs:
            versions[span.start : span.end] = span.version
    return versions


def _chain(
    completion: FinishedCompletion, by_id: Mapping[str, FinishedCompletion]
) -> list[_ChainLink] | None:
    """The completion and the ancestors whose tokens it has, from the root; None if one lacks."""
    length = completion.shared_prefix_tokens + _tokens(completion.context + completion.output)
    links, at, wanted = (
        [_ChainLink(completion, length)],
        completion,
        completion.shared_prefix_tokens,
    )
    # Walk up: each ancestor gives only its own tokens below what its child shares with it.
    while wanted:
        parent = by_id.get(at.parent_id or "")
        if parent is None:
            return None
        if wanted > parent.shared_prefix_tokens:
            links.append(_ChainLink(parent, wanted))
            wanted = parent.shared_prefix_tokens
        at = parent
    return links[::-1]


def _tree(chain: list[_ChainLink], weights: HeldWeights) -> MergedTree:
    """The chain as a tree of one path; ancestors' outputs are entries too, for their routes."""
    leaf = chain[-1].completion
    sampled = [link for link in chain if _is_comparable(link.completion) and link.outputs]
    if not leaf.routes or not all(link.completion.routes for link in sampled):
        sampled = chain[-1:]
    counts = [link.outputs for link in sampled]
    own = [link.completion for link in sampled]

    def joined(arrays: list[bytes], *, item_bytes: int = ITEM_BYTES) -> bytes:
        pairs = zip(arrays, counts, strict=True)
        return b"".join(array[: item_bytes * count] for array, count in pairs)

    pieces = [
        (link.completion.context + link.completion.output)[: link.own_bytes] for link in chain
    ]
    route_bytes = len(leaf.routes) // max(1, _tokens(leaf.output))
    return MergedTree(
        group_id=leaf.group_id,
        domain="probe",
        tokens=b"".join(pieces),
        segment_start=_int32([0]),
        segment_length=_int32([chain[-1].end]),
        segment_parent=_int32([-1]),
        entry_token=_int32([n for link in sampled for n in range(link.first_output, link.end)]),
        entry_logprob=joined([each.logprobs for each in own]),
        entry_version=joined([_int32(_versions(each, weights)) for each in own]),
        sample_first_entry=_int32([0, *itertools.accumulate(counts)]),
        sample_advantage=np.zeros(len(own), "<f4").tobytes(),
        sample_temperature=np.array([each.temperature for each in own], "<f4").tobytes(),
        sample_leaf=_int32([link.end - 1 for link in sampled]),
        sample_episode=_int32([0] * len(own)),
        sample_turn=_int32(range(len(own))),
        sample_ids=tuple(each.request_id for each in own),
        entry_route=joined([each.routes for each in own], item_bytes=route_bytes),
    )


def _tokens(array: bytes) -> int:
    return len(array) // ITEM_BYTES


def _int32(values: ArrayLike) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()
