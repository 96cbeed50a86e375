"""The archive desk in token space: what fits, who succeeds, what is rewarded, what is taught."""

import json
import random
import statistics
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from archive_desk import rewards, warm_start
from archive_desk.agent import NOTE, WINDOW
from archive_desk.archive import FILES, Inquiry, as_task, inquiry_of
from archive_desk.demonstrator import Demonstration, Habits, call_text, in_window, with_notes
from archive_desk.desk import ANSWERED, BAD_CALL, NO_FILE, READ, TURNS_MAX, ArchiveDesk
from archive_desk.tasks import HELD_OUT, task
from archive_desk.warm_start import context_example
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forgemq_agents.tool_loop import CONTEXT_FULL, run_tool_loop
from forgemq_contracts.grading import GradingEpisode
from forgemq_rendering import Rendering
from tests.unit.archive_desk.visitor import sampler
from tests.unit.demo.conftest import TokenPolicy
from tests.unit.demo.grading import graded_as

ROOT = Path(__file__).parents[3]
RUN = tomllib.loads((ROOT / "deploy/archive_desk/run.toml").read_text())
CONTEXT_TOKENS_MAX = RUN["model"]["context_tokens_max"]
TASKS = 24
COLLECT = Inquiry("collect", ("lamp", "rope", "soap", "drum"), 7)
TRACE = Inquiry("trace", ("lamp", "rope", "soap", "drum"), 7)
SKILLED = Habits(notes=1.0, notes_at_the_end=0.0, notes_wrongly=0.0, gives_up=0.0)

MANAGEMENT = {
    "notes": {"context_tools": [NOTE]},
    "window": {"context_rules": [WINDOW]},
    "none": {},
}
"""What the three agents pass to the loop."""

Make = Callable[..., TokenPolicy]


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering.load(str(ROOT / RUN["model"]["path"]))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(ROOT / RUN["model"]["path"])


@pytest.fixture
def careful(rendering, tokenizer) -> Make:
    """The policy that reads everything, in the run's context window."""

    def make(*, is_noting: bool) -> TokenPolicy:
        policy = TokenPolicy(rendering, sampler(rendering, tokenizer.encode, is_noting=is_noting))
        policy.context_tokens_max = CONTEXT_TOKENS_MAX
        return policy

    return make


@pytest.fixture
def scripted(rendering, tokenizer) -> Make:
    """A policy that writes these texts, one a turn."""

    def make(*texts: str) -> TokenPolicy:
        left = iter(texts)

        async def sample(context: list[int], room: int) -> list[int]:
            return [*tokenizer.encode(next(left)), rendering.stop_token_ids[0]][:room]

        policy = TokenPolicy(rendering, sample)
        policy.context_tokens_max = CONTEXT_TOKENS_MAX
        return policy

    return make


def graded(policy: TokenPolicy, inquiry: Inquiry, **changes: object) -> GradingEpisode:
    fields = {"domain": "archive_desk", "task": as_task(inquiry), **changes}
    return graded_as(policy, **fields)


def held_out() -> list[Inquiry]:
    return [inquiry_of(task(0, "archive_desk", HELD_OUT + k)) for k in range(TASKS)]


async def ends(
    careful: Make, management: str, *, is_noting: bool
) -> list[tuple[Inquiry, str, float]]:
    """Of each held-out task: how the careful policy's episode ended, and what it earned."""
    found = []
    for inquiry in held_out():
        policy = careful(is_noting=is_noting)
        end = await run_tool_loop(
            policy, ArchiveDesk(inquiry), turns_max=TURNS_MAX, **MANAGEMENT[management]
        )
        found.append((inquiry, end, rewards.outcome(graded(policy, inquiry))))
    return found


def test_the_context_holds_about_a_third_of_what_an_inquiry_needs(tokenizer):
    needed = []
    for inquiry in held_out():
        turns = tuple((call_text("read", name), inquiry.page(name)) for name in inquiry.files)
        whole = Demonstration(inquiry.question, turns)
        needed.append(len(context_example(tokenizer, whole, (READ, NOTE.tool)).ids))
    assert statistics.mean(needed) / CONTEXT_TOKENS_MAX == pytest.approx(2.9, abs=0.15)
    assert min(needed) > 2.5 * CONTEXT_TOKENS_MAX
    assert warm_start.CONTEXT_TOKENS_MAX == CONTEXT_TOKENS_MAX


