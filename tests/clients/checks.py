"""What holds for every client in every mode."""

from pathlib import Path

from tests.clients.bench import ASKED_AGAIN, ON_KAFKA, Client, Mode, Outcome, play
from tests.clients.install import missing
from tests.clients.systems import System
from tests.clients.table import Result, keep

# Requests more than without a fault that a client may have to send.
_RETRIES_MAX: dict[Mode, int] = {"inference_killed": 1, "engine_killed": 0}


async def checked(
    client: Client, mode: Mode, folder: Path, system: System, *, is_kept: bool
) -> Outcome:
    """Play the client in this folder and assert that it passed; the table shows what is kept."""
    if is_kept:
        keep(Result.begun(client, mode))
    problem = missing(client.package)
    assert problem == ""
    outcome = await play(client, mode, folder, system)
    assert_passed(client, mode, outcome)
    if is_kept:
        keep(Result.passed(client, mode, outcome))
    return outcome


def assert_passed(client: Client, mode: Mode, outcome: Outcome) -> None:
    """The task is done, or the client is known to end here, and each turn was recorded once."""
    if not (mode in client.may_give_up and outcome.exit_code == 1):
        assert outcome.exit_code == 0, outcome.output
        assert outcome.file.strip() == "hello", outcome.output
    if mode == "killed_late" and client.asks_again:
        assert ASKED_AGAIN in outcome.output, "its stream did not break"
    assert_recorded_once(client, mode, outcome)


def assert_recorded_once(client: Client, mode: Mode, outcome: Outcome) -> None:
    """Each turn extends the one before it, and no retry is a second record."""
    # An engine that dies fails the attempt that it had, and the gateway makes another one.
    causes = {record.failure: record.error for record in outcome.failed}
    assert causes.keys() <= ({"engine"} if mode == "engine_killed" else set()), causes
    assert outcome.broken_prefixes() == []
    if mode in ("killed", "killed_late"):
        assert outcome.samplings == len(outcome.records), "a turn was sampled twice"
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
    if mode in ON_KAFKA:
        assert outcome.samplings == expected + 1, "nothing was killed in a turn"
        assert outcome.model_calls <= expected + _RETRIES_MAX[mode], "the client had to ask again"
        assert sorted(outcome.delivered) == sorted(record.request_id for record in outcome.records)
