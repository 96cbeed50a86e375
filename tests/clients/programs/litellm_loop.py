"""litellm: a loop of completions with one tool, over chat completions or messages.

Its lock adds mcp, which litellm imports if a call has tools, and tenacity, which it needs to ask
again; neither is a dependency of its package.
"""

import json
import os
import subprocess
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # No download of prices.
import litellm

API, STREAMS = sys.argv[1], sys.argv[2] == "stream"
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
messages: list = [{"role": "user", "content": "Write hello into out.txt and show it."}]
while True:
    answer = litellm.completion(
        model="anthropic/m" if API == "messages" else "openai/m",
        base_url=os.environ["BASE_URL"],
        api_key=os.environ["KEY"],
        messages=messages,
        tools=[TOOL],
        stream=STREAMS,
        num_retries=4,
    )
    if STREAMS:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        command = json.loads(call.function.arguments)["command"]
        ran = subprocess.run(command, shell=True, capture_output=True, text=True)
        content = ran.stdout or "(nothing)"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
assert "All done" in message.content, message.content