async def test_a_policy_that_notes_every_page_solves_every_inquiry(careful):
    found = await ends(careful, "notes", is_noting=True)
    assert [(end, earned) for _, end, earned in found] == [(ANSWERED, 1.0)] * TASKS


async def test_in_the_fixed_window_a_policy_solves_the_trails_and_no_other_inquiry(careful):
    found = await ends(careful, "window", is_noting=False)
    assert {end for _, end, _ in found} == {ANSWERED}
    assert {earned for inquiry, _, earned in found if inquiry.kind == "trace"} == {1.0}
    # Of 4 or 5 numbers it still sees the newest.
    assert {earned for inquiry, _, earned in found if inquiry.kind == "collect"} == {
        0.4 / 4,
        0.4 / 5,
    }
    solved = statistics.mean(earned == 1.0 for _, _, earned in found)
    assert solved == pytest.approx(1 / 3)


async def test_without_management_the_second_page_ends_every_episode(careful):
    found = await ends(careful, "none", is_noting=False)
    assert [(end, earned) for _, end, earned in found] == [(CONTEXT_FULL, 0.0)] * TASKS


async def test_a_note_leaves_the_question_and_the_notes(scripted, rendering):
    policy = scripted(
        call_text("read", "lamp"), call_text("note", "lamp 5"), call_text("note", "x"), "lamp 5"
    )
    await run_tool_loop(policy, ArchiveDesk(COLLECT), turns_max=TURNS_MAX, context_tools=[NOTE])
    assert COLLECT.page("lamp") in rendering.decode(policy.contexts[1])
    assert rendering.decode(policy.contexts[3]).endswith(
        "</tools><|im_end|>\n<|im_start|>user\nPlease list lamp, rope, soap, drum.\n"
        "Notes: lamp 5, x<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_the_window_leaves_the_newest_page_and_its_call(scripted, rendering):
    policy = scripted(*(call_text("read", name) for name in COLLECT.files), "lamp 5")
    await run_tool_loop(policy, ArchiveDesk(COLLECT), turns_max=TURNS_MAX, context_rules=[WINDOW])
    text = rendering.decode(policy.contexts[4])
    assert text.endswith(
        "user\nPlease list lamp, rope, soap, drum.<|im_end|>\n<|im_start|>assistant\n"
        f"{call_text('read', 'drum')}<|im_end|>\n<|im_start|>user\n<tool_response>\n"
        f"{COLLECT.page('drum')}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ('<tool_call>\n{"name": "read", "arguments": {"item": "mug"}\n</tool_call>', BAD_CALL),
        ('<tool_call>\n{"name": "look", "arguments": {"item": "mug"}}\n</tool_call>', BAD_CALL),
        ('<tool_call>\n{"name": "read", "arguments": {"file": "mug"}}\n</tool_call>', BAD_CALL),
        ('<tool_call>\n{"name": "note", "arguments": {"item": "mug"}}\n</tool_call>', BAD_CALL),
        (call_text("read", "cheese"), NO_FILE),
    ],
)
async def test_a_call_that_cannot_be_answered_gets_an_error(scripted, rendering, text, reply):
    desk, policy = ArchiveDesk(COLLECT), scripted(text, "lamp 5")
    await run_tool_loop(policy, desk, turns_max=TURNS_MAX, context_tools=[NOTE])
    added = rendering.decode(policy.contexts[1][len(policy.contexts[0]) :])
    assert added.count("<tool_response>") == 1
    assert f"<tool_response>\n{reply}\n</tool_response>" in added
    assert desk.reads == 0


def test_a_trail_leads_from_page_to_page_and_ends():
    pointers = [TRACE.page(name).rpartition(" ")[2] for name in TRACE.files]
    assert pointers == ["rope", "soap", "drum", "end"]
    assert TRACE.question == "Please trace lamp."
    assert TRACE.wanted == {"drum": TRACE.numbers["drum"]}
    assert f"drum {TRACE.numbers['drum']}, " in TRACE.page("drum")


