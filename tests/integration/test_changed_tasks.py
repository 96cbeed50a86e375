"""A run whose file of tasks is changed while the run is down."""

import json

import pytest

from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(400)]

RUN = "of-a-file"


def interrupt_at_services(run: LaunchedRun) -> str:
    """Press Ctrl-C once services start; returns what was printed."""
    run.wait_for_line(r"starting \d+ services", within_s=90)
    run.interrupt()
    assert run.wait_for_end(within_s=60) == 130
    return run.output()


def test_a_resume_tells_tasks_that_were_added_and_refuses_others(tmp_path):
    file = tmp_path / "tasks.jsonl"
    lines = [f"{json.dumps({'number': number})}\n" for number in range(4)]
    file.write_text("".join(lines[:3]))
    run = LaunchedRun(tmp_path, {})
    own = ("queues.0.task_source=", f"queues.0.task_file={file}", "evaluation.tasks=0")
    with stand_in_engine(latency_s=0.2, tokens=16) as engine_url:
        stands_in = {"FORGEMQ_ENGINE_URL": engine_url}
        try:
            run.start(DIALOGUE, f"run={RUN}", *own, environ=stands_in)
            assert "changed by this resume" not in interrupt_at_services(run)

            file.write_text("".join(reversed(lines[:3])))
            run.start(DIALOGUE, "--resume", RUN, environ=stands_in)
            assert run.wait_for_end(within_s=60) == 2
            assert "queues.dialogue.task_file: the run has had 3 tasks, and as" in run.output()
            assert "starts" not in run.output()

            file.write_text("".join(lines))
            run.start(DIALOGUE, "--resume", RUN, environ=stands_in)
            told = "changed by this resume: queues.dialogue.task_file: 3 tasks -> 4 tasks"
            assert told in interrupt_at_services(run)

            run.start(DIALOGUE, "--resume", RUN, environ=stands_in)
            assert "changed by this resume" not in interrupt_at_services(run)
        finally:
            run.close()
