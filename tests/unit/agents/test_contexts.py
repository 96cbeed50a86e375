"""Context functions: what each makes of a context, and what holds of all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_agents.completion import FunctionCall
from forgemq_agents.contexts import (
    CLEAR_TOOL_RESULTS,
    DISCARD_ALL,
    NOTES,
    READY,
    SLIDING_WINDOW,
    SUMMARY,
    AgentContext,
    ContextFunction,
    exchanges,
)

TASK = {"role": "user", "content": "sort the archive"}


def asked(number: int) -> dict:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def told(number: int) -> dict:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": f"page {number}"}


def context_of(count: int, *, kept: str = "") -> AgentContext:
    turns = [message for number in range(count) for message in (asked(number), told(number))]
    return AgentContext(opening=(TASK,), kept=kept, turns=tuple(turns))


def test_a_sliding_window_keeps_the_task_and_whole_exchanges():
    cut = SLIDING_WINDOW.application(exchanges=2).to(context_of(5))
    assert cut.messages == [TASK, asked(3), told(3), asked(4), told(4)]


def test_a_sliding_window_wider_than_the_context_changes_nothing():
    assert SLIDING_WINDOW.application(exchanges=9).to(context_of(5)) == context_of(5)


def test_cleared_results_leave_every_call_its_answer():
    cut = CLEAR_TOOL_RESULTS.application(text="gone").to(context_of(3))
    assert cut.messages == [
        TASK,
        asked(0),
        {**told(0), "content": "gone"},
        asked(1),
        {**told(1), "content": "gone"},
        asked(2),
        told(2),
    ]


def test_a_summary_replaces_the_turns_and_the_summary_before():
    once = SUMMARY.application("a is read").to(context_of(2))
    twice = SUMMARY.application("a and b are read").to(once.after(asked(7), told(7)))
    assert once.messages == [{**TASK, "content": "sort the archive\nSummary: a is read"}]
    assert twice.messages == [{**TASK, "content": "sort the archive\nSummary: a and b are read"}]


def test_notes_add_up():
    once = NOTES.application("a 5").to(context_of(2))
    twice = NOTES.application("b 7").to(once.after(asked(7), told(7)))
    assert twice.messages == [{**TASK, "content": "sort the archive\nNotes: a 5, b 7"}]


def test_to_discard_all_leaves_the_task_and_what_was_kept():
    assert DISCARD_ALL.application().to(context_of(4)).messages == [TASK]
    kept = DISCARD_ALL.application().to(context_of(4, kept="Notes: a 5"))
    assert kept.messages == [{**TASK, "content": "sort the archive\nNotes: a 5"}]


@pytest.mark.parametrize(
    ("opening", "expected"),
    [
        ((), [{"role": "user", "content": "Notes: x"}]),
        (
            ({"role": "system", "content": "s"},),
            [{"role": "system", "content": "s"}, {"role": "user", "content": "Notes: x"}],
        ),
        (
            ({"role": "user", "content": [{"type": "text", "text": "t"}]},),
            [
                {"role": "user", "content": [{"type": "text", "text": "t"}]},
                {"role": "user", "content": "Notes: x"},
            ],
        ),
    ],
)
def test_what_is_kept_is_a_message_of_its_own_if_no_text_of_the_user_ends_the_task(
    opening, expected
):
    assert AgentContext(opening=opening, kept="Notes: x").messages == expected


@given(
    name=st.sampled_from(sorted(READY)),
    count=st.integers(0, 6),
    kept=st.sampled_from(["", "Notes: a"]),
    text=st.text(max_size=20),
)
@pytest.mark.slow
def test_every_ready_function_is_pure_keeps_the_task_and_pairs_calls_with_results(
    name, count, kept, text
):
    context = context_of(count, kept=kept)
    application = READY[name].application(text if READY[name].asks else "")
    once, again = application.to(context), application.to(context)
    assert once == again
    assert context == context_of(count, kept=kept)
    assert once.opening == (TASK,)
    calls = [call["id"] for m in once.turns for call in m.get("tool_calls", ())]
    assert calls == [m["tool_call_id"] for m in once.turns if m["role"] == "tool"]
    assert len(once.messages) <= len(context.messages)


def test_exchanges_begin_with_the_models_messages():
    turns = context_of(2).turns
    assert exchanges(turns) == [turns[:2], turns[2:]]
    assert exchanges((TASK, *turns))[0] == (TASK,)
    assert exchanges(()) == []


def call(name: str, arguments: dict | None) -> FunctionCall:
    return FunctionCall(id="c", name=name, arguments=arguments)


def test_a_tool_takes_its_own_well_formed_calls_alone():
    notes, window = NOTES.as_tool(), SLIDING_WINDOW.as_tool(exchanges=1)
    assert notes.called(call("note", {"text": "x"})) == NOTES.application("x")
    assert window.called(call("sliding_window", {})) == SLIDING_WINDOW.application(exchanges=1)
    assert notes.called(call("note", {"text": 3})) is None
    assert notes.called(call("note", {"words": "x"})) is None
    assert notes.called(call("note", None)) is None
    assert notes.called(call("read", {"text": "x"})) is None
    assert window.called(call("sliding_window", {"exchanges": 5})) is None


def test_a_rule_is_due_from_its_fraction_on_and_never_in_an_unknown_window():
    rule = DISCARD_ALL.at()
    assert rule.fraction == 0.3
    assert not rule.is_due(29, tokens_max=100)
    assert rule.is_due(30, tokens_max=100)
    assert not rule.is_due(10**9, tokens_max=0)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01])
def test_a_fraction_out_of_range_is_refused_by_name(fraction):
    with pytest.raises(ValueError, match=r"fraction: must be above 0 and at most 1"):
        NOTES.at(fraction)


def test_an_unknown_parameter_is_refused_by_name():
    with pytest.raises(ValueError, match=r"turns: no parameter of sliding_window, which has exch"):
        SLIDING_WINDOW.as_tool(turns=3)
    with pytest.raises(ValueError, match=r"kept: no parameter of discard_all, which has none"):
        DISCARD_ALL.at(0.5, kept=3)


def test_a_function_of_ones_own_is_recorded_by_its_name_and_parameters():
    def first_only(context, _text, parameters):
        turns = context.turns[: int(parameters["messages"])]
        return AgentContext(opening=context.opening, turns=turns)

    own = ContextFunction(
        name="first_only", apply=first_only, says="Keep the first.", defaults={"messages": 2}
    )
    assert own.application().to(context_of(3)).messages == [TASK, asked(0), told(0)]
    cut = own.application(messages=1).cut(after_id="a" * 32)
    assert (cut.function, cut.form, cut.parameters) == ("first_only", "tool", {"messages": 1})
    assert (cut.after_id, cut.is_written) == ("a" * 32, False)
