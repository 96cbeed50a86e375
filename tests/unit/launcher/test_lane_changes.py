"""`forgemq lanes` and its neighbours against a gateway that answers, refuses or is away."""

import http.server
import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from forgemq_contracts.admin import ErrorBody, Refusal
from forgemq_contracts.lane_routes import LaneList, LaneStatus
from forgemq_launcher.dispatch import run_tool
from forgemq_settings.ports import free_port

KEY = "an-admin-key-of-some-length"
LANE = LaneStatus(
    lane=1,
    state="drained",
    takes_requests=False,
    silent_s=0.4,
    engine_url="http://engine:1",
    epoch=2,
    lineage=1,
    version=7,
    running=3,
    queued=0,
    prefill_tokens_per_s=8123.0,
    used_tokens=500,
    capacity_tokens=2000,
    detail="http://engine:1 is not healthy: /health: gone",
)


class Answering(http.server.BaseHTTPRequestHandler):
    """Lists one lane, and refuses every change."""

    asked: list[tuple[str, str, bytes]]

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append((self.command, self.path, body))
        status, answer = 200, msgspec.json.encode(LaneList(lanes=(LANE,), lanes_max=3))
        if self.headers["authorization"] != f"Bearer {KEY}":
            status, answer = 401, refused("the admin API needs the admin key as a bearer token")
        elif self.command == "POST":
            status, answer = 409, refused("lane 1 is drained already")
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def refused(message: str) -> bytes:
    return msgspec.json.encode(Refusal(error=ErrorBody(message=message, type="conflict_error")))


@pytest.fixture
def gateway() -> Iterator[str]:
    Answering.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def tool(
    url: str, *arguments: str, folder: Path, key: str = KEY, width: int = 200
) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=width)
    environ = {
        "FORGEMQ_AGENTS_GATEWAY_URL": url,
        "FORGEMQ_AGENTS_ADMIN_KEY": key,
        "FORGEMQ_LAUNCHER_RUNS": str(folder),
    }
    status = run_tool(arguments, environ=environ, console=console)
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


def test_a_lane_is_shown_with_its_weights_and_its_load(gateway: str, tmp_path: Path) -> None:
    status, text = tool(gateway, "lanes", "r", folder=tmp_path)
    assert status == 0
    (row,) = [line for line in text.splitlines() if "8123" in line]
    shown = re.findall(r"[\w.:/%]+", row)
    assert shown == ["1", "drained", "drained", "1.7", "3", "0", "8123", "25%"]
    assert "lane 1: http://engine:1" in text.splitlines()
    assert f"lane 1 cannot serve: {LANE.detail}" in text.splitlines()
    assert "1 of at most 3 lanes" in text


def test_the_list_of_lanes_cuts_nothing_in_80_columns(gateway: str, tmp_path: Path) -> None:
    status, text = tool(gateway, "lanes", "r", folder=tmp_path, width=80)
    assert status == 0
    words = ("wanted", "weights", "running", "queued", "tokens/s", "cache", "http://engine:1")
    assert [word for word in words if word not in text] == []
    assert "\u2026" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("drain-lane", "/v1/lanes/1/drain"),
        ("resume-lane", "/v1/lanes/1/resume"),
        ("remove-lane", "/v1/lanes/1/remove"),
    ],
)
def test_a_change_that_the_gateway_refuses_is_status_2_with_its_reason(
    gateway: str, tmp_path: Path, command: str, path: str
) -> None:
    status, text = tool(gateway, command, "r", "1", folder=tmp_path)
    assert (status, text) == (2, "forgemq: lane 1 is drained already (HTTP 409)\n")
    assert Answering.asked == [("POST", path, b"")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "engine:1"), "--engine must be an address"),
        (("--engine", "http://[::1"), "--engine must be an address"),
        (("--lane", "-1"), "lane"),
    ],
)
def test_a_lane_that_cannot_be_is_refused_before_the_gateway_is_asked(
    gateway: str, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    status, text = tool(gateway, "add-lane", "r", *arguments, folder=tmp_path)
    assert (status, words in text) == (2, True), text
    assert Answering.asked == []


def test_a_wrong_key_is_status_2(gateway: str, tmp_path: Path) -> None:
    status, text = tool(gateway, "lanes", "r", folder=tmp_path, key="another")
    assert (status, "needs the admin key" in text) == (2, True), text


def test_a_gateway_that_is_away_is_named(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(OSError, match=f"the gateway at {nobody} did not answer"):
        tool(nobody, "lanes", "r", folder=tmp_path)
