"""The tool loop's contexts: who cuts, what the model sees after it, and what is recorded of it."""

import json
from typing import Any

from forgemq_agents.completion import Completion
from forgemq_agents.contexts import (
    CLEAR_TOOL_RESULTS,
    DISCARD_ALL,
    NOTES,
    SLIDING_WINDOW,
    SUMMARY,
)
from forgemq_agents.errors import ContextFullError
from forgemq_agents.tool_loop import (
    APPLIED_MAX,
    CONTEXT_FULL,
    CUT,
    TURN_TOO_LONG,
    Append,
    Stop,
    answer_calls,
    run_tool_loop,
)

TASK = {"role": "user", "content": "task"}


class Model:
    """Says these messages; a text has 10 tokens, and so has each message before it.

    A dictionary is calls by name; a name with a number calls it once more.
    """

    def __init__(self, *said: str | dict, window: int = 100, finish_reason: str = "stop") -> None:
        self.context_tokens_max = window
        self.heard: list[list[dict]] = []
        self.tools: list[list[str]] = []
        self.cuts: list[tuple] = []
        self.truncated_by: str | None = None
        self._said = iter(said)
        self._finish_reason = finish_reason

    async def chat(self, messages, *, tools=(), cuts=()) -> Completion:
        if 10 * len(messages) > self.context_tokens_max:
            raise ContextFullError("full", status=400, code="context_length_exceeded")
        self.heard.append(list(messages))
        self.tools.append([tool["function"]["name"] for tool in tools])
        self.cuts.append(tuple(cuts))
        said = next(self._said)
        number = len(self.heard)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said if isinstance(said, str) else None,
        }
        if isinstance(said, dict):
            message["tool_calls"] = [
                {
                    "id": f"{number}-{index}",
                    "type": "function",
                    "function": {"name": name.rstrip("0123456789"), "arguments": json.dumps(given)},
                }
                for index, (name, given) in enumerate(said.items())
            ]
        return Completion(
            id=f"chatcmpl-{number:032x}",
            message=message,
            finish_reason=self._finish_reason,
            total_tokens=10 * (len(messages) + 1),
        )

    def truncate(self, cause) -> None:
        self.truncated_by = cause


class Archive:
    """Reads pages; an answer without a call ends the episode."""

    tools = ({"type": "function", "function": {"name": "read"}},)

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def opening(self):
        return [TASK]

    async def answer(self, completion):
        self.asked.append([call.name for call in completion.calls])
        if not completion.calls:
            return Stop("answered")

        async def read(arguments):
            return f"page {arguments['n']}"

        return Append(await answer_calls(completion.calls, {"read": read}, bad_call="bad call"))


def read(n: int) -> dict:
    return {"read": {"n": n}}


def roles(messages: list[dict]) -> list[str]:
    return [message["role"] for message in messages]


async def test_a_called_note_leaves_the_task_and_the_note_and_says_who_called_it():
    model, archive = Model(read(1), {"note": {"text": "a 5"}}, "done"), Archive()
    end = await run_tool_loop(model, archive, turns_max=9, context_tools=[NOTES.as_tool()])
    assert end == "answered"
    assert model.tools == [["read", "note"]] * 3
    assert model.heard[2] == [{"role": "user", "content": "task\nNotes: a 5"}]
    assert archive.asked == [["read"], []]
    (cut,) = model.cuts[2]
    assert model.cuts[:2] == [(), ()]
    assert (cut.function, cut.form, cut.is_written) == ("note", "tool", True)
    assert cut.after_id == f"{2:032x}"
    assert cut.parameters == {"heading": "Notes: ", "separator": ", "}


async def test_calls_beside_a_context_tool_are_the_environments_and_all_are_answered():
    model = Model({"read": {"n": 1}, "sliding_window": {}}, "done")
    archive = Archive()
    window = SLIDING_WINDOW.as_tool(exchanges=1)
    await run_tool_loop(model, archive, turns_max=9, context_tools=[window])
    assert archive.asked[0] == ["read"]
    # The one exchange is kept whole: nothing was cut.
    assert roles(model.heard[1]) == ["user", "assistant", "tool", "tool"]
    assert [m["tool_call_id"] for m in model.heard[1][2:]] == ["1-0", "1-1"]
    assert [m["content"] for m in model.heard[1][2:]] == ["page 1", CUT]
    assert model.cuts[1] == ()


async def test_a_malformed_call_of_a_context_tool_is_the_environments_to_answer():
    model, archive = Model({"note": {"words": "a"}}, "done"), Archive()
    await run_tool_loop(model, archive, turns_max=9, context_tools=[NOTES.as_tool()])
    assert archive.asked[0] == ["note"]
    assert model.heard[1][-1]["content"] == "bad call"


