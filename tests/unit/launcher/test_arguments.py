"""The arguments of `forgemq`, and its help."""

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


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ("inspect desk-1 --requests g-4.1", "what", "g-4.1"),
        ("replay desk-1 --to incident merger", "service", "merger"),
        ("run run.toml a=1 --resume desk-1 b=2", "overrides", ["a=1", "b=2"]),
    ],
)
def test_an_argument_that_may_be_left_out_is_taken_behind_an_option_too(
    arguments: str, name: str, value: object
) -> None:
    assert vars(options_of(arguments.split()))[name] == value


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("inspect desk-1 --requests g-4 g-5", "unrecognized arguments: g-5"),
        ("replay desk-1 --to incident trainer", "argument service: invalid choice: 'trainer'"),
        (
            "run --resume desk-1 trainer.steps=8",
            "file: name the run's file before key=value, got 'trainer.steps=8'",
        ),
    ],
)
def test_an_argument_in_the_place_of_another_is_refused_by_name(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        options_of(arguments.split())
    assert said in capsys.readouterr().err
