"""Reads from the environment how to reach the broker, and the run's id."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from forgemq_bus.kafka_connection import KafkaConnection, SaslMechanism, SecurityProtocol
from forgemq_settings.environment import SettingsError, parse


class KafkaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from `FORGEMQ_KAFKA_*`; the address itself is `FORGEMQ_KAFKA`."""

    security_protocol: SecurityProtocol = "PLAINTEXT"
    sasl_mechanism: SaslMechanism = "PLAIN"
    sasl_username: str = ""
    sasl_password: str = ""
    tls_ca_file: str = ""
    retry_s: Annotated[
        float, msgspec.Meta(gt=0, description="An outage that is longer ends the process.")
    ] = 30.0
    session_timeout_s: Annotated[
        float,
        msgspec.Meta(ge=6, le=1800, description="Then others get a silent process's partitions."),
    ] = 10.0


def kafka_connection(environ: Mapping[str, str]) -> KafkaConnection:
    """How to reach the broker.

    Raises:
        SettingsError: `FORGEMQ_KAFKA` is not set, or a `FORGEMQ_KAFKA_*` is wrong.
    """
    settings = parse(KafkaSettings, prefix="FORGEMQ_KAFKA_", environ=environ)
    bootstrap = _required(environ, "FORGEMQ_KAFKA", "host:port[,host:port] of the broker")
    try:
        return KafkaConnection(bootstrap=bootstrap, **msgspec.structs.asdict(settings))
    except ValueError as error:
        raise SettingsError(f"FORGEMQ_KAFKA: {error}") from error


def run_id(environ: Mapping[str, str]) -> str:
    """Id of the run this process belongs to.

    Raises:
        SettingsError: `FORGEMQ_RUN` is not set.
    """
    return _required(environ, "FORGEMQ_RUN", "the id of the run")


def _required(environ: Mapping[str, str], name: str, meaning: str) -> str:
    if not environ.get(name):
        raise SettingsError(f"{name}: must be set: {meaning}")
    return environ[name]
