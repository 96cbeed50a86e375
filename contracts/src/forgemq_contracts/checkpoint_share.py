"""How much of a run's time may go into checkpoints."""

from typing import Annotated, TypeAlias

from msgspec import Meta

CheckpointShare: TypeAlias = Annotated[
    float,
    Meta(
        gt=0,
        le=1,
        description="Share of the run's time that writing checkpoints may take if "
        "`checkpoint_every_steps` is 1; a larger number of steps is kept whatever it costs.",
    ),
]
