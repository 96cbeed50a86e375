"""What may be deleted, as values: no clock and no I/O."""

from forgemq_auditor.core.sweep import Moment, Sweep
from forgemq_auditor.core.trim import trim_positions

__all__ = ["Moment", "Sweep", "trim_positions"]
