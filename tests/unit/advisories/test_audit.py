"""What the advisories of locked packages do to a build."""

import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "advisories"
# As pip-audit 2.10.1 writes it.
REPORT = {
    "dependencies": [
        {"name": "aiohttp", "version": "3.14.5", "vulns": []},
        {
            "name": "jinja2",
            "version": "2.4.1",
            "vulns": [
                {
                    "id": "PYSEC-2019-217",
                    "fix_versions": ["2.7.3"],
                    "aliases": ["CVE-2014-1402"],
                    "description": "x",
                }
            ],
        },
        {"name": "own", "skip_reason": "Dependency not found on PyPI"},
    ],
    "fixes": [],
}
REASON = "Only templates of this repository are rendered, by one user."


@pytest.fixture(scope="module")
def audit() -> Iterator[ModuleType]:
    specification = importlib.util.spec_from_file_location("audit", FOLDER / "audit.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["audit"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["audit"]


def finding(audit: ModuleType, report: Any, *accepted: tuple[str, str]) -> Any:
    answer = msgspec.convert(report, audit.Answer)
    entries = [audit.Accepted(package=p, id=i, reason=REASON) for p, i in accepted]
    return audit.finding_of(answer, entries)


def test_a_known_vulnerability_fails_and_is_named_with_its_mended_version(audit) -> None:
    found = finding(audit, REPORT)
    assert found.is_failure
    assert found.lines == (
        "audited 2 of 3 locked packages: 1 vulnerabilities",
        "jinja2 2.4.1: PYSEC-2019-217, CVE-2014-1402; mended in 2.7.3",
    )


@pytest.mark.parametrize("name", ["PYSEC-2019-217", "CVE-2014-1402"])
def test_one_that_is_accepted_by_any_of_its_names_fails_nothing(audit, name: str) -> None:
    found = finding(audit, REPORT, ("jinja2", name))
    assert not found.is_failure
    assert found.lines == ("audited 2 of 3 locked packages: 0 vulnerabilities",)


def test_an_entry_accepts_its_own_package_alone_and_is_named_once_nothing_needs_it(audit) -> None:
    found = finding(audit, REPORT, ("aiohttp", "PYSEC-2019-217"))
    assert found.is_failure
    assert found.lines[-1] == (
        "aiohttp PYSEC-2019-217 is not found any more: take it out of accepted.toml"
    )


def test_a_database_that_knows_no_package_is_no_audit(audit) -> None:
    """A mirror of the index may answer 404 for every package."""
    report = {"dependencies": [REPORT["dependencies"][2]], "fixes": []}
    found = finding(audit, report, ("jinja2", "PYSEC-2019-217"))
    assert not found.is_failure
    assert found.lines == (
        "not audited: the advisory database knows none of the 1 locked packages",
    )


def test_a_database_that_is_away_is_one_line_and_any_other_end_of_the_tool_fails(audit) -> None:
    said = (
        "Traceback (most recent call last):\n  raise ConnectionError(e, request=request)\n"
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='pypi.org', port=443)\n"
    )
    away = audit.finding_without_answer(said)
    assert (away.is_failure, len(away.lines)) == (False, 1)
    assert away.lines[0].startswith(
        "not audited: the advisory database cannot be reached: requests"
    )
    broken = audit.finding_without_answer("ERROR: requirement x is missing a hash")
    assert broken.is_failure
    assert "missing a hash" in broken.lines[0]


def test_an_accepted_vulnerability_needs_a_reason(audit, tmp_path: Path) -> None:
    path = tmp_path / "accepted.toml"
    path.write_text('[[accepted]]\npackage = "a"\nid = "b"\nreason = ""\n')
    with pytest.raises(msgspec.ValidationError, match="length >= 20"):
        audit.accepted_in(path)
    assert isinstance(audit.accepted_in(FOLDER / "accepted.toml"), tuple)


class Advisories(BaseHTTPRequestHandler):
    """OSV's API, which knows a vulnerability of jinja2 and none of other packages."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = asked["package"]["name"]
        fixed = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "999"}]}
        known = {
            "id": "PYSEC-1-1",
            "aliases": ["CVE-1-1"],
            "details": "x",
            "modified": "2026-01-01T00:00:00Z",
            "affected": [{"package": {"name": name, "ecosystem": "PyPI"}, "ranges": [fixed]}],
        }
        body = json.dumps({"vulns": [known]} if name == "jinja2" else {}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


@pytest.mark.long  # Installs the tool, and asks about every package.
def test_the_tool_asks_about_every_locked_package(audit, monkeypatch, capsys) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = HTTPServer(("127.0.0.1", 0), Advisories)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        status = audit.main([f"http://127.0.0.1:{server.server_port}/v1/query"])
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    lines = capsys.readouterr().out.splitlines()
    count = (ROOT / "requirements.lock").read_text().count("==")
    assert status == 1
    assert lines[0] == f"advisories: audited {count} of {count} locked packages: 1 vulnerabilities"
    assert lines[1].endswith(": PYSEC-1-1, CVE-1-1; mended in 999")
