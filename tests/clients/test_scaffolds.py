"""Scaffolds for coding, as their makers ship them, each with its own tools or form of edits."""

import json

import pytest

from tests.clients.bench import MODES, Check, Client, Launch, Mode, Scene
from tests.clients.scripted_model import Call, Step
from tests.clients.task import TASK, parallel_steps_of, steps_of

pytestmark = pytest.mark.clients

SUBMIT = Step(
    "I submit.", (Call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),)
)

FAILED_TEST = "There is no hello."


def mini_swe_agent(scene: Scene) -> Launch:
    options = ("--yolo", "--exit-immediately", "--model", "openai/m", "--task", TASK)
    return Launch(
        (str(scene.installed / "venv/bin/mini"), *options),
        {
            "OPENAI_API_BASE": f"{scene.root}/v1",
            "OPENAI_API_KEY": scene.key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
    )


def opencode(scene: Scene) -> Launch:
    folder = scene.home / ".config/opencode"
    folder.mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{scene.root}/v1", "apiKey": scene.key},
        "models": {"m": {"name": "m", "tool_call": True}},
    }
    settings = {"provider": {"gateway": provider}, "autoupdate": False, "share": "disabled"}
    (folder / "opencode.json").write_text(json.dumps(settings))
    return Launch(
        (str(scene.installed / "node_modules/.bin/opencode"), "run", "-m", "gateway/m", TASK),
    )


def qwen_code(scene: Scene) -> Launch:
    return Launch(
        (str(scene.installed / "node_modules/.bin/qwen"), "--yolo", TASK),
        {
            "OPENAI_BASE_URL": f"{scene.root}/v1",
            "OPENAI_API_KEY": scene.key,
            "OPENAI_MODEL": "m",
        },
    )


def cline(scene: Scene) -> Launch:
    program = scene.installed / "node_modules/.bin/cline"
    settings = f"-p openai-compatible -k {scene.key} -m m -b {scene.root}/v1"
    return Launch(
        ("sh", "-c", f"{program} auth {settings} && exec {program} -P openai-compatible '{TASK}'"),
    )


def in_lists(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps with each argument as a list of one."""
    return tuple(
        Step(
            step.text,
            tuple(
                Call(call.name, {name: [value] for name, value in call.arguments.items()})
                for call in step.calls
            ),
        )
        for step in steps
    )


def edit(text: str) -> str:
    """A whole file, as aider asks for it."""
    return f"I write it.\n\nout.txt\n```\n{text}\n```\n"


def aider(scene: Scene) -> Launch:
    """Its turns: an edit that its test refuses, and, with the test's output, a better one."""
    options = (
        *("--model", "openai/m", "--edit-format", "whole", "--message", TASK),
        *("--auto-test", "--test-cmd", f"grep hello out.txt || (echo {FAILED_TEST}; exit 1)"),
        *("--yes-always", "--no-git", "--no-check-update", "--analytics-disable"),
        *("--no-show-model-warnings", "--no-suggest-shell-commands", "--no-detect-urls"),
    )
    return Launch(
        (str(scene.installed / "venv/bin/aider"), *options, "out.txt"),
        {"OPENAI_API_BASE": f"{scene.root}/v1", "OPENAI_API_KEY": scene.key},
    )


MINI_SWE_AGENT = Client(
    name="mini-swe-agent",
    package="mini_swe_agent",
    protocol="chat",
    launch=mini_swe_agent,
    steps=(*steps_of("bash", "command")[:-1], SUBMIT),
    parallel_steps=(*parallel_steps_of("bash", "command")[:-1], SUBMIT),
)
OPENCODE = Client(
    name="opencode-ai",
    package="opencode",
    protocol="chat",
    launch=opencode,
    steps=steps_of("bash", "command", description="run"),
    parallel_steps=parallel_steps_of("bash", "command", description="run"),
    # The title of its session.
    forks=("side_request",),
    fault_at=2,
    # It asks again, and keeps the part of the answer that it had in its history.
    cut_forks=("resampled", "edited"),
)
QWEN_CODE = Client(
    name="@qwen-code/qwen-code",
    package="qwen_code",
    protocol="chat",
    launch=qwen_code,
    steps=steps_of("run_shell_command", "command", description="run"),
    parallel_steps=parallel_steps_of("run_shell_command", "command", description="run"),
    # It keeps the beginning of the answer in its history, and asks for the rest.
    cut_forks=("edited", "edited"),
)
CLINE = Client(
    name="cline",
    package="cline",
    protocol="chat",
    launch=cline,
    steps=in_lists(steps_of("run_commands", "commands")),
    parallel_steps=in_lists(parallel_steps_of("run_commands", "commands")),
    may_give_up=("cut_answer",),
    cut_forks=("resampled",),
)
AIDER = Client(
    name="aider-chat",
    package="aider",
    protocol="chat",
    launch=aider,
    steps=(Step(edit("hallo")), Step(edit("hello"))),
    is_step=lambda prompt: TASK in prompt,
    done=lambda prompt: prompt.count(FAILED_TEST),
    # It shows its files in the first messages, as they are now.
    forks=("edited",),
    cut_forks=("resampled",),
)


CASES: list[tuple[Client, Mode]] = [
    (client, mode)
    for client in (MINI_SWE_AGENT, OPENCODE, QWEN_CODE, CLINE, AIDER)
    for mode in MODES
    if mode != "parallel" or client.parallel_steps
]


def identity(value: Client | Mode) -> str:
    return value if isinstance(value, str) else value.package


@pytest.mark.parametrize(("client", "mode"), CASES, ids=identity)
async def test_a_scaffold_does_its_task_and_all_it_forks_is_named(
    client: Client, mode: Mode, check: Check
):
    await check(client, mode)
