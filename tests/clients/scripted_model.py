"""A model that works through a task by script, deciding from the decoded prompt alone."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

SIDE_ANSWER = "A task"  # To a prompt that is no step of the task, as one that asks for a title.


class Call(Struct, frozen=True):
    """A tool call that the model makes."""

    name: str
    arguments: dict[str, Any]


class Step(Struct, frozen=True):
    """One turn of the task: text, and the calls behind it."""

    text: str
    calls: tuple[Call, ...] = ()


def tool_results(prompt: str) -> int:
    return prompt.count("<tool_response>")


def has_tools(prompt: str) -> bool:
    return "<tools>" in prompt


def plain_text(step: Step) -> str:
    """The step in the model's own form of a call."""
    calls = "".join(
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
        for call in step.calls
    )
    return step.text + calls


def odd_text(step: Step) -> str:
    """The step with reasoning, padded text, and arguments that no serialiser writes like this."""
    calls = "".join(
        f'<tool_call>\n{{"name":  "{call.name}", '
        f'"arguments": {json.dumps(call.arguments, indent=3)} }}\n</tool_call>'
        for call in step.calls
    )
    return f"<think>\n I should do  this. \n</think>\n\n  {step.text} \n\n{calls}"


class ScriptedModel:
    """Answers a prompt with the step that its number of tool results asks for.

    Args:
        steps: The turns of the task; the last one makes no call.
        written: How a step is written.
        before: Awaited before the answer, with the number of the step.
        is_step: Whether a prompt is one of the task.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        written: Callable[[Step], str] = plain_text,
        is_step: Callable[[str], bool] = has_tools,
        done: Callable[[str], int] = tool_results,
    ) -> None:
        self.steps = steps
        self.hold_at: int | None = None
        self.reached, self.released = asyncio.Event(), asyncio.Event()
        self._written, self._is_step, self._done = written, is_step, done

    async def __call__(self, prompt: str) -> str:
        if not self._is_step(prompt):
            return SIDE_ANSWER
        index, done = 0, self._done(prompt)
        while done > 0 and index < len(self.steps) - 1:
            done -= max(1, len(self.steps[index].calls))
            index += 1
        if index == self.hold_at:
            self.reached.set()
            await self.released.wait()
        return self._written(self.steps[index])
