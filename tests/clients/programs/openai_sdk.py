"""OpenAI's client with two tools of its own: chat completions or responses, streamed or whole."""

import json
import os
import subprocess
import sys

from openai import OpenAI

API, STREAMS = sys.argv[1], sys.argv[2] == "stream"
TASK = "Write hello into out.txt and show it."
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
client = OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["KEY"], max_retries=4)


def run(arguments: str) -> str:
    command = json.loads(arguments)["command"]
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout or "(nothing)"


def final(stream_of, final_of):
    """The end of a stream; one that broke is asked for once more if the caller is to do that."""
    try:
        with stream_of() as stream:
            return final_of(stream)
    except Exception as broken:  # Of whichever HTTP library the client uses.
        if "ASKS_AGAIN" not in os.environ:
            raise
        sys.stdout.write(f"asked again after {type(broken).__name__}\n")
        with stream_of() as stream:
            return final_of(stream)


def chat() -> str:
    function = {"name": "shell", "description": "run a command", "parameters": PARAMETERS}
    messages: list = [{"role": "user", "content": TASK}]
    while True:
        asked = {
            "model": "m",
            "messages": messages,
            "tools": [{"type": "function", "function": function}],
        }
        if STREAMS:
            message = final(
                lambda asked=asked: client.chat.completions.stream(**asked),
                lambda stream: stream.get_final_completion().choices[0].message,
            )
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = run(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses() -> str:
    tool = {"type": "function", "name": "shell", "parameters": PARAMETERS, "strict": False}
    items: list = [{"role": "user", "content": TASK}]
    while True:
        asked = {"model": "m", "input": items, "tools": [tool]}
        if STREAMS:
            response = final(
                lambda asked=asked: client.responses.stream(**asked),
                lambda stream: stream.get_final_response(),
            )
        else:
            response = client.responses.create(**asked)
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": run(call.arguments),
            }
            for call in calls
        ]


answer = chat() if API == "chat" else responses()
assert "All done" in answer, answer
