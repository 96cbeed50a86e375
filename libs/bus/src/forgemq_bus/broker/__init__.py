"""A real Kafka broker on this machine, from Python packages alone: no Docker, no Java."""

from forgemq_bus.broker.local import BrokerError, LocalBroker

__all__ = ["BrokerError", "LocalBroker"]
