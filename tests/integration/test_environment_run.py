"""A run whose agent is an environment of verifiers: its tasks train, its rubric is the reward."""

import pytest

from tests.integration.launched_run import LaunchedRun

RUN = "deploy/environments/run.toml"
STEPS, GROUPS_PER_STEP, HELD_OUT = 4, 4, 8

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(1500),
]


def test_an_environment_trains_on_its_data_set_and_is_evaluated_on_its_eval_dataset(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path
):
    run_id = new_run_id()
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    run = LaunchedRun(tmp_path, environ)
    try:
        run.start(
            RUN,
            f"run={run_id}",
            f"trainer.steps={STEPS}",
            f"queues.0.groups_per_step={GROUPS_PER_STEP}",
            "queues.0.slots=8",
            f"evaluation.tasks={HELD_OUT}",
        )
        assert run.wait_for_end(within_s=1400) == 0, run.story()
    finally:
        run.close()
    report = run.report(run_id)
    assert report["steps"] == STEPS
    # A group trains only if the rubric gave some of its episodes another reward than others.
    assert report["groups_retired"]["trained"] == STEPS * GROUPS_PER_STEP
    assert report["guarantees"] == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert {point["groups"] for point in report["evaluations"]} == {HELD_OUT}
