"""What changed between two versions of the weights, exact and compressed."""

from forgemq_weight_deltas.patching import patch
from forgemq_weight_deltas.records import DeltaError, DeltaFigures, OtherLayoutError
from forgemq_weight_deltas.writing import write_delta

__all__ = ["DeltaError", "DeltaFigures", "OtherLayoutError", "patch", "write_delta"]
