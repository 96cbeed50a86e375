"""Connects to the brokers and translates their failures into the bus's errors.

Every call to a broker is bounded by `retry_s`: aiokafka itself retries some requests without end.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

from aiokafka import errors as kafka_errors
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import create_conn
from aiokafka.helpers import create_ssl_context
from aiokafka.protocol.metadata import MetadataRequest
from msgspec import Meta, Struct

from forgemq_bus.errors import AccessError, FencedError, LogError, LogUnavailableError

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]

T = TypeVar("T")

RECONNECT_PAUSE_S = 0.25
"""A broker takes seconds to start; this keeps the log and the processor quiet meanwhile."""

RETRY_PAUSE_S = 0.05
"""Short: it also waits for new topics and for transactions in their last phase."""

REQUEST_TIMEOUT_MS = 10_000
"""Above any answer of a working broker, and short enough for three tries within `retry_s`."""

CLOSE_TIMEOUT_S = 5.0
"""A flush takes milliseconds; a broker that is gone must not delay the end of a process longer."""

_CLOSED = (ConnectionResetError, ConnectionAbortedError, kafka_errors.KafkaConnectionError)
"""A connection that ended after TCP connected: wrong protocol, or a broker that is stopping."""

_FENCED = (kafka_errors.ProducerFenced, kafka_errors.InvalidProducerEpoch)


class KafkaConnection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The brokers of a cluster, and protocol and user for them."""

    bootstrap: Annotated[str, Meta(min_length=1, description="host:port[,host:port].")]
    security_protocol: SecurityProtocol = "PLAINTEXT"
    sasl_mechanism: SaslMechanism = "PLAIN"
    sasl_username: str = ""
    sasl_password: str = ""
    tls_ca_file: Annotated[str, Meta(description="PEM; empty: the system's authorities.")] = ""
    retry_s: Annotated[
        float, Meta(gt=0, description="How long a call tries before LogUnavailableError.")
    ] = 30.0
    session_timeout_s: Annotated[
        float,
        Meta(ge=6, le=1800, description="After this long without a heartbeat a member is dead."),
    ] = 10.0

    def __post_init__(self) -> None:
        """Check the fields; an error names the field."""
        for name, choices in (
            ("security_protocol", SecurityProtocol.__args__),  # type: ignore[attr-defined]
            ("sasl_mechanism", SaslMechanism.__args__),  # type: ignore[attr-defined]
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        for address in self.bootstrap.split(","):
            host, _, port = address.strip().rpartition(":")
            if not host or not port.isdigit():
                raise ValueError(f"bootstrap must be host:port[,host:port], got {self.bootstrap!r}")

    def __repr__(self) -> str:
        """The address and protocol; never the password."""
        return f"KafkaConnection({self.bootstrap}, {self.security_protocol})"


def client_settings(connection: KafkaConnection) -> dict[str, Any]:
    """Arguments of every aiokafka client."""
    settings: dict[str, Any] = {
        "bootstrap_servers": [address.strip() for address in connection.bootstrap.split(",")],
        "security_protocol": connection.security_protocol,
        "request_timeout_ms": REQUEST_TIMEOUT_MS,
        "retry_backoff_ms": 50,
    }
    if connection.security_protocol.endswith("SSL"):
        settings["ssl_context"] = _ssl_context(connection)
    if connection.security_protocol.startswith("SASL"):
        settings["sasl_mechanism"] = connection.sasl_mechanism
        settings["sasl_plain_username"] = connection.sasl_username
        settings["sasl_plain_password"] = connection.sasl_password
    return settings


def _ssl_context(connection: KafkaConnection) -> ssl.SSLContext:
    try:
        context: ssl.SSLContext = create_ssl_context(cafile=connection.tls_ca_file or None)
    except OSError as error:  # ssl also raises it for a file without certificates.
        raise AccessError(
            f"FORGEMQ_KAFKA_TLS_CA_FILE: no certificates in {connection.tls_ca_file}: {error}"
        ) from error
    return context


@asynccontextmanager
async def bound_and_translate(connection: KafkaConnection, doing: str) -> AsyncIterator[None]:
    """Bound the body by `retry_s` and translate aiokafka's errors into the bus's.

    Raises:
        LogUnavailableError: no answer in time.
        FencedError: a newer writer exists.
        LogError: the brokers refuse; the message has their answer.
    """
    try:
        async with asyncio.timeout(connection.retry_s):
            yield
    except (TimeoutError, kafka_errors.KafkaTimeoutError) as error:
        raise LogUnavailableError(
            f"{doing}: {connection.bootstrap} did not answer within {connection.retry_s:g} s"
        ) from error
    except _FENCED as error:
        raise FencedError(f"{doing}: a newer writer took over") from error
    except kafka_errors.KafkaError as error:
        raise LogError(f"{doing}: {connection.bootstrap} answered {error!r}") from error


async def retry(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a request while it has no answer, or an error that aiokafka calls retriable.

    Call it inside `bound_and_translate`, which bounds the time: a consumer's request for positions
    gives up after REQUEST_TIMEOUT_MS, which a broker on a busy machine may take.
    """
    while True:
        try:
            return await call()
        except kafka_errors.KafkaError as error:
            if not error.retriable and not isinstance(error, kafka_errors.KafkaTimeoutError):
                raise
            await asyncio.sleep(RETRY_PAUSE_S)


def _wait_for_brokers(client: AIOKafkaClient) -> None:
    """Let this client's start wait while the cluster names no broker, as the only one is fenced.

    aiokafka's clients go on without one: a transactional producer ends by an assertion, and a plain
    one asks nobody in a loop.
    """
    bootstrap = client.bootstrap

    async def bootstrap_with_brokers() -> None:
        await bootstrap()
        while not client.cluster.brokers():
            await asyncio.sleep(RECONNECT_PAUSE_S)
            await client.force_metadata_update()

    client.bootstrap = bootstrap_with_brokers


async def connect(
    connection: KafkaConnection,
    client: AIOKafkaClient,
    start: Callable[[], Awaitable[None]],
    *stops: Callable[[], Awaitable[None]],
    doing: str,
) -> None:
    """Start a client; repeats while the brokers do not answer, or the cluster names none.

    Args:
        connection: Says which brokers.
        client: What a producer, consumer or admin client asks through.
        start: Starts what asks through it, or itself.
        stops: Called as `stop_client` does, if the client does not start.
        doing: What the client is for, in error messages.

    Raises:
        AccessError: the brokers refuse this process, or it does not trust them.
        LogUnavailableError: they did not answer in time.
        LogError: they refuse the request.
    """
    hint = ""
    _wait_for_brokers(client)
    try:
        async with bound_and_translate(connection, doing):
            while True:
                try:
                    return await start()
                except (kafka_errors.KafkaConnectionError, kafka_errors.NodeNotReadyError):
                    hint = await _check_access(connection)
                    await asyncio.sleep(RECONNECT_PAUSE_S)
    except BaseException as error:
        # Also on a cancellation: a half-started client has connections and tasks to close.
        await stop_client(*stops)
        if isinstance(error, LogUnavailableError):
            raise LogUnavailableError(f"{error}{hint}") from error
        raise


async def _check_access(connection: KafkaConnection) -> str:
    """Find out whether a connection can never work; aiokafka does not say why one failed.

    Returns:
        What may be wrong, to be added to a message; "" if nothing points to the settings.

    Raises:
        AccessError: names the setting that is wrong.
    """
    settings, hint = client_settings(connection), ""
    of_client = ("bootstrap_servers", "retry_backoff_ms")
    of_connection = {name: value for name, value in settings.items() if name not in of_client}
    for address in settings["bootstrap_servers"]:
        host, _, port = address.rpartition(":")
        try:
            probe = await create_conn(host, int(port), **of_connection)
            try:
                # A broker that requires a user accepts connections without one; only the first
                # request fails.
                await probe.send(MetadataRequest([]))
            finally:
                probe.close()
        except (OSError, kafka_errors.KafkaError) as error:
            if (reason := _refusal(connection, error)) is not None:
                raise AccessError(f"{address}: {reason}") from error
            if isinstance(error, _CLOSED):
                hint = (
                    f"; {address} closed the connection: is FORGEMQ_KAFKA_SECURITY_PROTOCOL "
                    f"({connection.security_protocol}) right?"
                )
    return hint


def _refusal(connection: KafkaConnection, error: Exception) -> str | None:
    """What the user has to correct; None if the failure may pass by itself."""
    match error:
        case ssl.SSLCertVerificationError():
            named = connection.tls_ca_file or "empty, so the system's authorities count"
            return (
                f"the broker's certificate is not trusted: {error.verify_message}: check "
                f"FORGEMQ_KAFKA_TLS_CA_FILE ({named})"
            )
        case ssl.SSLError():
            return (
                f"no TLS there: {error.reason}: check FORGEMQ_KAFKA_SECURITY_PROTOCOL "
                f"({connection.security_protocol})"
            )
        case kafka_errors.UnsupportedSaslMechanismError():
            return (
                "the broker does not take this mechanism: check FORGEMQ_KAFKA_SASL_MECHANISM "
                f"({connection.sasl_mechanism})"
            )
        case kafka_errors.SaslAuthenticationFailed():
            return (
                f"the broker refuses user {connection.sasl_username!r}: check "
                "FORGEMQ_KAFKA_SASL_USERNAME and FORGEMQ_KAFKA_SASL_PASSWORD"
            )
        case kafka_errors.IllegalSaslStateError():
            return (
                "the broker takes no user here: check FORGEMQ_KAFKA_SECURITY_PROTOCOL "
                f"({connection.security_protocol})"
            )
    return None


async def stop_client(*stops: Callable[[], Awaitable[None]]) -> None:
    """Stop a client; what it cannot flush within CLOSE_TIMEOUT_S is lost.

    Args:
        stops: Called in order. The client's own `stop` can fail half-way if the brokers are gone,
            even with a CancelledError; a second function, if given, then closes its connections.
    """
    for stop in stops:
        task = asyncio.ensure_future(stop())
        await asyncio.wait([task], timeout=CLOSE_TIMEOUT_S)
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CLOSE_TIMEOUT_S)
        if task.done() and not task.cancelled():
            # Marks the error as seen: the broker is gone or fenced this client.
            task.exception()
