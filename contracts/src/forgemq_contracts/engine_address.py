"""The address of an engine in one form, by which two names of one engine are seen to be equal."""

from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
_OF_THIS_MACHINE = {"localhost": "127.0.0.1", "::1": "127.0.0.1"}


def engine_address(url: str) -> str | None:
    """The address in one form; None if it names no HTTP server.

    Example: "http://LOCALHOST:30000/" gives "http://127.0.0.1:30000". Other names are not looked
    up: many engines may be reached by one machine's address, each by a name of its own.
    """
    try:
        parts = urlsplit(url)
        host, port, usual = parts.hostname, parts.port, _PORTS.get(parts.scheme)
    except ValueError:
        return None
    if usual is None or not host:
        return None
    host = _OF_THIS_MACHINE.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{usual if port is None else port}{parts.path.rstrip('/')}"
