"""`forgemq eval`: a model judged on held-out tasks, without a trainer."""

import json
import subprocess

import pytest

from tests.integration.launched_run import FORGEMQ, ROOT, LaunchedRun
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(240)]

TASKS = 4
SAMPLES = 3
NO_FILE = (
    *("queues.dialogue.agent=dialogue:play", "queues.dialogue.task_source=dialogue:task"),
    *("queues.dialogue.outcome=dialogue:outcome", 'code_paths=["tests/integration/dialogue"]'),
    *(f"evaluation.tasks={TASKS}", "episodes.sampling.max_tokens=24", "log.group_partitions=2"),
)
WITHIN_S = 180


def test_a_model_is_judged_on_a_domain_of_no_file_and_table_and_report_say_the_same(
    kafka_bootstrap, new_run_id, tmp_path
):
    run_id = new_run_id()
    with stand_in_engine(latency_s=0.05, tokens=16) as engine_url:
        environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": engine_url}
        run = LaunchedRun(tmp_path, environ)
        command = [str(FORGEMQ), "eval", "deploy/demo/model", f"run={run_id}", *NO_FILE]
        command += ["--domain", "dialogue", "--samples", str(SAMPLES)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=run.environ,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads((run.runs / run_id / "pass_at_k.json").read_text())
    assert (found["domain"], found["samples"], found["temperature"]) == ("dialogue", SAMPLES, 1.0)
    assert (found["episodes"], found["episodes_masked"]) == (TASKS * SAMPLES, 0)
    assert [task["task_number"] for task in found["tasks"]] == [1_000_000 + n for n in range(TASKS)]
    assert {task["samples"] for task in found["tasks"]} == {SAMPLES}
    assert [rate["k"] for rate in found["pass_at_k"]] == [1, 2, 3]
    for rate in found["pass_at_k"]:
        assert rate["low"] <= rate["rate"] <= rate["high"]
        assert f"{rate['rate']:.3f}" in done.stdout
    assert not any((run.runs / run_id / "checkpoints").iterdir())
    assert not (run.runs / run_id / "logs" / "trainer.log").exists()
