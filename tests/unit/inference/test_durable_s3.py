"""An object store that breaks off or does not answer is one more failed load, and no end."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ASK_STORE = """
import asyncio, sys
from pathlib import Path
from forgemq_contracts.weights import PublishedWeights
from forgemq_inference.durable import DurableCopies, DurableCopyError
published = PublishedWeights(
    lineage=1, version=1, sha256="0" * 64, uri="s3://bucket/weights", size_bytes=1
)
copies = DurableCopies(Path(sys.argv[1]))
for work in (copies.folder(published), copies.tensors(published)):
    try:
        asyncio.run(work)
    except DurableCopyError as error:
        print(error)
"""

LISTING = b"""<ListBucketResult><Name>bucket</Name><KeyCount>1</KeyCount>
<IsTruncated>false</IsTruncated><Contents><Key>weights/model.safetensors</Key><Size>9</Size><ETag>"e"</ETag>
<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"""


class _CutShort(BaseHTTPRequestHandler):
    """Lists one object of 9 bytes, and hangs up after the third of them."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._begin(size_bytes=9)

    def do_GET(self) -> None:
        if "list-type" in self.path:
            self._begin(size_bytes=len(LISTING))
            self.wfile.write(LISTING)
            return
        self._begin(size_bytes=9)
        self.wfile.write(b"abc")
        self.close_connection = True

    def _begin(self, *, size_bytes: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(size_bytes))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", '"e"')
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def cut_short() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _CutShort)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def asked(url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What two questions come to; a process, because the store's client reads the environment."""
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "HOME": str(folder),
        "AWS_ENDPOINT_URL": url,
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-c", ASK_STORE, str(folder / "cache")]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_store_where_nobody_listens_is_a_failed_load(tmp_path: Path) -> None:
    done = asked("http://127.0.0.1:1", tmp_path)
    assert (done.returncode, done.stdout.count("Could not connect")) == (0, 2), done.stderr


@pytest.mark.slow
def test_a_store_that_hangs_up_in_the_middle_of_a_file_is_a_failed_load(
    cut_short: str, tmp_path: Path
) -> None:
    done = asked(cut_short, tmp_path)
    said = "received 3 of 9 bytes"
    assert (done.returncode, done.stdout.count(said)) == (0, 2), done.stdout + done.stderr
