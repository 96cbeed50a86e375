"""The command line's desk, rewards and warm start; tests/clients has the scaffold that plays it."""

import random

import pytest
from command_line import rewards
from command_line.agent import SANDBOX, merged, observed
from command_line.demonstrator import Habits, call_text, demonstration, reply_to
from command_line.desk import AGENT, BASH, ENVIRON, SYSTEM, commands
from command_line.tasks import task
from command_line.warm_start import episode_example
from shop_desk.shop import Line, Order, order_of
from shop_desk.tasks import HELD_OUT

from forgemq_graders import Shell
from tests.unit.demo.grading import graded

ORDER = Order((Line(3, "lamp"), Line(2, "mug")), "Order: {order}. What is the total?", 7)
CONTEXT_TOKENS_MAX = 640  # as in run.toml
SKILLED = Habits(0, 0, 1, 0, 0, 0)


async def shown(*lines: str) -> list[str]:
    """What mini-swe-agent's observation template makes of these commands in one sandbox."""
    texts = []
    async with Shell(SANDBOX, files=commands(ORDER), environ=ENVIRON) as shell:
        for line in lines:
            said = observed(await shell.run(merged(line)))
            texts.append("bad command" if said["returncode"] else said["output"].strip())
    return texts


async def test_the_commands_answer_as_the_demonstrator_was_answered():
    lines = (
        "price lamp",
        "price cheese",
        "price",
        "cost lamp",
        "total 3 lamp 13, 2 mug 99",
        "total 3 lamp 13 2 mug 99",
        "total 3 lamp 13,",
        "total lamp 13",
        "total 3 lamp x",
        "total",
    )
    assert await shown(*lines) == [reply_to(line, ORDER) for line in lines]


async def test_an_answer_is_what_mini_swe_agent_takes_for_the_end():
    assert await shown("answer 41") == ["COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n41"]


async def test_the_shell_finds_no_other_program_and_errors_are_among_the_output():
    assert await shown("ls", "/bin/ls /nowhere || true") == [
        "bad command",
        "/bin/ls: cannot access '/nowhere': No such file or directory",
    ]


async def played(policy, episode) -> None:
    """Play the turns as mini-swe-agent does: each call is answered by a message of its own."""
    policy.context_tokens_max = CONTEXT_TOKENS_MAX
    messages = [
        {"role": "system", "content": AGENT["system_template"]},
        {"role": "user", "content": episode.question},
    ]
    for _, replies in episode.turns:
        completion = await policy.chat(messages, tools=[BASH])
        answers = [
            {"role": "tool", "tool_call_id": call.id, "content": reply}
            for call, reply in zip(completion.calls, replies, strict=False)
        ]
        messages = [*messages, completion.message, *answers]


@pytest.mark.parametrize("seed", range(6))
async def test_the_warm_start_has_the_tokens_that_the_gateway_renders(scripted, tokenizer, seed):
    choose = random.Random(seed)
    order = order_of(task(0, "command_line", seed))
    episode = demonstration(order, choose, Habits(broken_call=0.0))
    policy = scripted(*(text for text, _ in episode.turns))
    await played(policy, episode)
    assert policy.contexts[-1] + policy.outputs[-1] == episode_example(tokenizer, episode).ids
    assert SYSTEM in tokenizer.decode(policy.contexts[0])


@pytest.mark.parametrize("k", [0, 1, 2, HELD_OUT, HELD_OUT + 63])
async def test_a_demonstrator_without_mistakes_is_always_right(scripted, k):
    order = order_of(task(0, "command_line", k))
    episode = demonstration(order, random.Random(k), SKILLED)
    policy = scripted(*(text for text, _ in episode.turns))
    await played(policy, episode)
    assert rewards.outcome(graded(policy, None, order)) == 1.0


@pytest.mark.parametrize(
    ("turn", "earned"),
    [
        (call_text(f"answer {ORDER.total}"), 1.0),
        (call_text("answer 1"), 0.0),
        (call_text("answer 1") + "\n" + call_text(f"answer {ORDER.total}"), 0.0),
        (call_text(f"answer {ORDER.total} 1"), 0.0),
        (call_text(f"echo answer {ORDER.total}"), 0.0),
        (f"The total is {ORDER.total}.", 0.0),
        (call_text(f"answer {ORDER.total}").replace("bash", "sh"), 0.0),
        (call_text(f"answer {ORDER.total}").replace("command", "line"), 0.0),
    ],
)
async def test_the_first_answer_of_the_last_turn_decides_the_outcome(scripted, turn, earned):
    policy = scripted(turn)
    await policy.chat([{"role": "user", "content": ORDER.question}], tools=[BASH])
    assert rewards.outcome(graded(policy, None, ORDER)) == earned


def test_orders_have_two_or_three_lines_and_held_out_ones_are_the_same_for_every_seed():
    assert [len(task(0, "command_line", k)["lines"]) for k in range(4)] == [2, 3, 2, 3]
    assert task(0, "command_line", HELD_OUT) == task(9, "command_line", HELD_OUT)
    assert task(0, "command_line", 5) != task(9, "command_line", 5)
