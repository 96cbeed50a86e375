"""Looks the locked packages up in the advisory database of PyPI; run by `make advisories`.

It fails for a known vulnerability that accepted.toml does not name with a reason. If the database
cannot be reached, or knows none of the packages, as a mirror of the index may, one line says so and
nothing fails.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TOOL = ROOT / ".cache" / "pip-audit"
CONNECT_S = 10

_SHOWN_CHARACTERS = 160
_SAID_CHARACTERS = 2000

# What the tool's client of HTTP raises if nobody answers, or only with an error of the server.
_AWAY = re.compile(r"\b(?:Connection|Proxy|SSL|HTTP|Service)Error\b|\b(?:Read|Connect)?Timeout\b")


class Vulnerability(Struct, frozen=True):
    """One that is known of a version."""

    id: str
    aliases: tuple[str, ...] = ()
    fix_versions: tuple[str, ...] = ()


class Package(Struct, frozen=True):
    """What the database says about a locked package; `skip_reason` if it does not know it."""

    name: str
    version: str = ""
    vulns: tuple[Vulnerability, ...] = ()
    skip_reason: str = ""


class Answer(Struct, frozen=True):
    """The tool's report."""

    dependencies: tuple[Package, ...]


class Accepted(Struct, frozen=True, forbid_unknown_fields=True):
    """A vulnerability that cannot harm here, and why."""

    package: str
    id: str
    reason: Annotated[str, Meta(min_length=20)]

    def covers(self, package: Package, found: Vulnerability) -> bool:
        """Whether it is this one of this package."""
        return self.package == package.name and self.id in (found.id, *found.aliases)


class AcceptedFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of accepted.toml."""

    accepted: tuple[Accepted, ...] = ()


class Finding(Struct, frozen=True):
    """What is printed, and whether it fails the build."""

    lines: tuple[str, ...]
    is_failure: bool = False


def finding_of(answer: Answer, accepted: Sequence[Accepted]) -> Finding:
    """What an answer of the database means."""
    known = [package for package in answer.dependencies if not package.skip_reason]
    count = len(answer.dependencies)
    if not known:
        return Finding(
            (f"not audited: the advisory database knows none of the {count} locked packages",)
        )
    open_ones = list(_unaccepted(known, accepted))
    lines = [f"audited {len(known)} of {count} locked packages: {len(open_ones)} vulnerabilities"]
    lines += open_ones
    lines += [
        f"{each.package} {each.id} is not found any more: take it out of accepted.toml"
        for each in accepted
        if not any(each.covers(package, found) for package in known for found in package.vulns)
    ]
    return Finding(tuple(lines), is_failure=bool(open_ones))


def _unaccepted(packages: Iterable[Package], accepted: Sequence[Accepted]) -> Iterator[str]:
    for package in packages:
        for found in package.vulns:
            if any(each.covers(package, found) for each in accepted):
                continue
            fixed = ", ".join(found.fix_versions) or "no version"
            names = ", ".join((found.id, *found.aliases))
            yield f"{package.name} {package.version}: {names}; mended in {fixed}"


def finding_without_answer(said: str) -> Finding:
    """What it means that the tool ended without a report, and said this."""
    away = [line.strip() for line in said.splitlines() if _AWAY.search(line)]
    if away:
        why = away[-1][:_SHOWN_CHARACTERS]
        return Finding((f"not audited: the advisory database cannot be reached: {why}",))
    return Finding((f"the tool failed: {said.strip()[-_SAID_CHARACTERS:]}",), is_failure=True)


def accepted_in(path: Path) -> tuple[Accepted, ...]:
    """The accepted vulnerabilities of a file."""
    return msgspec.toml.decode(path.read_bytes(), type=AcceptedFile).accepted


def install_tool() -> None:
    """Make the tool's environment from its own hashed lock, unless it is there."""
    uv, lock = Path(sys.executable).with_name("uv"), FOLDER / "tool.lock"
    done = TOOL / "installed.lock"
    if done.is_file() and done.read_bytes() == lock.read_bytes():
        return
    python = TOOL / "bin" / "python"
    make = (str(uv), "venv", "--quiet", "--clear", "--python", sys.executable, str(TOOL))
    fill = (str(uv), "pip", "install", "--quiet", "--python", str(python), "--require-hashes")
    subprocess.run(make, check=True)
    subprocess.run((*fill, "--requirement", str(lock)), check=True)
    done.write_bytes(lock.read_bytes())


def audit(lock: Path, accepted: Sequence[Accepted], *, osv_url: str = "") -> Finding:
    """Look up the packages of a hashed lock; nothing is installed or resolved.

    Args:
        lock: Of packages and versions.
        accepted: What fails nothing.
        osv_url: Of a server of OSV's API to ask in place of PyPI, `https://api.osv.dev/v1/query`.
    """
    command = (str(TOOL / "bin" / "pip-audit"), "--requirement", str(lock), "--require-hashes")
    options = ("--disable-pip", "--format", "json", "--progress-spinner", "off")
    times = ("--timeout", str(CONNECT_S), "--cache-dir", str(TOOL / "answers"))
    asked = ("--vulnerability-service", "osv", "--osv-url", osv_url) if osv_url else ()
    done = subprocess.run(
        (*command, *options, *times, *asked), capture_output=True, text=True, check=False
    )
    try:
        answer = msgspec.json.decode(done.stdout, type=Answer)
    except msgspec.DecodeError:
        return finding_without_answer(done.stderr)
    return finding_of(answer, accepted)


def main(arguments: Sequence[str]) -> int:
    """Audit and print; returns the exit status. An argument is the `osv_url`."""
    accepted = accepted_in(FOLDER / "accepted.toml")
    install_tool()
    finding = audit(ROOT / "requirements.lock", accepted, osv_url="".join(arguments[:1]))
    for line in finding.lines:
        sys.stdout.write(f"advisories: {line}\n")
    return int(finding.is_failure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
