"""Environments of verifiers as agents of a queue: their tasks, and which are refused."""

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import verifiers as vf

from forgemq_agents.environment_agent import EnvironmentAgent, UnplayableError, load
from forgemq_agents.environment_rubric import unscorable
from forgemq_agents.user_code import UserCodeError, load_domains
from forgemq_contracts.curriculum import Curriculum
from forgemq_contracts.run import Evaluation, Model, Queue, RunConfiguration, Trainer
from tests.unit.agents.environments import ROW, data_set, right, single_turn, together

pytestmark = pytest.mark.usefixtures("kept_signal_handlers")


def test_a_rubric_that_cannot_score_a_rollout_alone_is_named():
    assert unscorable(single_turn().rubric) == ""
    assert unscorable(single_turn(right, together).rubric).startswith(
        "its reward function together scores a group"
    )
    without = vf.SingleTurnEnv(dataset=data_set())
    assert unscorable(without.rubric) == "its Rubric has no reward function"


def test_tasks_are_the_rows_pass_by_pass_and_the_eval_dataset_is_held_out():
    rows = [{**ROW, "example_id": n} for n in range(3)]
    environment = vf.SingleTurnEnv(
        dataset=data_set(*rows),
        eval_dataset=data_set({**ROW, "answer": "held out"}),
        rubric=vf.Rubric(funcs=[right]),
    )
    tasks = EnvironmentAgent(environment).tasks(Evaluation(tasks=1), is_pool=False)
    assert sorted(tasks(0, "d", n)["example_id"] for n in range(3)) == [0, 1, 2]
    assert [tasks(0, "d", n) for n in range(3)] == [tasks(0, "d", n) for n in range(3)]
    assert tasks(0, "d", 1_000_000)["answer"] == "held out"
    pool = EnvironmentAgent(environment).tasks(Evaluation(), is_pool=True)
    assert [pool(0, "d", n)["example_id"] for n in range(3)] == [0, 1, 2]


def environment_run(*, folder="", evaluated=0, curriculum=None) -> RunConfiguration:
    queue = Queue(domain="d", task_source="", agent="verifiers:test_own_env", curriculum=curriculum)
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m"),
        queues=(queue,),
        trainer=Trainer(steps=1),
        evaluation=Evaluation(tasks=evaluated),
        code_paths=(str(folder),) if folder else (),
    )


SOUND = """
import verifiers as vf
from datasets import Dataset

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def load_environment():
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"question": "2 + 2", "answer": "4"}] * 3),
        system_prompt="Add.",
        rubric=vf.Rubric(funcs=[right]),
    )
"""


# The row that trains is numbered 0 in its data set and 1 among those that are held out.
LEAKS = SOUND.replace(
    'system_prompt="Add.",',
    """eval_dataset=Dataset.from_list(
            [{"question": "1 + 1", "answer": "2"}, {"question": "2 + 2", "answer": "4"}]
        ),""",
)

NO_ENVIRONMENT = """
from types import SimpleNamespace

def load_environment():
    return SimpleNamespace(env_id="", env_args={})
"""


@pytest.fixture
def module(tmp_path) -> Iterator[Any]:
    """Writes the module that `environment_run` names; it is forgotten afterwards."""

    def write(text: str) -> Any:
        (tmp_path / "test_own_env.py").write_text(text)
        return tmp_path

    yield write
    sys.modules.pop("test_own_env", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def test_a_queue_with_an_environment_has_its_agent_its_tasks_and_its_pool(module):
    before = signal.getsignal(signal.SIGTERM)
    run = environment_run(folder=module(SOUND), curriculum=Curriculum(sampler="age"))
    domain = load_domains(run)["d"]
    assert isinstance(domain.play, EnvironmentAgent)
    assert domain.task_source(0, "d", 2)["prompt"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2 + 2"},
    ]
    assert domain.pool == 3
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("text", "evaluated", "message"),
    [
        ("import no_such_package", 0, r"Could not import 'test_own_env'.*no_such_package"),
        ("x = 1", 0, "does not have a 'load_environment' function"),
        (NO_ENVIRONMENT, 0, "must return a verifiers.Environment, got SimpleNamespace"),
        (SOUND.replace('"Add."', "1 / 0"), 0, "Failed to load environment.*division by zero"),
        (SOUND.replace("right(completion, answer)", "right(completions)"), 0, "function right"),
        (SOUND.replace('"Add."', "exit('no key')"), 0, "SystemExit: no key"),
        (SOUND, 1, "its eval_dataset has 0 rows, and evaluation.tasks is 1"),
        (LEAKS, 2, r"1 of the 2 rows of its eval_dataset are among .*; the first is row 1.*2 \+ 2"),
        (
            SOUND.replace('system_prompt="Add."', "interleaved_rollouts=True"),
            0,
            "interleaved_rollouts must be off",
        ),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused_with_its_queue(
    module, text, evaluated, message
):
    run = environment_run(folder=module(text), evaluated=evaluated)
    with pytest.raises(
        UserCodeError, match=f"^queues.d.agent: 'verifiers:test_own_env': .*{message}"
    ):
        load_domains(run)


def test_an_environment_that_is_nowhere_is_refused():
    with pytest.raises(UnplayableError, match="Could not import 'no_such_environment'"):
        load("no_such_environment")
