"""Settings of the trainer process; hyperparameters are the run's configuration."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class TrainerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from `FORGEMQ_TRAINER_*`."""

    folder: Annotated[
        str,
        Meta(
            min_length=1,
            description="Checkpoints and published weights of one run; inference reads it too.",
        ),
    ]
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]+)?)$")] = "cpu"
    host: Annotated[
        str, Meta(min_length=1, description="Address of this process for the fast path.")
    ] = "127.0.0.1"
    fast_path: Annotated[
        Literal["gloo", "nccl", "off"], Meta(description="How new weights reach engines.")
    ] = "gloo"
    transfer_deadline_s: Annotated[
        float, Meta(gt=0, description="Of every phase of the fast path.")
    ] = 30.0
    lane_timeout_s: Annotated[
        float, Meta(gt=0, description="A lane without a report for this long is not offered one.")
    ] = 5.0
    tree_deadline_s: Annotated[
        float, Meta(gt=0, description="A scheduled tree that is not read by then has failed.")
    ] = 30.0
