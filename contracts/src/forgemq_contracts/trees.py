"""The prefix tree of a group on the wire; it does not depend on the step it will train in."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.fields import DomainName, GroupId
from forgemq_contracts.rules import check_finite, check_ids, check_items, check_rows


class MergedTree(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Unique tokens in heavy-first depth-first order, and one entry per sampled token.

    A tree has N tokens in M segments; a segment is a run of tokens without a branch. It has E
    entries, one for each token that was sampled, and S samples, one for each completion; entries
    are ordered by sample. Parent, position and subtree end of every token follow from the
    segments in O(N). All arrays are little-endian.
    """

    group_id: GroupId
    domain: DomainName
    tokens: Annotated[bytes, Meta(description="int32[N] token ids in layout order.")]
    segment_start: Annotated[bytes, Meta(description="int32[M] first token, pre-order.")]
    segment_length: Annotated[bytes, Meta(description="int32[M], at least 1.")]
    segment_parent: Annotated[bytes, Meta(description="int32[M] segment index, -1 for a root.")]
    entry_token: Annotated[bytes, Meta(description="int32[E] tree index of the sampled token.")]
    entry_logprob: Annotated[bytes, Meta(description="float32[E] behaviour log-probability.")]
    entry_version: Annotated[bytes, Meta(description="int32[E] weight version that sampled it.")]
    sample_first_entry: Annotated[
        bytes, Meta(description="int32[S + 1] index of each sample's first entry; then E.")
    ]
    sample_advantage: Annotated[bytes, Meta(description="float32[S].")]
    sample_temperature: Annotated[bytes, Meta(description="float32[S], above 0.")]
    sample_leaf: Annotated[bytes, Meta(description="int32[S] tree index of the last token.")]
    sample_episode: Annotated[bytes, Meta(description="int32[S] episode index in the group.")]
    sample_turn: Annotated[bytes, Meta(description="int32[S] sequence within the episode.")]
    sample_ids: Annotated[tuple[str, ...], Meta(description="Completion ids, S of them.")]
    lineage: Annotated[int, Meta(ge=0, description="Newest lineage among the entries.")] = 0
    entry_route: Annotated[
        bytes,
        Meta(
            description="int16[E, layers, top_k] expert routes of each entry, as in "
            "FinishedCompletion.routes; b'' for dense models, or if one sample has none."
        ),
    ] = b""
    entry_reference_logprob: Annotated[
        bytes, Meta(description="float32[E] under a reference policy, nats; b'' without one.")
    ] = b""
    entry_teacher_logprob: Annotated[
        bytes,
        Meta(description="float32[E] under the teacher of `[distillation]`, nats; b'' without."),
    ] = b""

    def __post_init__(self) -> None:
        check_ids("tokens", self.tokens)
        segments = check_ids("segment_start", self.segment_start)
        check_items("segment_length", self.segment_length, count=segments)
        check_items("segment_parent", self.segment_parent, count=segments)
        self._check_entries()
        self._check_samples()

    def _check_entries(self) -> None:
        entries = check_ids("entry_token", self.entry_token)
        check_finite("entry_logprob", self.entry_logprob, count=entries)
        check_items("entry_version", self.entry_version, count=entries)
        if self.entry_reference_logprob:
            check_finite("entry_reference_logprob", self.entry_reference_logprob, count=entries)
        if self.entry_teacher_logprob:
            check_finite("entry_teacher_logprob", self.entry_teacher_logprob, count=entries)
        check_rows("entry_route", self.entry_route, count=entries)

    def _check_samples(self) -> None:
        samples = len(self.sample_ids)
        check_items("sample_first_entry", self.sample_first_entry, count=samples + 1)
        check_finite("sample_advantage", self.sample_advantage, count=samples)
        check_finite("sample_temperature", self.sample_temperature, count=samples)
        check_items("sample_leaf", self.sample_leaf, count=samples)
        check_items("sample_episode", self.sample_episode, count=samples)
        check_items("sample_turn", self.sample_turn, count=samples)
