"""What docs/compatibility.md promises, as the tests read it."""

import re
from pathlib import Path

from msgspec import Struct

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"


class MissedField(Struct, frozen=True, kw_only=True):
    """A row of the table of fields that a reader of the previous release may miss.

    Attributes:
        field: As `Struct.field`.
        writers: Services that write it.
        before: Services of this release that must be up before a writer is; () if none must.
    """

    field: str
    writers: tuple[str, ...]
    before: tuple[str, ...]


def order() -> list[str]:
    """Services in the order of an upgrade."""
    return re.findall(r"^\d+\. \*\*([a-z]+)\*\*", _section("Upgrade"), flags=re.MULTILINE)


def missed_fields() -> list[MissedField]:
    """The table of fields that a reader of the previous release may miss."""
    return [
        MissedField(field=field, writers=_names(writers), before=_names(before))
        for row in _section("Fields that the previous release does not know").splitlines()
        if row.startswith("| `")
        for fields, writers, before, _ in [re.split(r" *\| *", row.strip("| "))]
        for field in re.findall(r"`([\w.]+)`", fields)
    ]


def new_settings() -> list[str]:
    """Settings of a run file that the previous release refuses, as `Struct.field`."""
    return re.findall(r"`([A-Z]\w+\.\w+)`", _section("Settings that the previous release refuses"))


def _section(title: str) -> str:
    found = re.search(
        rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found, f"{PAGE.name} has no section {title!r}"
    return found[1]


def _names(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z]+", cell))
