"""pydantic-ai: an agent with one tool, over each of the three protocols."""

import os
import subprocess
import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

API = sys.argv[1]
where = {"base_url": os.environ["BASE_URL"], "api_key": os.environ["KEY"]}
if API == "messages":
    model = AnthropicModel("m", provider=AnthropicProvider(**where))
elif API == "chat":
    model = OpenAIChatModel("m", provider=OpenAIProvider(**where))
else:
    model = OpenAIResponsesModel("m", provider=OpenAIProvider(**where))
agent = Agent(model)


@agent.tool_plain
def shell(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout or "(nothing)"


answer = agent.run_sync("Write hello into out.txt and show it.").output
assert "All done" in answer, answer
