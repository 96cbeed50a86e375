"""An environment of verifiers 0.4, played by the code of the agents service in a Python of its own.

The lock of `make setup` has an older verifiers, whose environments are of another kind.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.bench import MODES, Check, Client, Launch, Mode, Scene
from tests.clients.conftest import SystemOf
from tests.clients.install import CACHE, ROOT, folder_of
from tests.clients.scripted_model import ScriptedModel
from tests.clients.task import parallel_steps_of, steps_of

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
SOURCES = (*sorted(ROOT.glob("libs/*/src")), ROOT / "contracts/src", ROOT / "services/agents/src")
# Of uv, with which verifiers sets up the program of its harness.
INHERITED = ("SSL_CERT_FILE", "UV_INDEX_URL", "UV_DEFAULT_INDEX")


def environ_of(modules: Path) -> dict[str, str]:
    """What a Python with verifiers needs to import the agents service and these modules."""
    return {
        **{name: os.environ[name] for name in INHERITED if name in os.environ},
        "PYTHONPATH": os.pathsep.join(map(str, (*SOURCES, modules))),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "UV_CACHE_DIR": str(CACHE / "uv"),
    }


def verifiers_environment(scene: Scene) -> Launch:
    session = scene.root if "/s/" in scene.root else f"{scene.root}/s/{scene.key}"
    return Launch(
        (
            str(scene.installed / "venv/bin/python"),
            str(HERE / "programs" / "verifiers_environment.py"),
            f"{session}/v1",
            "written_file",
        ),
        environ_of(HERE / "environments"),
    )


VERIFIERS = Client(
    name="verifiers (Python, bash)",
    package="verifiers",
    protocol="chat",
    launch=verifiers_environment,
    steps=steps_of("bash", "command"),
    parallel_steps=parallel_steps_of("bash", "command"),
)


@pytest.mark.parametrize("mode", MODES)
async def test_an_environment_of_verifiers_is_played_and_scored_on_one_exact_path(
    mode: Mode, check: Check
) -> None:
    await check(VERIFIERS, mode)


ENVIRONMENT = """
import verifiers.v1 as vf

__all__ = ["OneTaskset"]

class OneTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=2.0)
    async def answered(self, trace: vf.Trace) -> float:
        {reward}

class OneTaskset(vf.Taskset[OneTask]):
    {endless}
    def load(self):
        return [OneTask(vf.TaskData(prompt={prompt}), self.config.task) for _ in range(2)]

def load_environment():
    agent = {{"harness": {{"id": "bash"}}, "runtime": {{"type": "subprocess"}}, {agent}}}
    return vf.load_environment(
        vf.resolve_env_config({{"id": "{kind}", "taskset": {{"id": __name__}}, {role}: agent}})
    )
"""
USUAL = {
    "reward": "return 1.0",
    "endless": "",
    "prompt": '"Write hello into out.txt and show it."',
    "agent": "",
    "kind": "",
    "role": '"agent"',
}


def loading(folder: Path, **changed: str) -> str:
    """What an environment is refused with."""
    (folder / "one.py").write_text(ENVIRONMENT.format(**{**USUAL, **changed}))
    program = (
        "from forgemq_agents.environments import load_environment\n"
        "from forgemq_contracts.run import Evaluation\n"
        "load_environment('one').tasks(Evaluation(tasks=2), is_pool=False)\n"
    )
    done = subprocess.run(
        [folder_of("verifiers") / "venv/bin/python", "-c", program],
        env={**os.environ, **environ_of(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.splitlines()[-1].removeprefix(
        "forgemq_agents.environment_errors.UnplayableError: "
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"kind": "user-sim", "role": '"assistant"'},
            "exactly one agent may sample from the policy, and so have no client of its own: an "
            "episode has one reward. Here these do: assistant, user",
        ),
        (
            {"agent": '"retries": {"max_retries": 1}'},
            "agent.retries must be 0: the turns of a failed try would train with the reward of the "
            "next one; a masked episode is played again by the run",
        ),
        (
            {"endless": "INFINITE = True"},
            "its taskset is endless: bound it, as by environment.taskset.take(1000)",
        ),
        (
            {},
            "its taskset has 2 tasks, of which the last evaluation.tasks, 2, are held out: none is "
            "left to train",
        ),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused_with_the_reason(
    tmp_path: Path, changed: dict[str, str], words: str
) -> None:
    assert loading(tmp_path, **changed) == words


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "{'outcome': 2.0}"),
        ({"reward": "return {}"}, "AgentFailedError: no reward: neither its task nor its env"),
        ({"agent": '"max_turns": 1'}, "{'outcome': 2.0, 'truncated': 'too_many_turns'}"),
        (
            {"reward": 'raise KeyError("word")'},
            "AgentFailedError: the environment failed: TaskError: ",
        ),
        (
            {"prompt": '[vf.UserMessage(content="4,7 " * 200_000)]'},
            "{'outcome': 2.0, 'truncated': 'context_full'}",
        ),
    ],
)
async def test_the_policy_answers_for_limits_and_nobody_for_what_fails(
    tmp_path: Path, system_of: SystemOf, changed: dict[str, str], words: str
) -> None:
    (tmp_path / "one.py").write_text(ENVIRONMENT.format(**{**USUAL, **changed}))
    async with system_of("plain") as system:
        system.script = ScriptedModel(VERIFIERS.steps)
        claim = await system.episode()
        process = await asyncio.create_subprocess_exec(
            folder_of("verifiers") / "venv/bin/python",
            HERE / "programs" / "verifiers_environment.py",
            claim["session_url"],
            "one",
            env={**os.environ, **environ_of(tmp_path)},
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
    last = printed.decode().splitlines()[-1]
    assert last.removeprefix("forgemq_agents.errors.").startswith(words), printed.decode()


def printed(program: str, modules: Path = HERE / "environments") -> str:
    """What a program prints in the Python that has verifiers."""
    done = subprocess.run(
        [folder_of("verifiers") / "venv/bin/python", "-c", program],
        env={**os.environ, **environ_of(modules)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


ROTATION = """
import asyncio
from forgemq_agents.taskset_agent import load

