"""Prints the requests of a group or an episode as the log has them: whole, one in each line."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.messages import Message
from forgemq_launcher.display.lines import say_json
from forgemq_launcher.records.sent_replies import sent_reply
from forgemq_rendering import Rendering
from forgemq_run_view.sent_requests import Tool, sent_requests
from forgemq_run_view.trajectory import chosen


def print_requests(
    messages: Iterable[Message],
    console: Console,
    *,
    model_path: str,
    is_meant: Callable[[str], bool],
) -> None:
    """Print messages, tools, token ids and cuts of each request of the episodes that are meant."""
    rendering = Rendering.load(model_path)

    def read_reply(
        completion: FinishedCompletion, context: Sequence[int], tools: Sequence[Tool]
    ) -> Mapping[str, Any]:
        return sent_reply(completion, rendering=rendering, context=context, tools=tools)

    for request in sent_requests(chosen(messages), read_reply=read_reply):
        if is_meant(request.episode_id):
            say_json(console, request)
