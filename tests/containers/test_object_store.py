"""An image reaches an object store, with keys and with the identity that a cluster gives a pod."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import docker
import pytest

from tests.containers.images import image_of
from tests.integration.object_store import object_store

pytestmark = [pytest.mark.containers, pytest.mark.long, pytest.mark.timeout(900)]

WRITE_AND_READ = """
import fsspec
store, path = fsspec.core.url_to_fs("s3://bucket/blobs/r/a")
store.pipe_file(path, b"x" * 1000)
print(len(store.cat_file(path)), store.ls("bucket/blobs/r", detail=False))
"""
SIGNED_IN = """<AssumeRoleWithWebIdentityResponse
  xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult><Credentials>
  <AccessKeyId>issued</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>
  <Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>
  </AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


def run_in_merger(environ: dict[str, str], token: Path | None = None) -> str:
    client = docker.from_env(timeout=120)
    printed = client.containers.run(
        image_of("forgemq-merger", client),
        entrypoint=["/venv/bin/python", "-c", WRITE_AND_READ],
        environment=environ,
        network_mode="host",
        read_only=True,
        tmpfs={"/tmp": "rw"},
        volumes={str(token): {"bind": "/token", "mode": "ro"}} if token else {},
        remove=True,
    )
    return printed.decode().strip()


@contextmanager
def sign_in_server() -> Iterator[tuple[str, list[str]]]:
    """Address of a server that signs in who shows a token, and the bodies that it got."""
    bodies: list[str] = []

    class Requests(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.send_header("Content-Length", str(len(SIGNED_IN)))
            self.end_headers()
            self.wfile.write(SIGNED_IN.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_blob_goes_to_the_store_and_comes_back():
    with object_store() as store:
        printed = run_in_merger(dict(store.environ))
        assert printed == "1000 ['bucket/blobs/r/a']"
        assert store.objects == {"blobs/r/a": b"x" * 1000}


def test_a_pod_signs_in_with_the_token_of_its_service_account(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("of-the-pod")
    with object_store() as store, sign_in_server() as (address, bodies):
        keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        environ = {name: value for name, value in store.environ.items() if name not in keys}
        environ |= {
            "AWS_ENDPOINT_URL_STS": address,
            "AWS_WEB_IDENTITY_TOKEN_FILE": "/token",
            "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/forgemq",
        }
        assert run_in_merger(environ, token) == "1000 ['bucket/blobs/r/a']"
    assert ["of-the-pod" in body for body in bodies] == [True]
