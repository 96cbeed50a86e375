"""The shop desk end to end in token space: rendering, tools, clock, context rule, rewards."""

import json
import random

import pytest
from shop_desk import rewards
from shop_desk.calls import Call, add_up, read_calls, unread_calls
from shop_desk.demonstrator import Habits, call_text, demonstrations
from shop_desk.environment import ANSWERED, TURNS_MAX, ShopDesk
from shop_desk.shop import Line, Order, as_task, order_of
from shop_desk.tasks import HELD_OUT, task
from shop_desk.warm_start import Examples

from forgemq_agents.tool_loop import CONTEXT_FULL, TOO_MANY_TURNS, TURN_TOO_LONG, run_tool_loop
from forgemq_contracts.grading import GradingEpisode
from tests.unit.demo.grading import graded

ORDER = Order((Line(3, "lamp"), Line(2, "mug")), "Order: {order}. What is the total?", 7)
CLEAN = Habits(0, 1, 1, 0, 0, 0, 0, 0)
PRICES = ORDER.prices


def price(item: str) -> str:
    return call_text("price", item)


def total(order: Order = ORDER) -> str:
    return call_text(
        "total",
        ", ".join(f"{line.count} {line.item} {order.prices[line.item]}" for line in order.lines),
    )


def answer(order: Order = ORDER) -> str:
    return f"The total is {order.total}."


async def test_a_fast_right_episode_earns_the_outcome_and_the_saved_time(scripted):
    desk, policy = (
        ShopDesk(ORDER),
        scripted(price("lamp") + "\n" + price("mug"), total(), answer()),
    )
    assert await run_tool_loop(policy, desk, turns_max=TURNS_MAX) == ANSWERED
    assert policy.truncated_by is None
    assert desk.clock_s == pytest.approx(0.4 + 1.0 + 0.4 + 0.3 + 0.4)
    assert desk.prices_at_once_max == 2
    episode = graded(policy, desk, ORDER)
    assert rewards.outcome(episode) == 1.0
    assert rewards.process(episode) == [0.0, 0.0, 0.0]
    assert rewards.speed(episode) == pytest.approx(1 - 2.5 / (2 * 1.4 + 1.1))


