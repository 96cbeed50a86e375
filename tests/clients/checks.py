"""What holds for every client in every mode."""

from tests.clients.bench import ASKED_AGAIN, Client, Mode, Outcome


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
    assert [record.error for record in outcome.records if record.finish_reason == "error"] == []
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
