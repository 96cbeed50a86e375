"""The table of docs/clients.md, from what the last runs of the clients' tests passed.

Run as `python -m tests.clients.table`; `make test-clients` does it after the tests.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from tests.clients.install import CACHE, LOCKS, ROOT, folder_of

if TYPE_CHECKING:
    from tests.clients.bench import Client, Mode, Outcome

RESULTS = CACHE / "results"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- passed: begin -->", "<!-- passed: end -->"
PROTOCOLS = {"chat": "chat completions", "responses": "responses", "messages": "messages"}
ORDER = ("plain", "path", "odd", "parallel", "refused", "failed", "cut_waiting", "cut_answer")
COLUMNS = (*ORDER, "killed", "killed_late")


class Passed(Struct, frozen=True, kw_only=True):
    """One test of a client that passed."""

    client: str
    package: str
    protocol: str
    mode: str
    gave_up: bool
    asked_again: bool
    forks: tuple[str, ...]
    caller_asked: bool = False

    @classmethod
    def of(cls, client: "Client", mode: "Mode", outcome: "Outcome") -> "Passed":
        return cls(
            client=client.name,
            package=client.package,
            protocol=client.protocol,
            mode=mode,
            gave_up=outcome.exit_code != 0,
            asked_again=len(outcome.forks()) > len(client.forks),
            forks=client.forks,
            caller_asked=mode == "killed_late" and client.asks_again,
        )


def _file(client: str, protocol: str, mode: str) -> Path:
    name = f"{client}-{protocol}-{mode}".replace(" ", "_").replace("/", "_")
    return RESULTS / f"{name}.json"


def forget(client: "Client", mode: "Mode") -> None:
    """Remove the result of an earlier run."""
    _file(client.name, client.protocol, mode).unlink(missing_ok=True)


def keep(passed: Passed) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = _file(passed.client, passed.protocol, passed.mode)
    file.write_bytes(msgspec.json.encode(passed))


def version_of(package: str, client: str) -> str:
    """The pinned version; a client's name is that of its package up to the first space."""
    name = client.split(" ")[0]
    if (LOCKS / package).is_dir():
        pinned = json.loads((LOCKS / package / "package.json").read_text())["dependencies"]
        return str(pinned[name])
    lines = (LOCKS / f"{package}.txt").read_text().splitlines()
    return next(line.split("==")[1] for line in lines if line.split("==")[0] == name)


def rows(results: list[Passed]) -> list[str]:
    """One line a client and protocol, sorted."""
    lines = []
    for client, protocol in sorted({(result.client, result.protocol) for result in results}):
        of_one = {r.mode: r for r in results if (r.client, r.protocol) == (client, protocol)}
        package = next(iter(of_one.values())).package
        cells = [_cell(of_one.get(mode)) for mode in COLUMNS]
        forks = sorted({fork for result in of_one.values() for fork in result.forks})
        lines.append(
            f"| {client} | {version_of(package, client)} | {PROTOCOLS[protocol]} | "
            f"{' | '.join(cells)} | {', '.join(forks)} |"
        )
    return lines


def _cell(result: Passed | None) -> str:
    if result is None:
        return ""
    if result.gave_up:
        return "ends"
    if result.caller_asked:
        return "caller"
    return "again" if result.asked_again else "yes"


def _is_of_installed(file: Path, passed: Passed) -> bool:
    """Whether the result is newer than the installation, and so of the pinned version."""
    installed = folder_of(passed.package) / "installed"
    return installed.exists() and file.stat().st_mtime > installed.stat().st_mtime


def main() -> int:
    """Write the table into the page, between its two markers."""
    results = [
        passed
        for file in RESULTS.glob("*.json")
        if _is_of_installed(file, passed := msgspec.json.decode(file.read_bytes(), type=Passed))
    ]
    header = f"| client | version | protocol | {' | '.join(COLUMNS)} | forks |"
    table = [header.replace("_", " "), "|---" * (len(COLUMNS) + 4) + "|", *rows(results)]
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{chr(10).join(table)}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
