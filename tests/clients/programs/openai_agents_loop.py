"""openai-agents: an agent with one tool, over chat completions or responses, streamed or whole."""

import asyncio
import os
import subprocess
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

API, STREAMS = sys.argv[1], sys.argv[2] == "stream"


@function_tool
def shell(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout or "(nothing)"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["KEY"], max_retries=4)
    kind = OpenAIChatCompletionsModel if API == "chat" else OpenAIResponsesModel
    agent = Agent(name="a", tools=[shell], model=kind(model="m", openai_client=client))
    task = "Write hello into out.txt and show it."
    if STREAMS:
        result = Runner.run_streamed(agent, task)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, task)
    assert "All done" in result.final_output, result.final_output


asyncio.run(main())
