"""What an audit found about a group; it stays when completions and trees are trimmed."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.fields import CompletionId, GroupId, Sha256, TokenCount, Version


class TreeFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tree, compared sample by sample with what the engine wrote."""

    group_id: GroupId
    sha256: Annotated[Sha256, Meta(description="Of the tree's wire bytes.")]
    completion_ids: tuple[CompletionId, ...]
    entries: Annotated[int, Meta(ge=0, description="Sampled tokens that carry loss.")]
    version_min: Annotated[
        Version | None, Meta(description="Oldest over the entries; None if there are none.")
    ] = None
    request_pairs: Annotated[
        int, Meta(ge=0, description="Attention pairs if each request were one training sample.")
    ] = 0
    differences: Annotated[
        tuple[str, ...],
        Meta(description="Samples whose tokens or numbers are not what the engine sampled."),
    ] = ()
    lost: Annotated[
        tuple[str, ...],
        Meta(description="Completions in a manifest or a score that are not in the tree."),
    ] = ()
    unknown: Annotated[
        tuple[str, ...], Meta(description="Completions that could not be compared.")
    ] = ()


class AuditedGroup(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A retired group was compared with all its records; exactly one for each retired group."""

    group_id: GroupId
    completions: Annotated[
        int, Meta(ge=0, description="Finished without error, delivered or not.")
    ] = 0
    output_tokens: Annotated[TokenCount, Meta(description="Sampled by these completions.")] = 0
    version_min: Annotated[
        Version | None,
        Meta(description="Oldest version that sampled for the group; None if none did."),
    ] = None
    version_max: Version | None = None
    trees: Annotated[
        tuple[TreeFacts, ...], Meta(description="One if the group had a tree, else empty.")
    ] = ()
