"""Weights: published by the trainer, loaded by lanes; and what lanes report about themselves."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from forgemq_contracts.fields import Epoch, Lane, Lineage, Seconds, Sha256, TimeMs, Version


class Rendezvous(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a lane's engine meets the trainer for the fast path.

    Each lane has a process group of its own, or all lanes are in one: then their places in it
    follow one another, and name, address and world size are the same.
    """

    lane: Lane
    epoch: Epoch
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    group_name: str
    backend: Literal["gloo", "nccl"]
    is_new: Annotated[bool, Meta(description="The group must be formed before this transfer.")]
    world_size: Annotated[
        int, Meta(ge=2, description="The trainer as rank 0 and every rank of each engine in it.")
    ] = 2
    rank_first: Annotated[int, Meta(ge=1, description="The lowest rank of this lane's engine.")] = 1


class OfferedBroadcast(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process group of several lanes is to be formed, for the versions that are published later.

    A lane whose engine is named joins it between two loads, while the engine may have requests.
    Versions go through it once PublishedWeights names it. A group that lacks a member at deadline_s
    is not formed, and engines that wait in it are freed.
    """

    lineage: Lineage
    group_name: str
    members: tuple[Rendezvous, ...]
    deadline_s: Seconds


class RelayedLane(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A lane whose process gets a version's files from the trainer or from another lane's."""

    lane: Lane
    epoch: Epoch


class PublishedHead(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The durable copy of a draft head, which belongs to the weights it is published with.

    A record that names a head is a push: an engine that loads its version loads the head with it,
    in every way of loading. The other records of a run with speculation name none, and the head
    that an engine has stays. Pushes are the versions that speculation.push_every_steps divides, and
    the version that a restarted trainer publishes first. An engine that starts between two pushes
    takes the head of the newest push, whose copy is kept.
    """

    sha256: Annotated[Sha256, Meta(description="Of the safetensors file.")]
    uri: Annotated[str, Meta(min_length=1, description="Folder in Hugging Face format.")]
    size_bytes: Annotated[int, Meta(ge=0)]


class WeightsDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file that makes newer weights of older ones."""

    sha256: Annotated[Sha256, Meta(description="Of the safetensors file that it makes.")]
    uri: Annotated[str, Meta(min_length=1, description="The file.")]
    size_bytes: Annotated[int, Meta(ge=0)]
    changed_share: Annotated[
        float, Meta(ge=0, le=1, description="Of all values, those that differ.")
    ] = 1.0


class SampledParameter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A parameter that is read back from engines which loaded these weights on the fast path."""

    name: Annotated[str, Meta(description="As engines name it, which hold some tensors as one.")]
    sha256: Annotated[Sha256, Meta(description="Of its bytes, in one piece.")]


class PublishedWeights(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A version exists; the fast path is an offer with a deadline, not a promise.

    A version is published once it has a durable copy. If lanes get it on a fast path it may also be
    published before that, by a record of its own with the same fast path.
    """

    lineage: Lineage
    version: Version
    sha256: Annotated[Sha256, Meta(description="Of the safetensors file.")]
    uri: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder in Hugging Face format. If is_durable is false, that of an earlier "
            "version, whose tensors have the same names, dtypes and shapes; so has the head's.",
        ),
    ]
    size_bytes: Annotated[int, Meta(ge=0)]
    kind: Annotated[
        Literal["full", "delta", "adapter"],
        Meta(
            description="delta: `uri` has older weights, of which `deltas` make these. adapter: "
            "`uri` has an adapter of the base model, in the form of the package peft."
        ),
    ] = "full"
    base_sha256: Annotated[
        Sha256 | None,
        Meta(description="Of a delta: of the file at `uri`. Of an adapter: of the base model."),
    ] = None
    deltas: Annotated[
        tuple[WeightsDelta, ...],
        Meta(description="In order; each changes what the one before it makes, the last these."),
    ] = ()
    fast_paths: tuple[Rendezvous, ...] = ()
    relayed_to: Annotated[
        tuple[RelayedLane, ...],
        Meta(
            description="In the order of the relay; each passes on what it has so far. A lane that "
            "does not have all within deadline_s loads the durable copy."
        ),
    ] = ()
    deadline_s: Annotated[
        Seconds,
        Meta(description="For the whole fast path of a lane; follows size_bytes."),
    ] = 30.0
    head: Annotated[
        PublishedHead | None,
        Meta(
            description="The draft head that is loaded with this version; null: the one that is "
            "loaded stays. On the fast path its tensors follow those of the policy, in a session "
            "of their own."
        ),
    ] = None
    sampled: Annotated[
        tuple[SampledParameter, ...],
        Meta(
            description="Compared with what an engine holds after its fast path; one that differs "
            "makes it load the durable copy."
        ),
    ] = ()
    is_durable: Annotated[
        bool,
        Meta(
            description="False: the durable copy is still to come, and another record will name "
            "it. Lanes that this one does not name, or that miss the fast path, wait for that."
        ),
    ] = True


class LoadedWeights(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A lane has begun to serve this version."""

    lane: Lane
    epoch: Epoch
    lineage: Lineage
    version: Version
    path: Annotated[
        Literal["start", "fast", "durable"], Meta(description="How the weights arrived.")
    ]
    duration_s: Seconds
    paused_s: Annotated[Seconds, Meta(description="How long generation stood still.")] = 0.0


class EngineLoad(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How fast a lane's engine is at the moment, and how much it has to do."""

    prefill_tokens_per_s: Annotated[
        float, Meta(ge=0, description="Context tokens read a second of work; 0 if not measured.")
    ] = 0.0
    step_s: Annotated[
        Seconds, Meta(description="Of a decoding step, without what its requests add.")
    ] = 0.0
    step_added_s: Annotated[
        Seconds, Meta(description="What each request adds to a decoding step.")
    ] = 0.0
    waiting_tokens: Annotated[
        int, Meta(ge=0, description="Of waiting requests, without those in the cache.")
    ] = 0
    used_tokens: Annotated[int, Meta(ge=0, description="Of the cache, by running requests.")] = 0
    capacity_tokens: Annotated[int, Meta(ge=0, description="Of the cache.")] = 0


class ReportedEngine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A lane's heartbeat: about once a second, and on every change."""

    lane: Lane
    epoch: Epoch
    url: str
    is_serving: Annotated[bool, Meta(description="False while starting, dead or leaving.")]
    lineage: Lineage
    version: Version
    running: Annotated[int, Meta(ge=0)]
    queued: Annotated[int, Meta(ge=0)]
    reported_ms: TimeMs
    context_tokens_max: Annotated[int, Meta(ge=0)] = 0
    output_tokens_total: Annotated[int, Meta(ge=0)] = 0
    ranks: Annotated[int, Meta(ge=1, description="Tensor-parallel processes of the engine.")] = 1
    weights_address: Annotated[
        str, Meta(description="host:port at which the lane's process takes relayed weights.")
    ] = ""
    process_group: Annotated[
        str, Meta(description="Of the trainer and several lanes; '': the engine is in none.")
    ] = ""
    load: Annotated[
        EngineLoad | None, Meta(description="None while the engine says nothing of it.")
    ] = None
    cache_since_ms: Annotated[
        TimeMs,
        Meta(
            description="The engine has nothing of completions that finished before: it was "
            "started again under this epoch, or loaded weights. By the same clock as those records."
        ),
    ] = 0
    detail: Annotated[
        str, Meta(description="Why the lane cannot serve, by its engine; '': it can, or prepares.")
    ] = ""
