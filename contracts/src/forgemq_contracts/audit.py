"""What stays of a group when its completions and its tree are trimmed: what an audit found."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.fields import CompletionId, GroupId, Sha256, TokenCount, Version


class TreeFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the audit keeps of one tree, compared sample by sample with the engine's records."""

    group_id: GroupId
    sha256: Annotated[Sha256, Meta(description="Of the tree's wire bytes.")]
    completion_ids: tuple[CompletionId, ...]
    entries: Annotated[int, Meta(ge=0, description="Sampled tokens that carry loss.")]
    version_min: Annotated[
        Version | None, Meta(description="Oldest over the entries; None where there is none.")
    ] = None
    request_pairs: Annotated[
        int, Meta(ge=0, description="Attention pairs if each request were one training sample.")
    ] = 0
    differences: Annotated[
        tuple[str, ...], Meta(description="Samples that are not what was sampled.")
    ] = ()
    lost: Annotated[
        tuple[str, ...], Meta(description="In a manifest or a score and not in the tree.")
    ] = ()
    unknown: Annotated[tuple[str, ...], Meta(description="What could not be compared.")] = ()


class AuditedGroup(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A retired group was compared with all its records; exactly one per retired group."""

    group_id: GroupId
    completions: Annotated[
        int, Meta(ge=0, description="Finished ones that were no error, delivered or not.")
    ] = 0
    output_tokens: Annotated[TokenCount, Meta(description="Sampled by those.")] = 0
    version_min: Annotated[
        Version | None, Meta(description="Oldest that sampled for it; None where none did.")
    ] = None
    version_max: Version | None = None
    trees: Annotated[
        tuple[TreeFacts, ...], Meta(description="One where the group had a tree, else none.")
    ] = ()
