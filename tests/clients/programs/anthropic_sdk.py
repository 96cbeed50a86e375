"""Anthropic's client with a tool of its own, streamed or whole."""

import os
import subprocess
import sys

from anthropic import Anthropic

STREAMS = sys.argv[2] == "stream"
TOOL = {
    "name": "shell",
    "description": "run a command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
client = Anthropic(base_url=os.environ["BASE_URL"], api_key=os.environ["KEY"], max_retries=4)


def streamed(asked: dict):
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


messages: list = [{"role": "user", "content": "Write hello into out.txt and show it."}]
while True:
    asked = {"model": "m", "max_tokens": 1000, "messages": messages, "tools": [TOOL]}
    assert client.messages.count_tokens(model="m", messages=messages, tools=[TOOL]).input_tokens > 0
    if STREAMS:
        try:
            message = streamed(asked)
        except Exception as broken:  # Of whichever HTTP library the client uses.
            if "ASKS_AGAIN" not in os.environ:
                raise
            sys.stdout.write(f"asked again after {type(broken).__name__}\n")
            message = streamed(asked)
    else:
        message = client.messages.create(**asked)
    messages.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    if not calls:
        break
    results = []
    for call in calls:
        ran = subprocess.run(call.input["command"], shell=True, capture_output=True, text=True)
        content = ran.stdout or "(nothing)"
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": content})
    messages.append({"role": "user", "content": results})
answer = "".join(block.text for block in message.content if block.type == "text")
assert "All done" in answer, answer
