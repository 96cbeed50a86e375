"""A run may play its agents with another Python than that of its command: real environments."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_launcher import agents_python
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.user_code import check_user_code


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without any package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def equipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the packages of this one, and one more that nobody else has."""
    folder = tmp_path_factory.mktemp("equipped")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    (site / "here.pth").write_text("\n".join(path for path in sys.path if path))
    (site / "only_there.py").write_text("async def play(episode): ...\nprint('loud')\n")
    return folder / "bin" / "python"


def run_of(agent: str, *, outcome: str = "") -> RunConfiguration:
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m"),
        queues=(Queue(domain="d", task_source="json:loads", agent=agent, outcome=outcome),),
        trainer=Trainer(steps=1),
    )


def refusal(run: RunConfiguration, python: Path | str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        check_user_code(run, agents_python=str(python))
    return str(refused.value)


def test_an_agent_is_looked_for_where_it_will_be_played(equipped: Path) -> None:
    run = run_of("only_there:play")
    check_user_code(run, agents_python=str(equipped))
    missing = "queues.d.agent: 'only_there:play': no module 'only_there' in code_paths or installed"
    assert refusal(run, "") == missing
    assert refusal(run_of("only_there:plya"), equipped).startswith(
        "queues.d.agent: 'only_there:plya': there is no 'plya' in "
    )


def test_a_reward_is_looked_for_where_the_reward_service_runs(equipped: Path) -> None:
    assert refusal(run_of("only_there:play", outcome="only_there:play"), equipped) == (
        "queues.d.outcome: 'only_there:play': no module 'only_there' in code_paths or installed"
    )


def test_a_python_that_is_not_there_or_has_no_agents_service_is_refused_with_the_setting(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    nowhere = tmp_path / "python"
    assert refusal(run_of("json:loads"), nowhere).startswith(
        f"FORGEMQ_LAUNCHER_AGENTS_PYTHON: {nowhere} does not run: "
    )
    assert refusal(run_of("json:loads"), bare) == (
        f"FORGEMQ_LAUNCHER_AGENTS_PYTHON: {bare} has no agents service (ModuleNotFoundError: "
        "No module named 'forgemq_agents'): install forgemq-agents there"
    )


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("exit 0", "is no Python: it runs no program"),
        ('echo "$@"', "is no Python: it runs no program"),
        ("kill -SEGV $$", "cannot play agents: it ended with status -11"),
        ("echo it is Python 3.10 >&2; exit 1", "cannot play agents: it is Python 3.10"),
        ("exec sleep 60", "gives no answer within 1 s"),
    ],
)
def test_a_program_that_is_no_python_for_agents_is_refused_with_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    monkeypatch.setattr(agents_python, "ANSWERS_S_MAX", 1.0)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    assert refusal(run_of("json:loads"), python) == (
        f"FORGEMQ_LAUNCHER_AGENTS_PYTHON: {python} {words}"
    )


def test_the_check_finds_what_the_other_python_imports(equipped: Path) -> None:
    """The fixture is what it says: the module is there, and not here."""
    command = [equipped, "-c", "import only_there"]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"loud\n"
    assert "only_there" not in sys.modules
