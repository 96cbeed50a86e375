"""A run that the previous release's `forgemq run` began, and this one's goes on with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forgemq_bus.broker import LocalBroker
from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.run_log import accounts
from tests.integration.stand_in import stand_in_engine
from tests.previous_release import PRESENT, previous_release

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
]

STEPS = 8


@pytest.fixture
def bootstrap(tmp_path: Path) -> Iterator[str]:
    """A broker without runs of other tests: the previous release might not read them."""
    broker = LocalBroker(tmp_path / "kafka")
    yield broker.start()
    broker.stop()


def test_a_run_of_the_previous_release_is_resumed_by_this_one_and_loses_nothing(
    bootstrap: str, new_run_id, tmp_path: Path
):
    previous, run_id = previous_release(tmp_path / "previous"), new_run_id()
    run = LaunchedRun(tmp_path / "run", {"FORGEMQ_KAFKA": bootstrap})
    given = (f"run={run_id}", f"trainer.steps={STEPS}", "evaluation.tasks=0")
    with stand_in_engine(latency_s=0.2, tokens=16) as engine_url:
        by = {
            release.name: {"FORGEMQ_ENGINE_URL": engine_url, "PYTHONPATH": release.python_path()}
            for release in (previous, PRESENT)
        }
        try:
            run.start(DIALOGUE, *given, environ=by["previous"])
            run.wait_for_line("step 3 trained", within_s=300)
            run.interrupt()
            assert run.wait_for_end(within_s=120) == 130, run.story()
            run.start(DIALOGUE, "--resume", run_id, environ=by["present"])
            run.wait_for_end(within_s=300)
            assert run.left_behind() == []
        finally:
            run.close()
    log = accounts(bootstrap, run=run_id, blobs=str(run.blobs(run_id)))
    log.assert_exactly_once()
    assert list(log.surviving_steps()) == list(range(STEPS))
    # Only this release counts the episodes of a group, and the previous one had trained some.
    assert {bool(merged.scored) for merged in log.merged} == {False, True}
    report = run.report(run_id)
    held = {guarantee for guarantee, holds in report["guarantees"].items() if holds}
    # The stand-in's log-probabilities are noise, so G5 cannot hold.
    assert held == {"G1", "G2", "G3", "G4"}, report["guarantees_checked"]
