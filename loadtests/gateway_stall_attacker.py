"""One agent that sends requests of hostile size, in a process of its own.

`python gateway_stall_attacker.py CASE URL KEY SECONDS` sends one after the other and prints the
statuses as JSON; 0 stands for a connection that was closed before an answer.
"""

import http.client
import json
import sys
import time
from collections.abc import Callable, Mapping
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


def _one_tool(values: int) -> bytes:
    tool = {"type": "function", "function": {"name": "f", "parameters": [{"a": 1}] * values}}
    return json.dumps([tool], separators=(",", ":")).encode()


def _chat(text: bytes = b"", *, behind: bytes = b"", rest: bytes = b"") -> tuple[bytes, bytes]:
    """What stands before and behind the number that makes each body new."""
    begin = b'{"messages":[{"role":"user","content":"'
    return begin, b" " + text + b'"}' + behind + b"]" + rest + b"}"


def _blocks() -> tuple[bytes, bytes]:
    """A message with 10,000 blocks, 30 times."""
    message = b',{"role":"user","content":[' + b",".join([b'{"type":"x"}'] * 10_000) + b"]}"
    return _chat(behind=message * 30)


def _items() -> tuple[bytes, bytes]:
    return b'{"metadata":{"n":"', b'"},"input":[' + b",".join([b"{}"] * 2_000_000) + b"]}"


# Where each is sent, and what stands before and behind the number that makes each body new.
CASES: Mapping[str, tuple[str, Callable[[], tuple[bytes, bytes]]]] = {
    "body of 60 MB": ("chat/completions", lambda: _chat(b"x" * (60 * _MEGABYTE))),
    "6 MB that cannot fit": ("chat/completions", lambda: _chat(b"price " * _MEGABYTE)),
    "tools of 20 MB": (
        "chat/completions",
        lambda: _chat(rest=b',"tools":' + _tools(20 * _MEGABYTE)),
    ),
    "tools of 0.9 MB": ("chat/completions", lambda: _chat(rest=b',"tools":' + _tools(900_000))),
    "a tool of 1 MB": ("chat/completions", lambda: _chat(rest=b',"tools":' + _one_tool(120_000))),
    "190,000 tokens": ("chat/completions", lambda: _chat(b"price " * 95_000)),
    "10,000 messages": (
        "chat/completions",
        lambda: _chat(behind=b',{"role":"user","content":"a"}' * 9_999),
    ),
    "300,000 blocks": ("messages", _blocks),
    "2,000,000 items": ("responses", _items),
}


def main() -> None:
    """Send until the time is over."""
    case, url, key, seconds = sys.argv[1:]
    name, body = CASES[case]
    before, behind = body()
    parts = urlsplit(url)
    statuses: list[int] = []
    end_s = time.monotonic() + float(seconds)
    while time.monotonic() < end_s:
        number = str(len(statuses)).encode()
        path = f"{parts.path}/{name}"
        statuses.append(_status(parts.netloc, path, key, before + number + behind))
    sys.stdout.write(json.dumps(statuses))


def _status(netloc: str, path: str, key: str, body: bytes) -> int:
    connection = http.client.HTTPConnection(netloc, timeout=_ANSWER_S)
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request("POST", path, body, headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


if __name__ == "__main__":
    main()