async def main():
    agent, sets = load("written_file"), []
    for _ in range(130):
        async with agent._served():
            if agent._newest not in sets:
                sets.append(agent._newest)
    # Stopping takes a moment; the newest set never ends by itself.
    await asyncio.wait([each.task for each in sets[:-1]], timeout=20)
    print([each.begun for each in sets], [each.task.done() for each in sets])

asyncio.run(main())
"""


def test_servers_are_replaced_after_64_episodes_and_end_with_the_last_of_them() -> None:
    assert printed(ROTATION) == "[64, 64, 2] [True, True, False]\n"


STARTS = """
import asyncio
from forgemq_agents.taskset_agent import load

async def hang():
    await asyncio.sleep(1000)

async def leave():
    raise SystemExit("no port")

async def lose():
    raise asyncio.CancelledError

async def main():
    agent = load("written_file")
    for start in (hang, leave, lose):
        agent._environment.start = start
        try:
            async with asyncio.timeout(5), agent._served():
                print("served")
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    await asyncio.sleep(1)
    print([each.get_coro().__name__ for each in asyncio.all_tasks()])

asyncio.run(main())
"""


def test_servers_that_do_not_start_hold_up_no_later_episode_and_leave_nothing() -> None:
    assert printed(STARTS).splitlines() == [
        "TimeoutError: ",
        "AgentFailedError: its servers do not start: SystemExit: no port",
        "AgentFailedError: its servers do not start: CancelledError",
        "['main']",
    ]


ROWS = """
import verifiers.v1 as vf
from pydantic import Field
from forgemq_agents.environment_errors import UnplayableError
from forgemq_agents.taskset_agent import _row

class Data(vf.TaskData):
    hint: str | None = "usual"

class Hidden(vf.TaskData):
    answer: str = Field("", exclude=True)

class Number(vf.TaskData):
    size: float = 0.0

class Task(vf.Task[Data]): ...
class HiddenTask(vf.Task[Hidden]): ...
class NumberTask(vf.Task[Number]): ...
class Other(Task): ...

for task, declared in (
    (Task(Data(hint=None)), Task),
    (Other(Data()), Task),
    (vf.Task(Data()), vf.Task),
    (HiddenTask(Hidden(answer="x")), HiddenTask),
    (NumberTask(Number(size=float("nan"))), NumberTask),
    (Task(Data(hint="x" * 17_000_000)), Task),
):
    try:
        print(declared.data_type().model_validate(_row(task, declared, number=7)) == task.data)
    except UnplayableError as error:
        print(error)
"""


def test_a_task_that_no_episode_could_make_again_is_refused_with_the_reason() -> None:
    again = "task 7, counted from 0: it is of the class {}, and each episode makes it again of {}, "
    declared = "which the taskset declares"
    assert printed(ROWS).splitlines() == [
        "True",
        again.format("Other", "Task") + declared,
        again.format("Data", "TaskData") + declared,
        "task 7, counted from 0: no episode has what is excluded from its data: answer",
        "task 7, counted from 0: JSON changes the value of size",
        "task 7, counted from 0: its data has 17000373 bytes, a task has at most 16711680",
    ]
