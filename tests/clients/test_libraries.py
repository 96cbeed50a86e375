"""Clients that are libraries: each program in `programs/` is a plain loop with one tool."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.clients.bench import MODES, Check, Client, Launch, Mode, Protocol, Scene
from tests.clients.scripted_model import Call, Step
from tests.clients.task import SHOW, WRITE, parallel_steps_of, steps_of

pytestmark = pytest.mark.clients
PROGRAMS = Path(__file__).parent / "programs"
# These ask once more themselves if their stream broke, where the mode wants it.
THAT_ASK_AGAIN = ("openai_sdk.py", "anthropic_sdk.py", "sdk_node.mjs")


def program(name: str, protocol: Protocol, how: str) -> Callable[[Scene], Launch]:
    """The command that runs a program with the Python or Node.js of its package."""

    def launch(scene: Scene) -> Launch:
        is_node = name.endswith(".mjs")
        runs = "node" if is_node else str(scene.installed / "venv/bin/python")
        # Anthropic's clients add the version to the address themselves; the AI SDK's does not.
        is_bare = protocol == "messages" and name != "ai_sdk.mjs"
        root = scene.root if is_bare else f"{scene.root}/v1"
        environment = {"BASE_URL": root, "KEY": scene.key, "INSTALLED": str(scene.installed)}
        return Launch((runs, str(PROGRAMS / name), protocol, how), environment)

    return launch


def library(
    name: str,
    package: str,
    file: str,
    protocol: Protocol,
    how: str = "whole",
    may_give_up: tuple[Mode, ...] = (),
    cut_forks: tuple[str, ...] = (),
) -> Client:
    language = "Node.js" if file.endswith(".mjs") else "Python"
    asks_again = how == "stream" and file in THAT_ASK_AGAIN
    return Client(
        name=f"{name} ({language}, {how})",
        package=package,
        protocol=protocol,
        launch=program(file, protocol, how),
        steps=steps_of("shell", "command"),
        parallel_steps=parallel_steps_of("shell", "command"),
        may_give_up=tuple(m for m in may_give_up if not (m == "killed_late" and asks_again)),
        asks_again=asks_again,
        cut_forks=cut_forks,
    )


# A stream that ends in the middle is an error for these: they do not ask again.
STREAM_CUT: tuple[Mode, ...] = ("cut_waiting", "cut_answer", "killed_late")
# The AI SDK does if only keep-alives came, but not behind a part of the answer.
ANSWER_CUT: tuple[Mode, ...] = ("cut_waiting", "cut_answer")
# In Node.js they ask again if no answer begins, but not if its body ends early.
BODY_CUT: tuple[Mode, ...] = ("cut_answer",)
# It asks again without a sign that it does.
AGAIN = ("resampled",)
OPENAI = [
    library("openai", "sdk_python", "openai_sdk.py", "chat"),
    library("openai", "sdk_python", "openai_sdk.py", "chat", "stream", STREAM_CUT),
    library("openai", "sdk_python", "openai_sdk.py", "responses"),
    library("openai", "sdk_python", "openai_sdk.py", "responses", "stream", STREAM_CUT),
]
ANTHROPIC = [
    library("anthropic", "sdk_python", "anthropic_sdk.py", "messages"),
    library("anthropic", "sdk_python", "anthropic_sdk.py", "messages", "stream", STREAM_CUT),
    library("@anthropic-ai/sdk", "sdk_node", "sdk_node.mjs", "messages", "whole", BODY_CUT),
    library("@anthropic-ai/sdk", "sdk_node", "sdk_node.mjs", "messages", "stream", STREAM_CUT),
]
OPENAI_NODE = [
    library("openai", "sdk_node", "sdk_node.mjs", "chat", "whole", BODY_CUT),
    library("openai", "sdk_node", "sdk_node.mjs", "chat", "stream", STREAM_CUT),
    library("openai", "sdk_node", "sdk_node.mjs", "responses", "whole", BODY_CUT),
    library("openai", "sdk_node", "sdk_node.mjs", "responses", "stream", STREAM_CUT),
]
AI_SDK = [
    library("ai", "ai_sdk", "ai_sdk.mjs", "chat", cut_forks=AGAIN),
    library("ai", "ai_sdk", "ai_sdk.mjs", "chat", "compatible", cut_forks=AGAIN),
    library("ai", "ai_sdk", "ai_sdk.mjs", "chat", "stream", ANSWER_CUT),
    library("ai", "ai_sdk", "ai_sdk.mjs", "responses", cut_forks=AGAIN),
    library("ai", "ai_sdk", "ai_sdk.mjs", "responses", "stream", ANSWER_CUT),
    library("ai", "ai_sdk", "ai_sdk.mjs", "messages", cut_forks=AGAIN),
    library("ai", "ai_sdk", "ai_sdk.mjs", "messages", "stream", ANSWER_CUT),
]
FRAMEWORKS = [
    library("openai-agents", "openai_agents", "openai_agents_loop.py", "chat"),
    library(
        "openai-agents", "openai_agents", "openai_agents_loop.py", "chat", "stream", STREAM_CUT
    ),
    library("openai-agents", "openai_agents", "openai_agents_loop.py", "responses"),
    library(
        "openai-agents", "openai_agents", "openai_agents_loop.py", "responses", "stream", STREAM_CUT
    ),
    library("pydantic-ai-slim", "pydantic_ai", "pydantic_ai_loop.py", "chat"),
    library("pydantic-ai-slim", "pydantic_ai", "pydantic_ai_loop.py", "responses"),
    library("pydantic-ai-slim", "pydantic_ai", "pydantic_ai_loop.py", "messages"),
    library("langchain", "langgraph", "langchain_loop.py", "chat"),
    library("langchain", "langgraph", "langchain_loop.py", "responses"),
    library("langchain", "langgraph", "langchain_loop.py", "messages"),
    library("litellm", "litellm", "litellm_loop.py", "chat"),
    library("litellm", "litellm", "litellm_loop.py", "chat", "stream", STREAM_CUT),
    library("litellm", "litellm", "litellm_loop.py", "messages", cut_forks=AGAIN),
    library("litellm", "litellm", "litellm_loop.py", "messages", "stream", STREAM_CUT),
]
ANSWER = "final_answer"


def observations(prompt: str) -> int:
    """Calls with a result, which smolagents writes as text behind its instructions."""
    return prompt.split("New task:")[-1].count("'function': {'name'")


FINAL = Step("I end.", (Call(ANSWER, {"answer": "All done."}),))
CODE_STEPS = tuple(
    Step(f"Thought: go on.\n<code>\n{code}\n</code>")
    for code in (f"print(shell('{WRITE}'))", f"print(shell('{SHOW}'))", f"{ANSWER}('All done')")
)
SMOLAGENTS = [
    # It writes its earlier calls as text, not as the calls that the model made.
    msgspec.structs.replace(
        library("smolagents", "smolagents", "smolagents_loop.py", "chat", "tools"),
        steps=(*steps_of("shell", "command")[:-1], FINAL),
        parallel_steps=(*parallel_steps_of("shell", "command")[:-1], FINAL),
        done=observations,
        forks=("edited", "edited"),
    ),
    # It writes its code behind the answer once more, and all tokens of the answer stay.
    msgspec.structs.replace(
        library("smolagents", "smolagents", "smolagents_loop.py", "chat", "code"),
        steps=CODE_STEPS,
        parallel_steps=(),
        is_step=lambda _prompt: True,
        done=observations,
        forks=("edited", "edited"),
    ),
]
CLIENTS = (*OPENAI, *ANTHROPIC, *OPENAI_NODE, *AI_SDK, *FRAMEWORKS, *SMOLAGENTS)
CASES: list[tuple[Client, Mode]] = [
    (client, mode)
    for client in CLIENTS
    for mode in MODES
    if mode != "parallel" or client.parallel_steps
]


def identity(value: Client | Mode) -> str:
    if isinstance(value, str):
        return value
    return f"{value.package}-{value.name}-{value.protocol}"


@pytest.mark.parametrize(("client", "mode"), CASES, ids=identity)
async def test_a_library_does_its_task_on_one_exact_path(client: Client, mode: Mode, check: Check):
    await check(client, mode)