async def test_pages_come_back_in_one_user_block_as_the_model_was_trained(scripted, rendering):
    policy = scripted(price("lamp") + "\n" + price("mug"), total(), answer())
    await run_tool_loop(policy, ShopDesk(ORDER), turns_max=TURNS_MAX)
    text = rendering.decode(policy.contexts[1])
    assert text.endswith(
        "<|im_end|>\n<|im_start|>user\n"
        f"<tool_response>\n{ORDER.page('lamp')}\n</tool_response>\n"
        f"<tool_response>\n{ORDER.page('mug')}\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("seed", range(12))
async def test_played_contexts_have_the_tokens_of_the_warm_start(scripted, tokenizer, seed):
    """The gateway's rendering and the warm start's examples agree token for token."""
    choose = random.Random(seed)
    order = order_of(task(seed, "shop_desk", seed))
    contexts = list(demonstrations(order, choose, Habits(bad_call=0.0, notes_when_full=1.0)))
    policy = scripted(*(text for context in contexts for text, _ in context.turns))
    await run_tool_loop(policy, ShopDesk(order), turns_max=TURNS_MAX)
    played = [c + o for c, o in zip(policy.contexts, policy.outputs, strict=True)]
    examples = Examples(tokenizer, choose)
    for context in contexts:
        example = examples.context_example(context)
        turns_only = example.ids[: len(example.ids) - example.is_target[::-1].index(True)]
        assert turns_only in played


async def test_a_note_starts_a_new_context_with_the_notes_in_the_question(scripted, rendering):
    policy = scripted(price("lamp"), call_text("note", "lamp 5"), answer())
    desk = ShopDesk(ORDER)
    await run_tool_loop(policy, desk, turns_max=TURNS_MAX)
    text = rendering.decode(policy.contexts[2])
    assert text.endswith(
        f"<|im_start|>user\n{ORDER.question}\nNotes: lamp 5<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "tool_response" not in text
    assert desk.notes == 1


@pytest.mark.parametrize(
    ("text", "bad", "replies"),
    [
        ('<tool_call>\n{"name": "price", "arguments": {"item": "mug"}\n</tool_call>', 1, 1),
        ('<tool_call>\n{"name": "price", "args": {"item": "mug"}}\n</tool_call>', 1, 1),
        ('<tool_call>\n{"name": "cost", "arguments": {"item": "mug"}}\n</tool_call>', 1, 1),
        ('<tool_call>\n{"name": "price", "arguments": {"product": "mug"}}\n</tool_call>', 1, 1),
        ('<tool_call>\n{"name": "price", "arguments": {"item": "mug"}}', 1, 1),
        (call_text("total", "3 lamp"), 1, 1),
        ("well " + price("mug"), 1, 2),
        (price("mug") + "\n" + price("lamp")[:-5], 1, 2),
        ("</tool_call>", 1, 1),
        ("<tool_call>\n[1]\n</tool_call>\n<tool_call>\n3\n</tool_call>", 2, 2),
    ],
)
async def test_a_malformed_call_is_answered_counted_and_costs_a_tenth(scripted, text, bad, replies):
    desk, policy = ShopDesk(ORDER), scripted(text, answer())
    await run_tool_loop(policy, desk, turns_max=TURNS_MAX)
    tail = policy.rendering.decode(policy.contexts[1][len(policy.contexts[0]) :])
    assert tail.count("<tool_response>") == replies
    assert tail.count('{"error": "bad call"}') == bad
    episode = graded(policy, desk, ORDER)
    assert rewards.process(episode) == [pytest.approx(-0.1 * bad), 0.0]
    assert rewards.outcome(episode) == 1.0


async def test_an_unknown_item_is_answered_and_is_no_malformed_call(scripted):
    desk, policy = ShopDesk(ORDER), scripted(price("cheese"), answer())
    await run_tool_loop(policy, desk, turns_max=TURNS_MAX)
    assert '{"error": "no item"}' in policy.rendering.decode(policy.contexts[1])
    assert rewards.process(graded(policy, desk, ORDER)) == [0.0, 0.0]


async def test_a_turn_cut_at_its_limit_ends_the_episode_and_counts_as_malformed(scripted):
    desk, policy = ShopDesk(ORDER), scripted(price("lamp"), None)
    assert await run_tool_loop(policy, desk, turns_max=TURNS_MAX) == TURN_TOO_LONG
    assert policy.truncated_by == "turn_too_long"
    assert len(policy.outputs[1]) == 80
    episode = graded(policy, desk, ORDER)
    assert rewards.process(episode) == [0.0, -0.1]
    assert rewards.outcome(episode) == 0.0


async def test_pages_that_do_not_fit_end_the_episode(scripted):
    order = Order(tuple(Line(1, item) for item in ("lamp", "mug", "pen", "jar")), "{order}", 7)
    prices = [price(line.item) for line in order.lines]
    desk = ShopDesk(order)
    policy = scripted(*prices, *prices)
    assert await run_tool_loop(policy, desk, turns_max=TURNS_MAX) == CONTEXT_FULL
    assert policy.truncated_by == "context_full"
    assert rewards.outcome(graded(policy, desk, order)) == 0.0


async def test_nine_turns_are_the_limit(scripted):
    notes = [call_text("note", "x")] * (TURNS_MAX + 1)
    policy = scripted(*notes)
    assert await run_tool_loop(policy, ShopDesk(ORDER), turns_max=TURNS_MAX) == TOO_MANY_TURNS
    assert policy.truncated_by == "too_many_turns"
    assert len(policy.outputs) == TURNS_MAX


async def test_a_wrong_answer_earns_nothing_for_being_fast(scripted):
    desk, policy = ShopDesk(ORDER), scripted("The total is 1.")
    await run_tool_loop(policy, desk, turns_max=TURNS_MAX)
    episode = graded(policy, desk, ORDER)
    assert (rewards.outcome(episode), rewards.speed(episode)) == (0.0, 0.0)


async def test_the_agents_own_claim_changes_no_reward(scripted):
    desk, policy = ShopDesk(ORDER), scripted("The total is 1.")
    await run_tool_loop(policy, desk, turns_max=TURNS_MAX)
    claim = {"end": ANSWERED, "outcome": 1.0, "bad_calls": -5}
    assert rewards.outcome(graded(policy, desk, ORDER, result=claim)) == 0.0


async def test_an_answer_that_is_not_the_last_turn_earns_nothing(scripted):
    desk, policy = ShopDesk(ORDER), scripted(f"{price('mug')} {ORDER.total}", None)
    await run_tool_loop(policy, desk, turns_max=TURNS_MAX)
    assert rewards.outcome(graded(policy, desk, ORDER)) == 0.0


def test_an_episode_without_completions_has_outcome_zero_and_no_process_rewards():
    empty = GradingEpisode(
        episode_id="g.0.0",
        domain="shop_desk",
        task=as_task(ORDER),
        result={},
        completions=(),
        rewards=(),
        engine_s=0,
        tool_s=0,
        virtual_s=0.0,
        duration_s=0,
    )
    assert rewards.outcome(empty) == 0.0
    assert list(rewards.process(empty)) == []
    assert rewards.speed(empty) == 0.0


@pytest.mark.parametrize("k", [0, 1, 3, 4, 6, 7])
async def test_the_skilled_demonstrator_is_always_right(scripted, k):
    order = order_of(task(3, "shop_desk", k))
    contexts = demonstrations(order, random.Random(k), CLEAN)
    policy = scripted(*(text for context in contexts for text, _ in context.turns))
    desk = ShopDesk(order)
    assert await run_tool_loop(policy, desk, turns_max=TURNS_MAX) == ANSWERED
    episode = graded(policy, desk, order)
    assert rewards.outcome(episode) == 1.0
    assert sum(rewards.process(episode)) == 0.0
    assert rewards.speed(episode) > 0.0


def test_tasks_are_pure_and_survive_json():
    for k in (0, 1, 2, 77, HELD_OUT, HELD_OUT + 127):
        one = task(5, "shop_desk", k)
        assert task(5, "shop_desk", k) == one
        assert as_task(order_of(json.loads(json.dumps(one)))) == one


def test_training_tasks_cycle_through_two_three_and_four_lines():
    assert [len(task(0, "shop_desk", k)["lines"]) for k in range(7)] == [2, 3, 4, 2, 3, 4, 2]


def test_training_tasks_differ_by_seed_and_held_out_tasks_do_not():
    assert task(0, "shop_desk", 3) != task(1, "shop_desk", 3)
    assert task(0, "shop_desk", HELD_OUT + 3) == task(1, "shop_desk", HELD_OUT + 3)
    held_out = {json.dumps(task(0, "d", HELD_OUT + k)) for k in range(128)}
    assert len(held_out) == 128
    assert not held_out & {json.dumps(task(0, "d", k)) for k in range(500)}


def test_calls_are_read_as_the_sampled_text_has_them():
    assert read_calls("The total is 5.") == []
    assert read_calls(price("mug")) == [Call("price", "mug")]
    assert read_calls(price("mug") + "\n" + price("x")[:-3]) == [Call("price", "mug"), None]
    assert unread_calls("", has_calls=True) == 0
    assert unread_calls("so:", has_calls=True) == 1
    assert unread_calls("so:", has_calls=False) == 0


@pytest.mark.parametrize(
    ("lines", "expected"),
    [("3 lamp 4", 12), ("3 lamp 4, 2 mug 5", 22), ("", None), ("3 lamp", None), ("a b c", None)],
)
def test_lines_add_up_or_are_refused(lines, expected):
    assert add_up(lines) == expected


def test_the_serial_reference_grows_with_the_order():
    lines = tuple(Line(1, item) for item in ("lamp", "mug", "pen", "jar"))
    serial = [rewards.serial_s(Order(lines[:count], "{order}", 0)) for count in (2, 3, 4)]
    assert serial == pytest.approx([3.9, 5.3, 7.2])
