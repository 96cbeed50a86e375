"""Coding agents of the command line, as their makers ship them."""

import pytest

from tests.clients.bench import MODES, Check, Client, Launch, Mode, Scene
from tests.clients.task import TASK, parallel_steps_of, steps_of

pytestmark = pytest.mark.clients


def claude_code(scene: Scene) -> Launch:
    return Launch(
        (
            str(scene.installed / "node_modules/.bin/claude"),
            "-p",
            TASK,
            "--dangerously-skip-permissions",
            "--output-format=json",
        ),
        {
            "ANTHROPIC_BASE_URL": scene.root,
            "ANTHROPIC_API_KEY": scene.key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # Allows the option above to root.
        },
    )


def codex(scene: Scene) -> Launch:
    folder = scene.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f"""
model = "m"
model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "{scene.root}/v1"
env_key = "GATEWAY_KEY"
wire_api = "responses"
"""
    )
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return Launch(
        (str(scene.installed / "node_modules/.bin/codex"), "exec", *options, TASK),
        {"GATEWAY_KEY": scene.key},
    )


CLAUDE_CODE = Client(
    name="@anthropic-ai/claude-code",
    package="claude_code",
    protocol="messages",
    launch=claude_code,
    steps=steps_of("Bash", "command", description="run"),
    parallel_steps=parallel_steps_of("Bash", "command", description="run"),
    # It keeps the part of the answer that came, and asks for the rest.
    cut_forks=("edited",),
)
CODEX = Client(
    name="@openai/codex",
    package="codex",
    protocol="responses",
    launch=codex,
    steps=steps_of("exec_command", "cmd"),
    parallel_steps=parallel_steps_of("exec_command", "cmd"),
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("client", [CLAUDE_CODE, CODEX], ids=lambda client: client.package)
async def test_a_coding_agent_does_its_task_on_one_exact_path(
    client: Client, mode: Mode, check: Check
):
    await check(client, mode)
