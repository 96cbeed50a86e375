"""The storm sees: each small defect in the shell or a core turns it red within a few seeds."""

from pathlib import Path

import pytest

from tests.simulation.storm.mutants import MUTANTS, Mutant, run_mutant

SEEDS = 120
"""As many as the suite runs of each drawn case."""

pytestmark = [pytest.mark.simulation, pytest.mark.slow, pytest.mark.timeout(300)]

# Each takes seconds, so all but every third are long tests.
EVERY_MUTANT = [
    pytest.param(
        mutant, id=mutant.name.replace(" ", "_"), marks=[pytest.mark.long] if number % 3 else []
    )
    for number, mutant in enumerate(MUTANTS)
]


@pytest.mark.parametrize("mutant", EVERY_MUTANT)
def test_a_storm_finds(mutant: Mutant, tmp_path: Path):
    ended = run_mutant(mutant, tmp_path, seeds=SEEDS)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"DEFECT {mutant.case} seed" in ended.stdout, ended.stderr


def test_a_storm_finds_nothing_in_a_copy_without_a_defect(tmp_path: Path):
    same = Mutant(name="none", file="forgemq_shell/task.py", edits=(("class TransformTask:",) * 2,))
    ended = run_mutant(same, tmp_path, seeds=20)
    assert ended.returncode == 0, ended.stdout + ended.stderr
