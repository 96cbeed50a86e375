"""The HTTP server: its socket, and uvicorn under the gateway's own signals."""

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress

import uvicorn

from forgemq_gateway.connections import (
    HEADERS_S,
    DeadlineConnection,
    LateConnections,
    SparseLog,
)
from forgemq_gateway.core.held_bytes import HeldBytes
from forgemq_gateway.settings import GatewaySettings
from forgemq_gateway.wire import Application
from forgemq_settings.environment import SettingsError

# Agents think between turns; a connection that is closed earlier costs them a new handshake.
_KEEP_ALIVE_S = 120

# Open answers get so long after a stop; a supervisor waits longer than this before it kills.
_SHUTDOWN_S = 5

# A whole group of agents connects at once, and again after every restart.
_WAITING_MAX = 4096

# Between two steps of other requests: to begin a connection takes about 0.1 ms.
ACCEPTED_AT_ONCE = 16

# As asyncio waits when the process has no file left.
_NO_FILES_S = 1.0

_NO_FILE_LEFT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accepts the connections of a listening socket, a few between two steps of other requests.

    Event loops have one number for the connections that may wait and for those that are accepted at
    once, or accept all that wait.
    """

    def __init__(
        self,
        listener: socket.socket,
        connection: Callable[[], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._connection = connection
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        # The loop keeps no reference to a task.
        self._beginning: set[asyncio.Task[object]] = set()
        listener.setblocking(False)
        listener.listen(_WAITING_MAX)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more; idempotent."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())

    async def wait_closed(self) -> None:
        """Return at once: uvicorn waits for the connections itself."""

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_FILE_LEFT:
                    self._pause(error)
                    return
                continue  # A connection that failed while it waited.
            accepted.setblocking(False)
            task = self._loop.create_task(self._begin(accepted))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, accepted: socket.socket) -> None:
        """Begin a connection; a handshake that fails, or is late, is the client's own affair."""
        if self._tls is None:
            await self._loop.connect_accepted_socket(self._connection, accepted)
            return
        with suppress(OSError):  # Errors of TLS and of lost connections, and a handshake's time.
            await self._loop.connect_accepted_socket(
                self._connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=HEADERS_S,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )

    def _pause(self, error: OSError) -> None:
        """No file is left for a connection: those that wait are looked at again in a second."""
        logging.getLogger("uvicorn.error").error("cannot accept a connection: %s", error.strerror)
        self.close()
        self._loop.call_later(_NO_FILES_S, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)


class AcceptingServer(uvicorn.Server):
    """uvicorn's server with these acceptors; with a context, all of them speak TLS."""

    def __init__(self, config: uvicorn.Config, *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections from now on."""
        await self.lifespan.startup()

        def connection() -> asyncio.Protocol:
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )

        acceptors = [Acceptor(each, connection, tls=self._tls) for each in sockets or ()]
        self.servers = acceptors  # type: ignore[assignment]
        self.started = True


def bound_socket(settings: GatewaySettings) -> socket.socket:
    """A bound socket; the event loop sets TCP_NODELAY on the connections it accepts.

    The loop does so only if the socket names its protocol. Without it the body of an answer waits
    until the client acknowledges the head: 40 ms on a connection that is kept.

    Raises:
        SettingsError: the inherited file is no socket for TCP.
    """
    if settings.listener_fd >= 0:
        return _inherited_socket(settings.listener_fd)
    return _bound(settings.host, settings.port)


def peer_socket(settings: GatewaySettings) -> socket.socket | None:
    """A socket for the run's other gateways alone; None if they use the one of all."""
    return None if settings.peer_port < 0 else _bound(settings.host, settings.peer_port)


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def url_of(listener: socket.socket, *, is_tls: bool = False) -> str:
    """The URL of a bound socket."""
    return "{}://{}:{}".format("https" if is_tls else "http", *listener.getsockname()[:2])


def _inherited_socket(number: int) -> socket.socket:
    """The socket that the process which started this one bound, and keeps while this one is gone.

    Connections wait in its queue between a kill and the restart, so that no client is refused.
    """
    try:
        listener = socket.socket(fileno=number)
    except OSError as error:
        raise SettingsError(
            f"FORGEMQ_GATEWAY_LISTENER_FD: {number} is no inherited socket: {error.strerror}"
        ) from error
    if listener.type != socket.SOCK_STREAM or listener.proto != socket.IPPROTO_TCP:
        listener.close()
        raise SettingsError(f"FORGEMQ_GATEWAY_LISTENER_FD: {number} is no socket for TCP")
    return listener


def allow_connections() -> None:
    """Let this process have as many open files as it may: each connection is one.

    Shells and supervisors give 1,024 for programs that use `select`, which the loop does not.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError):  # macOS names no limit that it would accept.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def http_server(
    application: Application, *, half_sent: HeldBytes, tls: ssl.SSLContext | None = None
) -> uvicorn.Server:
    """A server of this application; `should_exit` ends it.

    Args:
        application: Serves the requests that are complete.
        half_sent: Counts headers without an end.
        tls: For all connections; None if they are plain.
    """
    log = logging.getLogger("uvicorn.error")
    if not any(isinstance(each, SparseLog) for each in log.filters):
        log.addFilter(SparseLog())
    shared = {"half_sent": half_sent, "late": LateConnections()}
    return AcceptingServer(
        uvicorn.Config(
            application,
            http=type("CountedConnection", (DeadlineConnection,), shared),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        ),
        tls=tls,
    )


async def serve_http(server: uvicorn.Server, listeners: Sequence[socket.socket]) -> None:
    """Serve until `server.should_exit`, then close the listeners.

    Signals stay with the shell, so not `server.serve`.
    """
    sockets = list(listeners)
    try:
        await server._serve(sockets=sockets)
    except asyncio.CancelledError:
        server.force_exit = True
        await server.shutdown(sockets=sockets)
        raise
