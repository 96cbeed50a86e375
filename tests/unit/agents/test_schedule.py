"""Which groups are requested, the user's code by name, and exit statuses of the process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forgemq_agents.app import read_configuration
from forgemq_agents.core.schedule import evaluation_groups, groups_ahead, round_due
from forgemq_agents.user_code import UserCodeError, load_domains
from forgemq_contracts.run import Evaluation, Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.stages import Stage, StageDomain


def configuration(*domains: str, code: str = "m", **changes) -> RunConfiguration:
    queues = tuple(
        Queue(domain=domain, task_source=f"{code}:task", agent=f"{code}:play", slots=64)
        for domain in domains
    )
    fields = {
        "run": "r",
        "seed": 0,
        "model": Model(path="m"),
        "queues": queues,
        "trainer": Trainer(steps=10),
    }
    return RunConfiguration(**{**fields, **changes})


def test_a_round_has_every_held_out_task_of_every_domain_sampled_and_greedy():
    run = configuration("a", "b", evaluation=Evaluation(tasks=2, task_offset=50))
    groups = list(evaluation_groups(run, round_name="start"))
    assert [(g.domain, g.round_name, g.task_number, g.temperature) for g in groups] == [
        (domain, f"start-{mode}", number, temperature)
        for domain in ("a", "b")
        for mode, temperature in (("sampled", None), ("greedy", 0.0))
        for number in (50, 51)
    ]
    assert len({(g.domain, g.idempotency_key) for g in groups}) == 8


def test_a_round_may_leave_a_mode_out():
    run = configuration("a", evaluation=Evaluation(tasks=1, sampled=False))
    assert [g.round_name for g in evaluation_groups(run, round_name="end")] == ["end-greedy"]


@pytest.mark.parametrize(
    ("every", "trained", "due"),
    [
        (0, 5, None),
        (4, 0, None),
        (4, 3, None),
        (4, 4, "step-4"),
        (4, 7, "step-4"),
        (4, 9, "step-8"),
        (4, 10, None),
    ],
)
def test_periodic_rounds_fall_on_multiples_but_not_on_the_ends(every, trained, due):
    evaluation = Evaluation(tasks=1, every_steps=every)
    assert round_due(evaluation, steps_trained=trained, steps=10) == due


def test_groups_ahead_are_the_slots_and_one_step():
    queue = Queue(domain="a", task_source="", agent="", slots=12, groups_per_step=6)
    assert groups_ahead(queue, groups_max=6) == 18


@pytest.fixture
def code_path(tmp_path: Path) -> Iterator[Path]:
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before


def test_the_users_functions_are_found_on_the_code_paths(code_path):
    (code_path / "users_own.py").write_text(
        "def task(seed, domain, k):\n    return [seed, domain, k]\n"
        "async def play(episode):\n    pass\n"
    )
    run = configuration("a", code="users_own", code_paths=(str(code_path),))
    assert load_domains(run)["a"].task_source(1, "a", 2) == [1, "a", 2]


OUTSIDE = Queue(domain="outside", task_source="", agent="")


def test_a_queue_without_an_agent_is_left_to_others(code_path):
    (code_path / "played_here.py").write_text(
        "def task(seed, domain, k): pass\nasync def play(episode): pass\n"
    )
    (here,) = configuration("here", code="played_here").queues
    both = configuration(
        queues=(OUTSIDE, here),
        code_paths=(str(code_path),),
        evaluation=Evaluation(tasks=1),
    )
    assert set(load_domains(both)) == {"here"}
    assert {group.domain for group in evaluation_groups(both, round_name="start")} == {"here"}
    with pytest.raises(UserCodeError, match="queues: none has an agent"):
        load_domains(configuration(queues=(OUTSIDE,)))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("no_such_module_anywhere", "No module named"),
        ("json", "has no attribute 'task'"),
        ("", "Empty module name"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_its_field(code, reason):
    with pytest.raises(UserCodeError, match=rf"queues\.a\.task_source: .*{reason}"):
        load_domains(configuration("a", code=code))


@pytest.mark.parametrize(
    ("arguments", "is_taken"),
    [("s, d, k", False), ("s, d, k, difficulty", False), ("s, d, k, difficulty=0", True)],
)
def test_a_task_source_must_take_the_difficulty_of_a_stage(code_path, arguments, is_taken):
    module = f"source_{arguments.count('difficulty')}{int(is_taken)}"
    text = f"def task({arguments}): pass\nasync def play(episode): pass\n"
    (code_path / f"{module}.py").write_text(text)
    own = StageDomain(domain="a", share=1.0, difficulty=0.5)
    stages = (Stage(from_step=0, domains=(own,)),)
    run = configuration("a", code=module, code_paths=(str(code_path),), stages=stages)
    if is_taken:
        assert set(load_domains(run)) == {"a"}
        return
    with pytest.raises(UserCodeError, match=r"^queues\.a\.task_source: must take .* stages\.0"):
        load_domains(run)


def test_the_configuration_is_read_as_the_launcher_writes_it(tmp_path):
    run = configuration("a")
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(run))
    assert read_configuration(str(tmp_path / "run.json")) == run


def agents(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "FORGEMQ" not in name}
    return subprocess.run(
        [sys.executable, "-m", "forgemq_agents"],
        env={**clean, **{f"FORGEMQ_AGENTS_{name}": value for name, value in environ.items()}},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_missing_setting_is_refused_by_name():
    ended = agents({"CONFIGURATION": "x", "GATEWAY_URL": "http://127.0.0.1:9"})
    assert ended.returncode == 2
    assert "FORGEMQ_AGENTS_ADMIN_KEY: must be set" in json.loads(ended.stderr)["error"]


def test_a_gateway_that_stays_away_fails_the_process_after_the_deadline(tmp_path):
    (tmp_path / "own_code.py").write_text("def task(s, d, k): pass\nasync def play(e): pass\n")
    run = configuration("a", code="own_code", code_paths=(str(tmp_path),))
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(run))
    ended = agents(
        {
            "CONFIGURATION": str(tmp_path / "run.json"),
            "GATEWAY_URL": "http://127.0.0.1:9",
            "ADMIN_KEY": "a",
            "RETRY_DEADLINE_S": "0.5",
        }
    )
    assert ended.returncode == 1
    assert "http://127.0.0.1:9/v1/run" in json.loads(ended.stderr.splitlines()[-1])["error"]
