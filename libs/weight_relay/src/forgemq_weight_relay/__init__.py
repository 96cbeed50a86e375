"""New weights from one process to the next, each passing on what it has so far."""

from forgemq_weight_relay.receiving import Receiver
from forgemq_weight_relay.records import Greeting, Hop, RelayedFile, RelayError, WeightsKey
from forgemq_weight_relay.sending import Relayed, send_along
from forgemq_weight_relay.staged_copy import StagedCopy

__all__ = [
    "Greeting",
    "Hop",
    "Receiver",
    "RelayError",
    "Relayed",
    "RelayedFile",
    "StagedCopy",
    "WeightsKey",
    "send_along",
]
