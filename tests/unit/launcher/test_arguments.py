"""The help of `forgemq`."""

import pytest

from forgemq_launcher.arguments import options_of

SECTIONS = ("positional arguments:", "options:")
BELOW = " " * 10
"""Begins the explanation of an argument whose name leaves no room for it beside."""


def commands(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Every command, as `forgemq --help` lists them."""
    lines = asked("--help", capsys=capsys)
    return [line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "]


def asked(*arguments: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        options_of(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_every_argument_of_every_command_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # An explanation is on one line.
    found = commands(capsys)
    assert {"run", "inspect", "drain-lane", "import", "plan"} < set(found)
    for command in found:
        lines = asked(command, "--help", capsys=capsys)
        begin = min(n for n, line in enumerate(lines) if line in SECTIONS)
        for line, following in zip(lines[begin:], [*lines[begin + 1 :], ""], strict=True):
            if line.startswith("  ") and not line.startswith(BELOW):
                is_beside = "  " in line.strip()
                assert is_beside or following.startswith(BELOW), f"{command}: {line.strip()}"
