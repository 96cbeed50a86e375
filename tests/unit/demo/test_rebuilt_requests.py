"""From the log alone: what every request of an episode was, across cuts, and who is credited."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from shop_desk.demonstrator import Habits, demonstrations
from shop_desk.environment import TURNS_MAX, ShopDesk
from shop_desk.shop import order_of
from shop_desk.tasks import task

from forgemq_agents.contexts import (
    CLEAR_TOOL_RESULTS,
    DISCARD_ALL,
    NOTES,
    SLIDING_WINDOW,
    SUMMARY,
)
from forgemq_agents.tool_loop import Append, Stop, answer_calls, run_tool_loop
from forgemq_contracts import topics
from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.episodes import GradedEpisode, ProcessReward
from forgemq_contracts.messages import Message
from forgemq_contracts.run import Rewards
from forgemq_contracts.trees import MergedTree
from forgemq_merger.core.merger import MergerCore
from forgemq_reward.core import RewardCore
from forgemq_run_view.sent_requests import SentRequest
from tests.unit.gateway.played import PlayedRun, canonical, played_run
from tests.unit.gateway.scripted_lane import Asked
from tests.unit.merger.records import read_back

MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "model"
SEEDS = range(8)


class Lines:
    """A lane's script: the next text of each episode, whatever it is asked."""

    def __init__(self) -> None:
        self._texts: Iterator[str] = iter(())

    def say(self, *texts: str) -> None:
        self._texts = iter(texts)

    def __call__(self, asked: Asked) -> str:
        return next(self._texts)


def texts_of(seed: int) -> tuple[object, list[str]]:
    """An order, and what a demonstrator that takes notes and makes mistakes says of it."""
    order = order_of(task(seed, "shop_desk", seed))
    habits = Habits(notes_when_full=1.0, notes_needlessly=0.5, guesses_price=0.0)
    contexts = demonstrations(order, random.Random(seed), habits)
    return order, [text for context in contexts for text, _ in context.turns]


@pytest.mark.slow
async def test_every_request_of_whole_desk_episodes_is_rebuilt_byte_for_byte_cuts_included():
    lines = Lines()
    cuts = 0
    async with played_run(MODEL, lines, context_tokens_max=372) as run:
        for seed in SEEDS:
            order, texts = texts_of(seed)
            lines.say(*texts)
            group = await run.world.open_group(f"k{seed}")
            desk = ShopDesk(order)
            await run.play(
                group, lambda sent, desk=desk: run_tool_loop(sent, desk, turns_max=TURNS_MAX)
            )
            cuts += desk.notes
        await assert_rebuilt(run)
        rebuilt = await run.rebuilt()
        await run.world.retire(group)
    assert cuts > len(SEEDS) / 2
    assert sum(len(request.cuts) for requests in rebuilt.values() for request in requests) == cuts


async def assert_rebuilt(run: PlayedRun) -> None:
    """Every request has the messages that the agent sent and the tokens that the lane had."""
    rebuilt, seen = await run.rebuilt(), run.seen()
    assert rebuilt.keys() == run.sent.keys()
    for episode_id, requests in rebuilt.items():
        assert [canonical(each.messages) for each in requests] == run.sent[episode_id].messages
        assert [list(each.context) for each in requests] == [
            seen[each.completion_id] for each in requests
        ]


