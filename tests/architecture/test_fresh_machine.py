"""A fresh machine is enough: nothing that a person installed or set by hand is needed or used."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("contracts", "libs", "services", "deploy", "loadtests", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# Programs that `make setup` installs. By name they would be whatever the machine has.
INSTALLED = {"jgo", "lint-imports", "mypy", "pytest", "python", "python3", "ruff", "uv"}
A_NAME = re.compile(rf"""["'](?:{"|".join(sorted(INSTALLED))})["']""")


def trap(folder: Path) -> Path:
    """A folder of programs, each of which notes its use in the file `used` and fails."""
    folder.mkdir()
    for name in sorted(INSTALLED):
        program = folder / name
        program.write_text(f'#!/bin/sh\necho {name} >> "{folder}/used"\nexit 97\n')
        program.chmod(0o755)
    return folder


def test_scrubbed_passes_on_neither_path_nor_home_nor_settings(tmp_path: Path):
    hand_made = {
        "PATH": f"{trap(tmp_path / 'programs')}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path),
        "FORGEMQ_KAFKA": "by.hand:9092",
        "UV_CACHE_DIR": str(tmp_path),
        "HTTPS_PROXY": "http://proxy:3128",
    }
    shown = subprocess.run(
        [ROOT / ".ci" / "scrubbed", "sh", "-c", 'env; ls -A "$HOME" | wc -l'],
        env=hand_made,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.splitlines()
    seen = dict(line.partition("=")[::2] for line in shown[:-1])
    assert seen.keys() - {"PWD", "SHLVL", "_", "OLDPWD"} == {
        *("HOME", "LANG", "PATH", "PYTHON", "XDG_CACHE_HOME"),
        "HTTPS_PROXY",
    }
    assert str(tmp_path) not in seen["PATH"]
    assert seen["PATH"].split(":")[-1] == "/bin"
    assert seen["HOME"] != str(tmp_path)
    assert shown[-1] == "0", "HOME is not empty"
    assert not Path(seen["HOME"]).exists(), "HOME was left behind"
    assert Path(seen["PYTHON"]).resolve() == Path(sys.executable).resolve()


def test_scrubbed_returns_the_status_of_its_command():
    done = subprocess.run(
        [ROOT / ".ci" / "scrubbed", "sh", "-c", "exit 7"], check=False, timeout=60
    )
    assert done.returncode == 7


def test_ci_runs_the_commands_of_the_readme_in_the_scrubbed_environment():
    commands = [
        line
        for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == [".ci/scrubbed make lint advisories test"]
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_program_of_the_environment_is_started_by_its_bare_name():
    """The first element of a command list: `[UV, ...]`, never `["uv", ...]`."""
    started = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {first.value}"
        for path in SOURCES
        if A_NAME.search(text := path.read_text(encoding="utf-8"))  # Parsing is what costs.
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1
        if isinstance(first := node.elts[0], ast.Constant) and first.value in INSTALLED
        if path != Path(__file__)  # Its own list of names.
    ]
    assert started == []


def test_every_tool_of_the_makefile_is_that_of_the_environment():
    """`$(PYTHON)` makes the environment; every other program comes out of it."""
    recipes = re.findall(r"^\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    names = "|".join(sorted(INSTALLED))
    bare = [line for line in recipes if re.search(rf"(?:^|[@&|;]\s*)(?:{names})\s", line)]
    assert bare == []


def locked(name: str) -> re.Match[str]:
    """The lock's lines about this package; group 1 is its version."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pattern = rf"^{name}==(\S+) \\\n(?:    --hash=\S+(?: \\)?\n)+"
    found = re.search(pattern, lock, re.MULTILINE)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_setup_uses_the_locked_uv_and_no_program_of_the_machine(tmp_path: Path):
    """With a lock of two packages, so that it takes seconds; a user's tools are traps."""
    uv, build = locked("uv"), locked("uv-build")
    (tmp_path / "requirements.lock").write_text(uv[0] + build[0], encoding="utf-8")
    package = ROOT / "libs" / "settings"
    trapped = trap(tmp_path / "programs")
    subprocess.run(
        ["/bin/bash", ROOT / "deploy" / "setup.sh", sys.executable, ".venv", package],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{trapped}:/usr/bin:/bin"},
        check=True,
        timeout=280,
    )
    version = subprocess.run(
        [tmp_path / ".venv" / "bin" / "uv", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    assert version.split()[1] == uv[1]
    assert not (trapped / "used").exists()
