"""One agent that sends requests of hostile size, in a process of its own.

`python gateway_stall_attacker.py CASE URL KEY SECONDS` sends one after the other and prints the
statuses as JSON; 0 stands for a connection that was closed before an answer.
"""

import http.client
import json
import sys
import time
from urllib.parse import urlsplit

_MEGABYTE = 1_000_000
_ANSWER_S = 120.0


def _tool(number: int) -> object:
    schema = {"type": "object", "properties": {"order": {"type": "string"}}}
    function = {"name": f"f{number}", "description": "price " * 30, "parameters": schema}
    return {"type": "function", "function": function}


def _tools(size_bytes: int) -> bytes:
    count = size_bytes // len(json.dumps(_tool(10_000)))
    return json.dumps([_tool(number) for number in range(count)]).encode()


# What stands behind the number that makes each body new, and the fields beside the messages.
CASES = {
    "body of 60 MB": lambda: (b"x" * (60 * _MEGABYTE), b""),
    "6 MB that cannot fit": lambda: (b"price " * _MEGABYTE, b""),
    "tools of 20 MB": lambda: (b"", b',"tools":' + _tools(20 * _MEGABYTE)),
    "tools of 0.9 MB": lambda: (b"", b',"tools":' + _tools(900_000)),
    "190,000 tokens": lambda: (b"price " * 95_000, b""),
}


def main() -> None:
    """Send until the time is over."""
    case, url, key, seconds = sys.argv[1:]
    text, rest = CASES[case]()
    parts = urlsplit(url)
    statuses: list[int] = []
    end_s = time.monotonic() + float(seconds)
    while time.monotonic() < end_s:
        number = str(len(statuses)).encode()
        head = b'{"messages":[{"role":"user","content":"' + number + b" "
        statuses.append(_status(parts.netloc, parts.path, key, head + text + b'"}]' + rest + b"}"))
    sys.stdout.write(json.dumps(statuses))


def _status(netloc: str, path: str, key: str, body: bytes) -> int:
    connection = http.client.HTTPConnection(netloc, timeout=_ANSWER_S)
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request("POST", f"{path}/chat/completions", body, headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


if __name__ == "__main__":
    main()