class Archive:
    """Reads documents by number; a text without a call ends the episode."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "price",
                "description": "product page of one item",
                "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
            },
        },
    )

    def opening(self):
        return [{"role": "user", "content": "How much for 3 lamp?"}]

    async def answer(self, completion):
        if not completion.calls:
            return Stop("answered")

        async def price(arguments):
            return f"{arguments['item']} 12" + ", color red" * 8

        return Append(await answer_calls(completion.calls, {"price": price}, bad_call="bad"))


def price(item: str) -> str:
    return f'<tool_call>\n{{"name": "price", "arguments": {{"item": "{item}"}}}}\n</tool_call>'


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


NOTE = call("note", '{"text": "lamp 12"}')
TOOLS = {
    "note": (NOTES.as_tool(), NOTE),
    "summary": (SUMMARY.as_tool(), call("summary", '{"text": "lamp 12"}')),
    "sliding_window": (SLIDING_WINDOW.as_tool(exchanges=1), call("sliding_window")),
    "clear_tool_results": (CLEAR_TOOL_RESULTS.as_tool(), call("clear_tool_results")),
    "discard_all": (DISCARD_ALL.as_tool(), call("discard_all")),
}
RULES = {
    "note": NOTES.at(0.5),
    "summary": SUMMARY.at(0.5),
    "sliding_window": SLIDING_WINDOW.at(0.5, exchanges=1),
    "clear_tool_results": CLEAR_TOOL_RESULTS.at(0.5, exchanges=0),
    "discard_all": DISCARD_ALL.at(0.5),
}
PAGES = [price(item) for item in ("lamp", "mug", "pen")]


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
async def test_each_function_as_a_tool_is_rebuilt_and_recorded_where_it_was_called(name):
    tool, called = TOOLS[name]
    requests, ended = await requests_of(
        [*PAGES, called, price("jar"), "36"], context_tools=[tool], window=700
    )
    told = {index: request.cuts for index, request in enumerate(requests) if request.cuts}
    assert list(told) == [4]
    (cut,) = told[4]
    assert (cut.function, cut.form, cut.after_id) == (name, "tool", requests[3].completion_id)
    assert cut.is_written == (name in ("note", "summary"))
    assert [(each.reason, each.count) for each in ended.fork_reasons] == [("compaction", 1)]
    assert len(requests[4].context) < len(requests[3].context)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
async def test_each_function_as_a_rule_is_rebuilt_and_recorded_where_it_was_applied(name):
    rule = RULES[name]
    written = ["lamp 12"] if rule.function.asks else []
    requests, _ = await requests_of([*PAGES, *written, "36"], context_rules=[rule], window=400)
    cuts = [(index, cut) for index, request in enumerate(requests) for cut in request.cuts]
    assert [(cut.function, cut.form) for _, cut in cuts][:1] == [(name, "rule")]
    index, cut = cuts[0]
    assert cut.after_id == requests[index - 1].completion_id
    if written:
        asked = requests[index - 1].messages[-1]
        assert asked == {"role": "user", "content": rule.function.asks}
        assert "lamp 12" in requests[index].messages[0]["content"]


async def requests_of(texts: list[str], *, window: int, **how) -> tuple[list[SentRequest], object]:
    """The requests of one episode that says these texts, rebuilt; and its final record."""
    lines = Lines()
    lines.say(*texts)
    async with played_run(MODEL, lines, context_tokens_max=window) as run:
        group = await run.world.open_group()
        episode_id = await run.play(
            group, lambda sent: run_tool_loop(sent, Archive(), turns_max=9, **how)
        )
        await assert_rebuilt(run)
        rebuilt = await run.rebuilt()
        (ended,) = await run.world.records(topics.FINISHED_EPISODES)
    assert next(lines._texts, None) is None
    return rebuilt[episode_id], ended


async def test_what_comes_after_a_cut_credits_the_turn_that_wrote_it_and_the_tree_has_both_sides():
    """A note in turn 1; a reward of 0.5 on the last turn, and an outcome of 1 for one of two."""
    lines = Lines()
    async with played_run(MODEL, lines, context_tokens_max=372) as run:
        group = await run.world.open_group()
        for texts in ([price("lamp"), NOTE, "36"], [price("mug"), NOTE, "7"]):
            lines.say(*texts)
            await run.play(
                group,
                lambda sent: run_tool_loop(
                    sent, Archive(), turns_max=9, context_tools=[NOTES.as_tool()]
                ),
            )
        ended = await run.world.records(topics.FINISHED_EPISODES)
        completions = await run.completions()
    scored = score(ended)
    to_go = {(each.episode_index, each.sequence): each.return_to_go for each in scored.completions}
    assert to_go == {(i, turn): value for i, value in ((0, 1.5), (1, 0.0)) for turn in range(3)}
    advantages = {(e.episode_index, e.sequence): e.advantage for e in scored.completions}
    assert advantages[0, 1] == advantages[0, 2] == 0.75
    samples = merged(completions, scored)
    assert list(samples) == [each.completion_id for each in scored.completions]
    for entry in scored.completions:
        sample, record = samples[entry.completion_id], completions[entry.completion_id]
        output = unpack_ids(record.output)
        assert sample["tokens"][-len(output) :] == output
        assert len(sample["positions"]) == len(output)
        assert sample["advantage"] == pytest.approx(entry.advantage)
    note, last = (scored.completions[turn].completion_id for turn in (1, 2))
    assert completions[last].turn.cuts[0].after_id == note
    before, after = samples[note]["tokens"], samples[last]["tokens"]
    assert len(after) < len(before)
    assert after != before[: len(after)]


def score(ended):
    """The scored group of two episodes, of which the first one earns all there is."""
    core = RewardCore(partition=0, rewards=Rewards())
    last = max(ended[0].manifest, key=lambda entry: entry.sequence).completion_id
    grades = [
        GradedEpisode(
            episode_id=episode.episode_id,
            group_id=episode.group_id,
            grader="g",
            grader_version="1",
            outcome=float(episode.index == 0),
            speed=0.0,
            process=(ProcessReward(completion_id=last, value=0.5),) if episode.index == 0 else (),
        )
        for episode in ended
    ]
    outputs = [each for record in (*ended, *grades) for each in core.handle(message(record))]
    (scored,) = (output.record for output in outputs)
    return scored


def message(record, offset: int = 0) -> Message:
    return Message(topic="", partition=0, offset=offset, timestamp_ms=0, record=record)


def merged(completions, scored) -> dict[str, dict]:
    """The samples of the group's tree, by completion."""
    core = MergerCore(0)
    records = [*completions.values(), scored]
    outputs = [
        each
        for offset, record in enumerate(records)
        for each in core.handle(message(record, offset))
    ]
    (tree,) = (each.record for each in outputs if isinstance(each.record, MergedTree))
    return read_back(tree)
