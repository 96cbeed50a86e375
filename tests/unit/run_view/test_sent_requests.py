"""What an agent sent, rebuilt from the records of its completions."""

import pytest

from forgemq_run_view.sent_requests import sent_requests
from tests.unit.episode_files.played import PARTS, TOOL, TOOLS, A, B, completion, json


@pytest.mark.parametrize(
    ("asked", "callable_names"),
    [
        (b"", ["look"]),
        (b'{"tool_choice":"auto"}', ["look"]),
        (b'{"tool_choice":"none"}', []),
        (b'{"tool_choice":{"type": "none"}}', []),
    ],
)
def test_a_reply_is_read_with_the_tools_that_its_client_let_the_policy_call(
    asked: bytes, callable_names: list[str]
) -> None:
    given: list[str] = []

    def read_reply(_, __, tools):
        given.extend(tool["function"]["name"] for tool in tools)
        return {"role": "assistant", "content": "Yes."}

    turn = {"messages": json(PARTS), "tools": TOOLS.encode(), "tools_digest": "t", "asked": asked}
    first = completion(A, episode="g.0.0", sequence=0, turn=turn)
    second = completion(
        B,
        episode="g.0.0",
        sequence=1,
        parent_id=A,
        shared_prefix_tokens=6,
        turn={"messages": json(TOOL), "tools_digest": "t"},
    )
    requests = sent_requests({A: first, B: second}, read_reply=read_reply)
    assert given == callable_names
    assert [len(request.messages) for request in requests] == [1, 3]
    assert [len(request.tools) for request in requests] == [1, 1], "as the agent sent them"
