"""Settings of the trainer process; hyperparameters are in the run's configuration."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class TrainerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parsed from the environment, `FORGEMQ_TRAINER_*`."""

    folder: Annotated[
        str,
        Meta(
            min_length=1,
            description="Checkpoints of one run; only the trainer reads it.",
        ),
    ]
    device: Annotated[
        str,
        Meta(
            pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$",
            description="auto: the GPUs, if torch sees one for each rank of this machine.",
        ),
    ] = "auto"
    host: Annotated[
        str, Meta(min_length=1, description="Address of this process for the fast path.")
    ] = "127.0.0.1"
    fast_path: Annotated[
        Literal["gloo", "nccl", "gloo-shared", "nccl-shared", "relay", "off"],
        Meta(
            description="How new weights reach engines. gloo, nccl: broadcast into each paused "
            "engine, in a process group for each lane; gloo-shared, nccl-shared: in one for all "
            "lanes. relay: from one lane's process to the next, while their engines generate."
        ),
    ] = "gloo"
    transfer_deadline_s: Annotated[
        float,
        Meta(
            gt=0,
            description="For a transfer to a lane without its bytes: the engine pauses after a "
            "decoding step, joins and flushes its cache. 30 s also cover its first compilation.",
        ),
    ] = 30.0
    transfer_bytes_per_s_min: Annotated[
        float,
        Meta(
            gt=0,
            description="Least rate of a transfer to a lane; its bytes add to the deadline at this "
            "rate. Two busy cores moved 0.8 GB/s over loopback: a quarter of that.",
        ),
    ] = 2e8
    deltas_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Versions in a row whose durable copy is what changed, before the next "
            "full one; that comes sooner if the changes together are larger than it. For blobs in "
            "an object store.",
        ),
    ] = 0
    saves_beside_step: Annotated[
        bool,
        Meta(
            description="Whether a step is saved and published while the next one computes its "
            "gradients; weights that are serialised then take host memory beside the step's own."
        ),
    ] = True
    rank_deadline_s: Annotated[
        float, Meta(gt=0, description="How long one rank waits for another within a step.")
    ] = 1800.0
    alarm_logprob_gap_mean: Annotated[
        float, Meta(ge=0, description="Alarm above: mean |trainer - engine|, nats; 0 is off.")
    ] = 0.05
    alarm_kl_k3: Annotated[
        float, Meta(ge=0, description="Alarm above: k3 KL of behaviour and policy; 0 is off.")
    ] = 0.1
    alarm_ratio_p99: Annotated[
        float, Meta(ge=0, description="Alarm above: 99th percentile of the ratio; 0 is off.")
    ] = 4.0
    alarm_capped_share: Annotated[
        float, Meta(ge=0, description="Alarm above: share of limited entries; 0 is off.")
    ] = 0.1
