"""Settings of the trainer process; hyperparameters are the run's configuration."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from forgemq.contracts.weights import LANE_LAPSE_S


class TrainerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from `FORGEMQ_TRAINER_*`."""

    folder: Annotated[
        str,
        Meta(
            min_length=1,
            description="Checkpoints of one run; only the trainer reads it.",
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
        float, Meta(gt=0, description="Of one transfer to a lane, its joining included.")
    ] = 30.0
    lane_lapse_s: Annotated[
        float, Meta(gt=0, description="A lane without a report for this long is dead.")
    ] = LANE_LAPSE_S
