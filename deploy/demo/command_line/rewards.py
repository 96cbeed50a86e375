"""The reward, read from the last sampled turn; what the scaffold reports is not used."""

import json
from typing import Any

from shop_desk.shop import order_of

from forgemq_contracts.grading import GradingEpisode


def outcome(episode: GradingEpisode) -> float:
    """1 if the last turn's first `answer` command has the right total, else 0."""
    if not episode.completions:
        return 0.0
    answers = [
        command
        for call in episode.completions[-1].message.get("tool_calls") or []
        if (command := command_of(call)).startswith("answer")
    ]
    return float(answers[:1] == [f"answer {order_of(episode.task).total}"])


def command_of(call: dict[str, Any]) -> str:
    """The command of a call of `bash`; "" if it has none."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        return ""
    if call["function"]["name"] != "bash" or not isinstance(arguments, dict):
        return ""
    command = arguments.get("command")
    return command if isinstance(command, str) else ""
