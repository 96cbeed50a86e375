"""The table of clients: what was run replaces its cell, and everything else stays."""

from typing import Any

from tests.clients.table import COLUMNS, Result, rows, table_of, version_of

CLIENT = "openai (Python, whole)"
VERSION = version_of("sdk_python", CLIENT)


def result(mode: str, **changes: Any) -> Result:
    fields: dict[str, Any] = {"client": CLIENT, "package": "sdk_python", "protocol": "chat"}
    return Result(**{**fields, "mode": mode, "forks": (), "is_passed": True, **changes})


def row(*cells: str, version: str = VERSION, client: str = CLIENT, forks: str = "") -> str:
    return "| " + " | ".join((client, version, "chat completions", *cells, forks)) + " |"


def cells(**named: str) -> list[str]:
    return [named.get(column, "") for column in COLUMNS]


def test_what_was_not_run_here_keeps_its_cell_and_what_did_not_pass_is_empty() -> None:
    earlier = row(*["yes"] * (len(COLUMNS) - 2))  # Of before there were the last two columns.
    run = [
        result("engine_killed"),
        result("cut_answer", gave_up=True),
        result("odd", is_passed=False),
    ]
    expected = {column: "yes" for column in COLUMNS} | {
        "cut_answer": "ends",
        "odd": "",
        "inference_killed": "",
    }
    assert rows(run, [earlier]) == [row(*cells(**expected))]


def test_a_row_of_another_version_keeps_no_cell_of_a_client_that_was_run() -> None:
    earlier = row(*["yes"] * len(COLUMNS), version="0.0.1")
    assert rows([result("plain")], [earlier]) == [row(*cells(plain="yes"))]


def test_a_client_that_was_not_run_keeps_its_row_with_the_version_that_was() -> None:
    other = row(*["again"] * len(COLUMNS), client="other", version="0.0.1", forks="edited")
    assert rows([result("plain")], [other]) == [row(*cells(plain="yes")), other]


def test_the_table_of_a_page_is_the_same_if_nothing_was_run() -> None:
    table = table_of([result("plain"), result("killed", caller_asked=True)], "")
    assert table_of([], f"\n{table}\n") == table
    assert table.splitlines()[2] == row(*cells(plain="yes", killed="caller"))
