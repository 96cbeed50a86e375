"""The table of docs/clients.md, from what the last runs of the clients' tests passed.

Run as `python -m tests.clients.table`; `make test-clients` does it after the tests. What was not
run here since its client was installed keeps its cell, if the page has it of the pinned version.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tests.clients.install import CACHE, LOCKS, ROOT, folder_of

if TYPE_CHECKING:
    from tests.clients.bench import Client, Mode, Outcome

RESULTS = CACHE / "results"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- passed: begin -->", "<!-- passed: end -->"
PROTOCOLS = {"chat": "chat completions", "responses": "responses", "messages": "messages"}
ORDER = ("plain", "path", "odd", "parallel", "refused", "failed", "cut_waiting", "cut_answer")
COLUMNS = (*ORDER, "killed", "killed_late", "inference_killed", "engine_killed")


class Result(Struct, frozen=True, kw_only=True):
    """One test of a client that was begun, and what came of it if it passed."""

    client: str
    package: str
    protocol: str
    mode: str
    forks: tuple[str, ...]
    is_passed: bool = False
    gave_up: bool = False
    asked_again: bool = False
    caller_asked: bool = False

    @classmethod
    def begun(cls, client: "Client", mode: "Mode") -> "Result":
        """What is kept of a test that does not reach its end."""
        return cls(
            client=client.name,
            package=client.package,
            protocol=client.protocol,
            mode=mode,
            forks=client.forks,
        )

    @classmethod
    def passed(cls, client: "Client", mode: "Mode", outcome: "Outcome") -> "Result":
        return replace(
            cls.begun(client, mode),
            is_passed=True,
            gave_up=outcome.exit_code != 0,
            asked_again=len(outcome.forks()) > len(client.forks),
            caller_asked=mode == "killed_late" and client.asks_again,
        )


def _file(client: str, protocol: str, mode: str) -> Path:
    name = f"{client}-{protocol}-{mode}".replace(" ", "_").replace("/", "_")
    return RESULTS / f"{name}.json"


def keep(result: Result) -> None:
    """Keep this result instead of the last one."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = _file(result.client, result.protocol, result.mode)
    file.write_bytes(msgspec.json.encode(result))


def version_of(package: str, client: str) -> str:
    """The pinned version; a client's name is that of its package up to the first space."""
    name = client.split(" ")[0]
    if (LOCKS / package).is_dir():
        pinned = json.loads((LOCKS / package / "package.json").read_text())["dependencies"]
        return str(pinned[name])
    lines = (LOCKS / f"{package}.txt").read_text().splitlines()
    return next(line.split("==")[1] for line in lines if line.split("==")[0] == name)


def rows(results: list[Result], earlier: Sequence[str] = ()) -> list[str]:
    """One line a client and protocol, sorted.

    Args:
        results: Of this machine.
        earlier: Lines that stand in the page; they give the cells of what was not run here.
    """
    kept = {_name(line): line for line in earlier}
    run = {(each.client, PROTOCOLS[each.protocol]) for each in results}
    return [
        _row(name, [each for each in results if _is_of(name, each)], kept.get(name, ""))
        if name in run
        else kept[name]
        for name in sorted(run | kept.keys())
    ]


def _name(line: str) -> tuple[str, str]:
    """Client and protocol of a row."""
    client, _, protocol, *_ = _cells(line)
    return client, protocol


def _is_of(name: tuple[str, str], result: Result) -> bool:
    return name == (result.client, PROTOCOLS[result.protocol])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def _row(name: tuple[str, str], results: list[Result], earlier: str) -> str:
    client, protocol = name
    version = version_of(results[0].package, client)
    cells = dict.fromkeys(COLUMNS, "")
    if earlier and _cells(earlier)[1] == version:
        # A page that was written before there was a column ends in fewer cells.
        cells |= dict(zip(COLUMNS, _cells(earlier)[3:-1], strict=False))
    cells |= {result.mode: _cell(result) for result in results}
    forks = ", ".join(sorted({fork for result in results for fork in result.forks}))
    return "| " + " | ".join((client, version, protocol, *cells.values(), forks)) + " |"


def _cell(result: Result) -> str:
    if not result.is_passed:
        return ""
    if result.gave_up:
        return "ends"
    if result.caller_asked:
        return "caller"
    return "again" if result.asked_again else "yes"


def _is_of_installed(file: Path, result: Result) -> bool:
    """Whether the result is newer than the installation, and so of the pinned version."""
    installed = folder_of(result.package) / "installed"
    return installed.exists() and file.stat().st_mtime > installed.stat().st_mtime


def main() -> int:
    """Write the table into the page, between its two markers."""
    results = [
        result
        for file in RESULTS.glob("*.json")
        if _is_of_installed(file, result := msgspec.json.decode(file.read_bytes(), type=Result))
    ]
    before, rest = PAGE.read_text().split(BEGIN)
    table, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table_of(results, table)}\n{END}{after}")
    return 0


def table_of(results: list[Result], earlier: str) -> str:
    """The whole table; `earlier` is the one that it takes the place of."""
    titles = ["client", "version", "protocol", *COLUMNS, "forks"]
    header = f"| {' | '.join(titles)} |".replace("_", " ")
    lines = rows(results, earlier.strip().splitlines()[2:])
    return "\n".join([header, "|---" * len(titles) + "|", *lines])


if __name__ == "__main__":
    sys.exit(main())
