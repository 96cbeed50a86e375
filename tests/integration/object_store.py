"""An object store in memory for all processes of a run: as much of S3 as s3fs asks for.

Objects of up to 100 MB, which s3fs sends in one piece. Nobody signs in.
"""

import re
import threading
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

BUCKET = "bucket"
_TIME = "2026-01-01T00:00:00.000Z"
_HTTP_TIME = "Thu, 01 Jan 2026 00:00:00 GMT"


@dataclass(frozen=True)
class ObjectStore:
    """What the store holds, and how a process reaches it.

    Attributes:
        environ: Variables for s3fs.
        objects: Bytes by key.
        written: Bytes of the objects that were ever written, by key.
    """

    environ: Mapping[str, str]
    objects: dict[str, bytes] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        """Address for fsspec."""
        return f"s3://{BUCKET}/blobs"


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A store that is there until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Requests)
    server.daemon_threads = True
    store = ObjectStore(
        environ={
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "asks",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            # Otherwise bodies come in signed chunks.
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }
    )
    _Requests.store = store
    thread = threading.Thread(target=server.serve_forever, name="object-store", daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Requests(BaseHTTPRequestHandler):
    """Answers GET, HEAD, PUT, DELETE of objects, listings, and the deletion of several objects."""

    protocol_version = "HTTP/1.1"
    store: ObjectStore

    def do_GET(self) -> None:
        key, query = self._asked()
        if not key:
            self._answer(200, _listing(self.store.objects, query).encode())
            return
        data = self.store.objects.get(key)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self._answer(200, data)
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        self._answer(206, data[first : last + 1], place=f"bytes {first}-{last}/{len(data)}")

    def do_HEAD(self) -> None:
        key, _ = self._asked()
        data = self.store.objects.get(key) if key else b""
        self._answer(404 if data is None else 200, data or b"", is_sent=False)

    def do_PUT(self) -> None:
        key, _ = self._asked()
        data = self._body()
        assert "aws-chunked" not in self.headers.get("Content-Encoding", ""), "sent in chunks"
        if key:
            self.store.objects[key] = data
            self.store.written[key] = len(data)
        self._answer(200, b"")

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        self.store.objects.pop(key, None)
        self._answer(204, b"")

    def do_POST(self) -> None:
        _, query = self._asked()
        assert "delete" in query, f"not supported: POST {self.path}"
        names = [
            each.text or ""
            for each in ElementTree.fromstring(self._body()).iter()
            if each.tag.endswith("Key")
        ]
        for name in names:
            self.store.objects.pop(name, None)
        self._answer(200, b"<DeleteResult></DeleteResult>")

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _asked(self) -> tuple[str, dict[str, str]]:
        """The key, "" for the bucket, and the query."""
        parts = urllib.parse.urlsplit(self.path)
        bucket, _, key = urllib.parse.unquote(parts.path).lstrip("/").partition("/")
        assert bucket == BUCKET, f"another bucket: {self.path}"
        return key, dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(
        self, status: int, data: bytes, *, is_sent: bool = True, place: str | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", _HTTP_TIME)
        self.send_header("ETag", '"0"')
        if place is not None:
            self.send_header("Content-Range", place)
        self.end_headers()
        if is_sent and status != 204:
            self.wfile.write(data)


def _listing(objects: Mapping[str, bytes], query: Mapping[str, str]) -> str:
    """All keys below a prefix, those with a delimiter after it as folders; always one page."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    keys = [key for key in sorted(objects) if key.startswith(prefix)]
    folders, files = set[str](), []
    for key in keys:
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        if found:
            folders.add(prefix + head + delimiter)
        else:
            files.append(key)
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>{_TIME}</LastModified>"
        f"<ETag>0</ETag><Size>{len(objects[key])}</Size></Contents>"
        for key in files
    )
    common = "".join(
        f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        for folder in sorted(folders)
    )
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys)}</KeyCount>"
        f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{contents}{common}"
        "</ListBucketResult>"
    )
