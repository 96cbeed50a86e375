"""How long a transfer of weights to a lane may take."""

from dataclasses import dataclass

from forgemq_trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class TransferDeadline:
    """Follows the size of the weights.

    Example: with a floor of 30 s and 200 MB/s, 61 GB have 335 s.

    Attributes:
        floor_s: Setting `transfer_deadline_s`: for all that does not depend on the size.
        bytes_per_s_min: Setting `transfer_bytes_per_s_min`: the least rate.
    """

    floor_s: float
    bytes_per_s_min: float

    @classmethod
    def of_settings(cls, settings: TrainerSettings) -> "TransferDeadline":
        """The deadline that the trainer's settings name."""
        return cls(settings.transfer_deadline_s, settings.transfer_bytes_per_s_min)

    def of(self, size_bytes: int) -> float:
        """Seconds for so many bytes."""
        return self.floor_s + size_bytes / self.bytes_per_s_min