async def test_a_rule_is_applied_at_its_fraction_and_not_before():
    model = Model(read(1), read(2), read(3), read(4), "done", window=100)
    rule = SLIDING_WINDOW.at(0.4, exchanges=1)
    await run_tool_loop(model, Archive(), turns_max=9, context_rules=[rule])
    # 20, 40 tokens after the first two answers: the third request is cut.
    assert [len(messages) for messages in model.heard] == [1, 3, 3, 3, 3]
    assert model.heard[2][0] == TASK
    assert model.heard[2][2]["content"] == "page 2"
    assert [len(cuts) for cuts in model.cuts] == [0, 0, 1, 1, 1]
    assert model.cuts[2][0].form == "rule"
    assert model.cuts[2][0].after_id == f"{2:032x}"


async def test_under_a_rule_the_policy_writes_the_summary_as_a_turn_of_its_own():
    model = Model(read(1), read(2), "2 pages", "done", window=100)
    rule = SUMMARY.at(0.4)
    end = await run_tool_loop(model, Archive(), turns_max=9, context_rules=[rule])
    assert end == "answered"
    assert model.heard[2][-1] == {"role": "user", "content": SUMMARY.asks}
    assert model.heard[2][-2]["content"] == "page 2"
    assert model.cuts[2] == ()
    assert model.heard[3] == [{"role": "user", "content": "task\nSummary: 2 pages"}]
    (cut,) = model.cuts[3]
    assert (cut.function, cut.form, cut.is_written) == ("summary", "rule", True)
    assert cut.after_id == f"{3:032x}"


async def test_of_several_rules_that_are_due_the_highest_fraction_holds():
    rules = [CLEAR_TOOL_RESULTS.at(0.2, exchanges=0), DISCARD_ALL.at(0.5)]
    model = Model(read(1), read(2), read(3), "done", window=90)
    await run_tool_loop(model, Archive(), turns_max=9, context_rules=rules)
    assert [[cut.function for cut in cuts] for cuts in model.cuts] == [
        [],
        ["clear_tool_results"],
        ["clear_tool_results"],
        ["discard_all"],
    ]
    assert model.heard[3] == [TASK]


async def test_results_that_do_not_fit_meet_the_rule_before_the_episode_ends():
    class Long(Archive):
        async def answer(self, completion):
            move = await super().answer(completion)
            if isinstance(move, Append):
                more = [{"role": "user", "content": "more"}] * 8
                return Append([*move.messages, *more])
            return move

    model = Model(read(1), "done", window=90)
    end = await run_tool_loop(model, Long(), turns_max=9, context_rules=[DISCARD_ALL.at(0.9)])
    assert end == "answered"
    assert model.heard[1] == [TASK]
    assert [cut.function for cut in model.cuts[1]] == ["discard_all"]
    unmanaged = Model(read(1), "done", window=90)
    assert await run_tool_loop(unmanaged, Long(), turns_max=9) == CONTEXT_FULL
    assert unmanaged.truncated_by == "context_full"


async def test_a_question_that_does_not_fit_ends_the_episode_as_full():
    model = Model(read(1), read(2), "unheard", window=50)
    end = await run_tool_loop(model, Archive(), turns_max=9, context_rules=[SUMMARY.at(0.8)])
    assert end == CONTEXT_FULL
    assert model.truncated_by == "context_full"


async def test_half_a_summary_ends_the_episode():
    model = Model("cut", finish_reason="length")
    assert await run_tool_loop(model, Archive(), turns_max=9) == TURN_TOO_LONG


async def test_what_the_policy_may_apply_in_a_turn_is_bounded():
    notes = {f"note{n}": {"text": str(n)} for n in range(APPLIED_MAX + 5)}
    model = Model(notes, "done")
    await run_tool_loop(model, Archive(), turns_max=9, context_tools=[NOTES.as_tool()])
    assert len(model.cuts[1]) == APPLIED_MAX
    kept = ", ".join(str(n) for n in range(APPLIED_MAX))
    assert model.heard[1] == [{"role": "user", "content": f"task\nNotes: {kept}"}]


async def test_an_environment_may_cut_the_context_itself():
    class Desk(Archive):
        async def answer(self, completion):
            if completion.text == "done":
                return Stop("answered")
            return Append(applied=[NOTES.application("a"), NOTES.application("b")])

    model = Model("anything", "done")
    await run_tool_loop(model, Desk(), turns_max=9)
    assert model.heard[1] == [{"role": "user", "content": "task\nNotes: a, b"}]
    assert [cut.function for cut in model.cuts[1]] == ["note", "note"]
