"""Where a context was cut, by what, and what the policy saw after it: inspect and the console."""

import io

import msgspec
import pytest
from rich.console import Console

from forgemq_console.core import group_view
from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.context_cuts import ContextCut
from forgemq_contracts.messages import Message
from forgemq_launcher.commands.inspection import print_trajectory
from forgemq_run_view.trajectory import context_bytes, trajectories
from tests.unit.run_view.synthetic import SyntheticRun


def cut_records(**changes) -> tuple[list[Message], FinishedCompletion, FinishedCompletion]:
    """An episode of two turns, of which the second one's turn part has these changes."""
    messages = [
        each
        for each in SyntheticRun().play(steps=1).messages
        if isinstance(each.record, FinishedCompletion) and each.record.episode_id == "g-0.0.0"
    ]
    first, second = messages
    assert isinstance(first.record, FinishedCompletion)
    assert isinstance(second.record, FinishedCompletion)
    part = msgspec.structs.replace(second.record.turn, is_fork=True, **changes)
    forked = msgspec.structs.replace(second.record, turn=part, shared_prefix_tokens=2)
    return [first, msgspec.structs.replace(second, record=forked)], first.record, forked


def shown(messages: list[Message]) -> str:
    out = io.StringIO()
    (trajectory,) = trajectories(messages)
    print_trajectory(trajectory, None, Console(file=out, width=400))
    return out.getvalue()


def named(first: FinishedCompletion, **changes) -> ContextCut:
    fields = {"function": "note", "form": "tool", "after_id": first.request_id, "is_written": True}
    return ContextCut(**{**fields, **changes})


def test_a_cut_is_shown_before_its_turn_with_the_whole_context_that_followed():
    _, first, _ = cut_records()
    cut = named(first, parameters={"heading": "Notes: "})
    messages, first, second = cut_records(cuts=(cut,), fork_reason="compaction")
    context = unpack_ids(context_bytes(second, {first.request_id: first}))
    before = len(unpack_ids(first.context + first.output))
    lines = shown(messages).splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("context cut by"))
    assert lines[at] == (
        f'context cut by note {{"heading":"Notes: "}} (called by {first.request_id[:8]}, which '
        f"wrote what is kept): {before} tokens -> {len(context)}; the policy saw from here on:"
    )
    assert lines[at - 1].startswith("turn 1 ")
    assert lines[at + 1] == " ".join(map(str, context))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"form": "rule", "is_written": False}, "(a rule, after {id})"),
        ({"form": "rule", "is_written": True}, "(a rule, after {id}, which wrote what is kept)"),
        ({"after_id": None, "is_written": False}, "(called by a turn that is not named): ? tokens"),
    ],
)
def test_a_cut_says_who_decided_and_who_wrote(changes, said):
    _, first, _ = cut_records()
    messages, _, _ = cut_records(cuts=(named(first, **changes),))
    assert said.format(id=first.request_id[:8]) in shown(messages)


def test_a_compaction_that_no_agent_named_shows_what_the_policy_saw_after_it():
    messages, first, second = cut_records(fork_reason="compaction")
    context = unpack_ids(context_bytes(second, {first.request_id: first}))
    line = "fork: compaction; the policy saw from here on:\n" + " ".join(map(str, context))
    assert line in shown(messages)
    other, _, _ = cut_records(fork_reason="side_request")
    assert "fork: side_request\n" in shown(other)


def test_a_turn_is_shown_whose_cut_context_goes_on_from_what_is_trimmed():
    """Trimming ends anywhere in a group; the page of such a group was an error."""
    _, first, _ = cut_records()
    messages, _, second = cut_records(cuts=(named(first),), fork_reason="compaction")
    told = shown(messages[1:])
    assert "? tokens -> ?; the beginning of what the policy saw is trimmed, the rest is:" in told
    found = group_view("g-0", messages[1:], episode_id=None, token_text=str, episodes_max=8)
    assert found.episode is not None
    (turn,) = found.episode.turns
    assert turn.seen == ()
    assert [token.id for token in turn.context] == list(unpack_ids(second.context))


def test_the_console_serves_the_cut_and_the_tokens_that_followed():
    _, first, _ = cut_records()
    messages, first, second = cut_records(cuts=(named(first),), fork_reason="compaction")
    found = group_view("g-0", messages, episode_id=None, token_text=str, episodes_max=8)
    assert found.episode is not None
    before, after = found.episode.turns
    assert (before.cuts, before.seen) == ((), ())
    (cut,) = after.cuts
    assert (cut.function, cut.form, cut.after_id) == ("note", "tool", first.request_id)
    assert cut.tokens_before == len(unpack_ids(first.context + first.output))
    expected = unpack_ids(context_bytes(second, {first.request_id: first}))
    assert [token.id for token in after.seen] == expected
    assert after.fork_reason == "compaction"
