"""What may be deleted, as values: no clock and no I/O."""

from forgemq_auditor.core.sweep import LogMoment, Sweep
from forgemq_auditor.core.trim import trim_positions

__all__ = ["LogMoment", "Sweep", "trim_positions"]
