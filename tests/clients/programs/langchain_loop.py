"""langchain on langgraph: an agent with one tool, over each of the three protocols."""

import os
import subprocess
import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

API, STREAMS = sys.argv[1], sys.argv[2] == "stream"


@tool
def shell(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout or "(nothing)"


where = {"model": "m", "base_url": os.environ["BASE_URL"], "api_key": os.environ["KEY"]}
where |= {"max_retries": 4, "streaming": STREAMS}
if API == "messages":
    model = ChatAnthropic(**where)
else:
    model = ChatOpenAI(**where, use_responses_api=API == "responses")
agent = create_agent(model, [shell])
asked = {"messages": [("user", "Write hello into out.txt and show it.")]}
answer = agent.invoke(asked)["messages"][-1].text
assert "All done" in str(answer), answer
