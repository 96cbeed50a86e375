"""Rules of the tool loop that cannot help: the next one is tried, and nothing is lost to them."""

from forgemq_agents.contexts import CLEAR_TOOL_RESULTS, DISCARD_ALL, SLIDING_WINDOW, SUMMARY
from forgemq_agents.errors import ContextFullError
from forgemq_agents.tool_loop import (
    CONTEXT_FULL,
    TOO_MANY_TURNS,
    UNWRITTEN_MAX,
    Append,
    answer_calls,
    run_tool_loop,
)
from tests.unit.agents.test_tool_loop import TASK, Archive, Model, read


class Narrow(Model):
    """As `Model`, but a message has a token for each of its characters; requests are refused by
    that, and rules are due by 10 tokens a message."""

    async def chat(self, messages, *, tools=(), cuts=()):
        if sum(len(message["content"] or "") for message in messages) > self.context_tokens_max:
            raise ContextFullError("full", status=400, code="context_length_exceeded")
        return await super().chat(messages, tools=tools, cuts=cuts)


class Pages(Archive):
    """Page n has n characters."""

    async def answer(self, completion):
        move = await super().answer(completion)
        if not completion.calls:
            return move

        async def page(arguments):
            return "x" * arguments["n"]

        return Append(await answer_calls(completion.calls, {"read": page}, bad_call="bad call"))


def functions_of(cuts) -> list[list[str]]:
    return [[cut.function for cut in each] for each in cuts]


def sizes(messages: list[dict]) -> list[int]:
    return [len(message["content"]) for message in messages if message["role"] == "tool"]


async def test_a_request_that_does_not_fit_meets_every_rule_until_one_helps():
    model = Narrow(read(300), read(300), read(600), "done", window=1000)
    rules = [SLIDING_WINDOW.at(0.8, exchanges=3), CLEAR_TOOL_RESULTS.at(0.5)]
    assert await run_tool_loop(model, Pages(), turns_max=9, context_rules=rules) == "answered"
    assert functions_of(model.cuts) == [[], [], [], ["clear_tool_results"]]
    assert sizes(model.heard[3]) == [len("(cleared)")] * 2 + [600]


async def test_a_rule_that_frees_too_little_is_followed_by_the_next():
    model = Narrow(read(300), read(1100), "done", window=1000)
    rules = [CLEAR_TOOL_RESULTS.at(0.8), DISCARD_ALL.at(0.5)]
    assert await run_tool_loop(model, Pages(), turns_max=9, context_rules=rules) == "answered"
    assert functions_of(model.cuts) == [[], [], ["clear_tool_results", "discard_all"]]
    assert model.heard[2] == [TASK]
    short = Narrow(read(300), read(1100), "done", window=1000)
    assert await run_tool_loop(short, Pages(), turns_max=9, context_rules=rules[:1]) == CONTEXT_FULL


async def test_a_due_rule_that_changes_nothing_does_not_hold_up_the_next():
    model = Model(read(1), read(2), "done", window=100)
    rules = [SLIDING_WINDOW.at(0.4, exchanges=9), CLEAR_TOOL_RESULTS.at(0.3)]
    await run_tool_loop(model, Archive(), turns_max=9, context_rules=rules)
    assert functions_of(model.cuts) == [[], [], ["clear_tool_results"]]


async def test_a_question_that_does_not_fit_meets_the_rules_that_need_no_words():
    model = Narrow(read(500), read(480), "2 pages", "done", window=1000)
    rules = [SUMMARY.at(0.04), CLEAR_TOOL_RESULTS.at(0.9)]
    assert await run_tool_loop(model, Pages(), turns_max=9, context_rules=rules) == "answered"
    assert functions_of(model.cuts) == [[], [], ["clear_tool_results"], ["summary"]]
    assert model.heard[3] == [{"role": "user", "content": "task\nSummary: 2 pages"}]


async def test_a_call_in_place_of_a_summary_forgets_nothing_and_the_rule_asks_again():
    model = Model(read(1), read(2), read(3), read(4), "4 pages", "done", window=100)
    archive = Archive()
    end = await run_tool_loop(model, archive, turns_max=9, context_rules=[SUMMARY.at(0.4)])
    assert end == "answered"
    assert model.heard[2] == [*model.heard[3], {"role": "user", "content": SUMMARY.asks}]
    assert model.heard[3][-1]["content"] == "page 2"
    assert archive.asked == [["read"], ["read"], ["read"], []]
    assert model.heard[4][-2]["content"] == "page 4"
    assert functions_of(model.cuts) == [[], [], [], [], [], ["summary"]]
    assert model.heard[5] == [{"role": "user", "content": "task\nSummary: 4 pages"}]


async def test_without_a_summary_another_due_rule_cuts_the_same_context():
    model = Model(read(1), read(2), " ", "done", window=100)
    rules = [SUMMARY.at(0.4), CLEAR_TOOL_RESULTS.at(0.3)]
    await run_tool_loop(model, Archive(), turns_max=9, context_rules=rules)
    assert functions_of(model.cuts) == [[], [], [], ["clear_tool_results"]]
    assert model.cuts[3][0].after_id == f"{2:032x}"


async def test_a_policy_that_never_writes_is_asked_a_bounded_number_of_times():
    model = Model(*[read(1)] * 20, window=1000)
    end = await run_tool_loop(model, Archive(), turns_max=8, context_rules=[SUMMARY.at(0.02)])
    assert end == TOO_MANY_TURNS
    questions = [messages for messages in model.heard if messages[-1]["content"] == SUMMARY.asks]
    assert len(questions) == UNWRITTEN_MAX
    assert len(model.heard) == 8 + UNWRITTEN_MAX
