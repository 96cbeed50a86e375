"""The configuration from a run's file and overrides, and the errors that name a key."""

import json
import re
from pathlib import PurePath

import msgspec
import pytest

from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.configuration import (
    ConfigurationError,
    changed,
    configuration,
    document,
    name_of,
    next_run,
)
from forgemq_launcher.core.pattern_words import in_words

FILE = """
run = "desk"
seed = 3
code_paths = ["code"]
[model]
path = "model"
[[queues]]
domain = "shop_desk"
task_source = "m:task"
agent = "m:play"
groups_per_step = 6
slots = 12
window = 4
[trainer]
steps = 40
"""


def made(*overrides, text=FILE):
    return configuration(
        document(text, overrides=overrides), run="desk-1", folder=PurePath("/work")
    )


def refusal(*overrides, text=FILE):
    with pytest.raises(ConfigurationError) as caught:
        made(*overrides, text=text)
    return str(caught.value)


def test_relative_paths_start_at_the_folder_and_the_run_id_is_the_given_one():
    run = made()
    assert (run.run, run.model.path, run.code_paths) == ("desk-1", "/work/model", ("/work/code",))


def test_a_queue_with_a_file_of_tasks_needs_no_task_source_and_its_paths_start_at_the_folder():
    text = FILE.replace('task_source = "m:task"', 'task_file = "t.jsonl"')
    (queue,) = made("queues.0.held_out_file=/data/h.jsonl", text=text).queues
    files = (queue.task_source, queue.task_file, queue.held_out_file)
    assert files == ("", "/work/t.jsonl", "/data/h.jsonl")


def test_a_queue_with_an_environment_needs_no_task_source():
    text = FILE.replace('task_source = "m:task"\nagent = "m:play"', 'agent = "verifiers:my_env"')
    (queue,) = made(text=text).queues
    assert (queue.task_source, queue.agent) == ("", "verifiers:my_env")


@pytest.mark.parametrize("queue", ["0", "shop_desk"])
def test_an_override_reaches_a_queue_by_index_and_by_domain(queue):
    assert made(f"queues.{queue}.slots=18").queues[0].slots == 18


def test_an_override_makes_tables_the_file_does_not_have():
    run = made("evaluation.tasks=8", "episodes.sampling.max_tokens=80", "rewards.beta=1.5")
    assert run.evaluation.tasks == 8
    assert run.episodes.sampling.max_tokens == 80
    assert run.rewards.beta == 1.5


def test_a_value_that_is_no_toml_is_text():
    assert made("queues.0.agent=other.module:play").queues[0].agent == "other.module:play"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.stepz=3", "trainer.stepz: no such key; did you mean steps?"),
        ("traner.steps=3", "traner: no such key; did you mean trainer?"),
        ("queues.0.slot=3", "queues.0.slot: no such key; did you mean slots?"),
        ("queues.0.lr=3", "queues.0.lr: no such key; did you mean optimizer.lr?"),
        (
            "queues.0.sampling.top_k=3",
            "queues.0.sampling.top_k: no such key; did you mean episodes.sampling.top_k or "
            "speculation.top_k?",
        ),
        (
            "queues.0.seed=3",
            "queues.0.seed: no such key; did you mean seed at the top of the file?",
        ),
        ("queues.0.wholly_new=3", "queues.0.wholly_new: no such key"),
        (
            "episodes.sampling.tmperature=2",
            "episodes.sampling.tmperature: no such key; did you mean temperature?",
        ),
        ("trainer.steps=many", "trainer.steps: Expected `int`, got `str`"),
        ("trainer.steps=0", "trainer.steps: Expected `int` >= 1"),
        ("queues.desk.slots=3", "queues.desk: no such element; there are shop_desk"),
        ("queues.0.domain.name=3", "queues.0.domain.name: queues.0.domain is no table"),
        ("steps", "'steps': an override is written key=value"),
        ("queues.0.agent=my_agent", "queues.0.agent: must be module:function"),
        ("queues.0.outcome=my rewards:outcome", "queues.0.outcome: must be module:function"),
        ("queues.0.domain=Shop Desk", "queues.0.domain: must be 1 to 40 of a-z, 0-9 and _"),
        (
            'queues.0.curriculum={sampler="best"}',
            "queues.0.curriculum.sampler: must be success_band, age, hardest_first or "
            "module:function",
        ),
        (
            "model.dtype=float16",
            "model.dtype: Invalid enum value 'float16'; must be one of bfloat16, float32",
        ),
        (
            "queues.0.rewards.truncated=no",
            "queues.0.rewards.truncated: Invalid enum value 'no'; "
            "must be one of grade, mask, no_loss, zero",
        ),
    ],
)
def test_a_wrong_override_is_refused_by_the_name_of_its_key(override, expected):
    assert refusal(override) == expected


def test_every_regular_expression_of_the_file_is_said_in_words():
    text = msgspec.json.encode(msgspec.json.schema(RunConfiguration)).decode()
    patterns = {json.loads(each) for each in re.findall(r'"pattern":("(?:[^"\\\\]|\\\\.)*")', text)}
    assert len(patterns) >= 6
    rules = [f"Expected `str` matching regex {each!r}" for each in patterns]
    assert [rule for rule in rules if in_words(rule) == rule] == []


def test_combinations_that_cannot_work_are_refused_by_the_contract():
    assert "slots (N) must be at least groups_per_step (P)" in refusal("queues.0.slots=5")


def test_a_missing_key_and_a_broken_file_are_refused():
    assert refusal(text="seed = 1") == "model: must be given"
    assert refusal(text="seed = ").startswith("not a TOML file")


def test_run_ids_count_up_from_the_highest_taken():
    assert next_run("desk", taken=[]) == "desk-1"
    assert next_run("desk", taken=["desk-2", "desk-9", "other-40", "desk-x"]) == "desk-10"


def test_a_name_that_cannot_begin_a_topic_is_refused():
    assert name_of({}, default="demo") == "demo"
    with pytest.raises(ConfigurationError, match="got 'Shop Desk'"):
        name_of({"run": "Shop Desk"}, default="demo")


def test_a_resume_changes_what_may_change_and_keeps_the_rest():
    was = made()
    now = changed(was, ["optimizer.lr=0.5", "trainer.steps=80"], folder=PurePath("/elsewhere"))
    assert (now.optimizer.lr, now.trainer.steps, now.model.path) == (0.5, 80, "/work/model")
    assert changed(was, [], folder=PurePath("/elsewhere")) == was


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("queues.shop_desk.slots=18", "queues.shop_desk.slots was 12 .* the scheduler's journal"),
        ("seed=4", "seed was 3 when this run was trained, and is 4 now: the tasks"),
        ("run=other", "run was 'desk-1' when this run was trained, and is 'other' now: it begins"),
        ("trainer.stepz=3", "trainer.stepz: no such key; did you mean steps?"),
        ("optimizer.lr=0", "optimizer.lr: Expected `float` > 0.0"),
    ],
)
def test_a_resume_refuses_what_must_stay_by_name(override, expected):
    with pytest.raises(ConfigurationError, match=expected.replace("?", r"\?")):
        changed(made(), [override], folder=PurePath("/work"))


def test_a_queue_that_names_neither_agent_nor_task_source_is_played_from_outside():
    outside = FILE.replace('task_source = "m:task"\n', "").replace('agent = "m:play"\n', "")
    queue = made(text=outside).queues[0]
    assert (queue.agent, queue.task_source) == ("", "")
    half = FILE.replace('agent = "m:play"\n', "")
    assert refusal(text=half) == "queues.0.agent: must be given"
