"""smolagents: an agent with one tool of its own, whose calls are tools or written as code."""

import os
import subprocess
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

HOW = sys.argv[2]
model = OpenAIModel("m", api_base=os.environ["BASE_URL"], api_key=os.environ["KEY"])


@tool
def shell(command: str) -> str:
    """Run a command.

    Args:
        command: What a shell runs.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout or "(nothing)"


agent = (CodeAgent if HOW == "code" else ToolCallingAgent)(tools=[shell], model=model)
answer = agent.run("Write hello into out.txt and show it.")
assert "All done" in answer, answer
