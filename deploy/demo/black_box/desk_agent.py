"""A program over the OpenAI Agents SDK: the model is at OPENAI_BASE_URL, as with any provider.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python -m black_box.desk_agent task.json result.json
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    StopAtTools,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from agents.tool_context import ToolContext
from openai import AsyncOpenAI, BadRequestError
from shop_desk.calls import BAD_CALL, TOOLS, call_of, reply_to
from shop_desk.environment import TURNS_MAX
from shop_desk.shop import Order, order_of

CONTEXTS_MAX = 3


async def serve(order: Order) -> dict[str, Any]:
    """Serve one customer; returns the agent's result.

    A note ends a run of the SDK's loop; the next run starts with the notes.
    """
    model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI(max_retries=8))
    agent = Agent(
        name="shop desk",
        model=model,
        model_settings=ModelSettings(parallel_tool_calls=True),
        tools=[_tool(tool["function"], order) for tool in TOOLS],
        tool_use_behavior=StopAtTools(stop_at_tool_names=["note"]),
    )
    notes: list[str] = []
    for _ in range(CONTEXTS_MAX):
        question = order.question + (f"\nNotes: {', '.join(notes)}" if notes else "")
        try:
            run = await Runner.run(agent, question, max_turns=TURNS_MAX)
        except MaxTurnsExceeded:
            return {"end": "too many turns"}
        except ModelBehaviorError as error:
            return {"end": "bad call", "detail": str(error)}
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return {"end": "context full"}
        if not isinstance(run.final_output, Noted):
            return {"end": "answered", "answer": str(run.final_output)}
        notes.append(run.final_output)
    return {"end": "too many notes"}


class Noted(str):
    """A tool result that ends the SDK's loop; its text is the note."""

    __slots__ = ()


def _tool(function: dict[str, Any], order: Order) -> FunctionTool:
    name = function["name"]

    async def invoke(_: ToolContext[Any], arguments: str) -> str:
        try:
            call = call_of(name, json.loads(arguments))
        except ValueError:
            return BAD_CALL
        if call is not None and call.name == "note":
            return Noted(call.argument)
        return reply_to(call, order)

    return FunctionTool(
        name=name,
        description=function["description"],
        params_json_schema=function["parameters"],
        on_invoke_tool=invoke,
        strict_json_schema=False,
    )


def main(task_file: str, result_file: str) -> None:
    """Serve the customer of a task file and leave the result."""
    set_tracing_disabled(disabled=True)
    result = asyncio.run(serve(order_of(json.loads(Path(task_file).read_text()))))
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