@pytest.mark.parametrize(
    ("answer", "earned"),
    [
        ("lamp 1, rope 2, soap 3, drum 4", 1.0),
        ("drum 4, soap 3, rope 2, lamp 1", 1.0),
        ("lamp 1, rope 2, soap 3, drum 5", 0.3),
        ("lamp 1, rope 2, soap 3, drum 4, lamp 9", 0.3),
        ("lamp 1, rope 2, soap 3, drum 4, kite 9", 0.4),
        ("lamp 1, rope 2, soap 3, drum 4, drum 4", 0.4),
        ("lamp 1", 0.1),
        ("1, 2, 3, 4", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_earns_one_only_if_every_number_is_right(answer, earned):
    wanted = {"lamp": 1, "rope": 2, "soap": 3, "drum": 4}
    assert rewards.score(answer, wanted) == pytest.approx(earned)


async def test_only_an_answer_is_scored_and_no_claim_of_the_agent(scripted):
    right = ", ".join(f"{name} {number}" for name, number in COLLECT.wanted.items())
    for text, earned in ((right, 1.0), (f"{right} {call_text('read', 'mug')}", 0.0)):
        policy = scripted(text)
        await run_tool_loop(policy, ArchiveDesk(COLLECT), turns_max=1)
        assert rewards.outcome(graded(policy, COLLECT)) == earned
    policy = scripted("lamp 1")
    await run_tool_loop(policy, ArchiveDesk(COLLECT), turns_max=1)
    assert rewards.outcome(graded(policy, COLLECT, result={"outcome": 1.0})) < 0.5
    assert rewards.outcome(graded(policy, COLLECT, completions=())) == 0.0


def test_tasks_are_pure_survive_json_and_mix_kinds_and_lengths():
    for k in (0, 1, 77, HELD_OUT, HELD_OUT + 63):
        one = task(5, "archive_desk", k)
        assert task(5, "archive_desk", k) == one
        assert as_task(inquiry_of(json.loads(json.dumps(one)))) == one
    shapes = [(t["kind"], len(t["files"])) for t in (task(0, "archive_desk", k) for k in range(6))]
    assert shapes == [
        ("collect", 4), ("collect", 4), ("trace", 4), ("collect", 5), ("collect", 5), ("trace", 5)
    ]  # fmt: skip


def test_training_tasks_differ_by_seed_and_held_out_tasks_do_not():
    assert task(0, "archive_desk", 3) != task(1, "archive_desk", 3)
    first_held_out = [json.dumps(task(0, "archive_desk", HELD_OUT + k)) for k in range(64)]
    assert first_held_out == [json.dumps(task(1, "archive_desk", HELD_OUT + k)) for k in range(64)]
    assert len(set(first_held_out)) == 64
    assert not set(first_held_out) & {json.dumps(task(0, "archive_desk", k)) for k in range(500)}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("management", ["notes", "window"])
async def test_played_contexts_have_the_tokens_of_the_warm_start(
    scripted, tokenizer, management, seed
):
    """The gateway's rendering and the warm start's examples agree token for token."""
    demonstrate = {"notes": with_notes, "window": in_window}[management]
    tools = (READ, NOTE.tool) if management == "notes" else (READ,)
    inquiry = inquiry_of(task(seed, "archive_desk", seed))
    contexts = list(demonstrate(inquiry, random.Random(seed), SKILLED))
    learned = [text for context in contexts for text, _ in context.turns[context.given :]]
    policy = scripted(*learned)
    await run_tool_loop(policy, ArchiveDesk(inquiry), turns_max=TURNS_MAX, **MANAGEMENT[management])
    played = [c + o for c, o in zip(policy.contexts, policy.outputs, strict=True)]
    assert len(played) == len(learned)
    for context in contexts:
        assert context_example(tokenizer, context, tools).ids in played


def test_what_a_context_begins_with_in_the_window_is_no_target(tokenizer):
    *_, last = in_window(COLLECT, random.Random(0), SKILLED)
    example = context_example(tokenizer, last, (READ,))
    targets = [token for token, wanted in zip(*example, strict=True) if wanted]
    assert last.given == 1
    assert tokenizer.decode(targets) == f"{last.turns[1][0]}<|im_end|>"


def test_every_name_is_one_token_and_no_filler(tokenizer):
    assert {len(tokenizer.encode(name)) for name in FILES} == {1}
    assert not set(FILES) & {"shelf", "code", "stock", "next", "end"}
