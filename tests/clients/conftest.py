"""Plays clients, asserts what holds for all of them, and keeps what passed for the table."""

from pathlib import Path

import pytest

from tests.clients.bench import Check, Client, Mode, Outcome, play
from tests.clients.install import missing
from tests.clients.table import Passed, forget, keep

HERE = Path(__file__).parent
# A client's own limit is 120 s, and the gateway needs seconds around it.
_TEST_S_MAX = 180


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(_TEST_S_MAX))


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Plays a client in a mode, asserts what holds for all clients, and keeps that it passed."""

    async def run(client: Client, mode: Mode) -> Outcome:
        forget(client, mode)
        problem = missing(client.package)
        assert problem == ""
        outcome = await play(client, mode, tmp_path)
        if not (mode in client.may_give_up and outcome.exit_code == 1):
            assert outcome.exit_code == 0, outcome.output
            assert outcome.file.strip() == "hello", outcome.output
        assert_recorded_once(client, mode, outcome)
        keep(Passed.of(client, mode, outcome))
        return outcome

    return run


def assert_recorded_once(client: Client, mode: Mode, outcome: Outcome) -> None:
    """Each turn extends the one before it, and no retry is a second record."""
    assert [record.error for record in outcome.records if record.finish_reason == "error"] == []
    assert outcome.broken_prefixes() == []
    steps = client.parallel_steps if mode == "parallel" else client.steps
    forks = client.forks + (client.cut_forks if mode == "cut_answer" else ())
    is_asked_again = mode == "cut_answer" and bool(client.cut_forks)
    expected = len(steps) + client.forks.count("side_request") + is_asked_again
    if outcome.exit_code != 0:
        assert len(outcome.records) < expected
        return
    # Also of an answer that was lost behind the gateway: a retry gets it from the record.
    assert len(outcome.records) == expected
    assert outcome.forks() == list(forks)
    # A fork that keeps all tokens of a reply is no other leaf if nothing else follows that reply.
    assert outcome.leaves() <= 1 + len(forks)
