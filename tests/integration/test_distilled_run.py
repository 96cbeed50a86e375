"""Whole runs with a teacher, on a real broker and two real engines: the policy comes near it.

The demo's model is taught by the archive desk's, which has its tokens and was trained further. The
teacher alone decides what trains (`reward_weight = 0`). In the control its weight is 1e-9, and the
advantages are those of the rewards.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_fixture import engine_options, started_engine
from tests.integration.launched_run import LaunchedRun, curves_of_the_demo

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)]

TEACHER = Path(__file__).parents[2] / "deploy" / "archive_desk" / "model"
STEPS = 20
NEWEST = 3
TAUGHT = ("distillation.weight=1.0", "distillation.reward_weight=0.0")
UNTAUGHT = ("distillation.weight=1e-9", "distillation.reward_weight=1.0")


@pytest.fixture(scope="module")
def teacher_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("teacher")
    with started_engine(folder, engine_options(), model=TEACHER) as url:
        yield url


def divergences(
    folder: Path, run_id: str, *overrides: str, environ: dict[str, str]
) -> tuple[float, float]:
    """Divergence to the teacher in the first step, and over the newest steps, nats a token."""
    run = LaunchedRun(folder, environ)
    rows = curves_of_the_demo(run, run_id, *overrides, steps=STEPS)
    assert run.report(run_id)["guarantees"] == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    seen = [row["kl_teacher"] for row in rows if "kl_teacher" in row]
    assert len(seen) == STEPS
    return seen[0], statistics.mean(seen[-NEWEST:])


@pytest.mark.parametrize(("weights", "least", "most"), [(TAUGHT, 0, 0.6), (UNTAUGHT, 0.93, 99)])
def test_a_policy_comes_near_its_teacher_if_and_only_if_the_teacher_has_weight(
    kafka_bootstrap, base_engine_url, teacher_url, new_run_id, tmp_path, weights, least, most
):
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    teacher = f"distillation.url={teacher_url}"
    first, last = divergences(tmp_path, new_run_id(), teacher, *weights, environ=environ)
    assert least < last / first < most
