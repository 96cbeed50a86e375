"""What the tests of clients let pass, and what fails them."""

from typing import Any

import msgspec
import pytest

from tests.clients.bench import ASKED_AGAIN, Client, Mode, Outcome
from tests.clients.checks import assert_passed
from tests.clients.test_coding_agents import CLAUDE_CODE, CODEX
from tests.clients.test_libraries import CLIENTS
from tests.clients.test_scaffolds import AIDER, CLINE, MINI_SWE_AGENT, OPENCODE, QWEN_CODE

ALL = (*CLIENTS, CLAUDE_CODE, CODEX, AIDER, CLINE, MINI_SWE_AGENT, OPENCODE, QWEN_CODE)


def passes(client: Client, mode: Mode, **changes: Any) -> bool:
    """Whether this outcome without records passes."""
    outcome = Outcome(exit_code=1, output="", file="", records=[], prompts={}, samplings=0)
    try:
        assert_passed(client, mode, msgspec.structs.replace(outcome, **changes))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("client", ALL, ids=lambda client: f"{client.name}-{client.protocol}")
def test_a_client_that_ends_when_the_gateway_is_killed_before_its_answer_begins_fails(
    client: Client,
) -> None:
    assert not passes(client, "killed")


def test_only_streams_may_end_if_their_gateway_is_killed_behind_a_keep_alive() -> None:
    """Those of the SDKs may not: their programs ask again."""
    may_end = {client.name for client in CLIENTS if passes(client, "killed_late")}
    assert may_end == {"litellm (Python, stream)", "openai-agents (Python, stream)"}


@pytest.mark.parametrize(
    ("output", "samplings", "problem"),
    [("one", 0, "did not break"), (ASKED_AGAIN, 1, "sampled twice")],
)
def test_a_stream_that_did_not_break_fails_and_so_does_a_turn_that_was_sampled_twice(
    output: str, samplings: int, problem: str
) -> None:
    """The first was not killed in time and has shown nothing; the second has one record too few."""
    done = Outcome(
        exit_code=0, output=output, file="hello", records=[], prompts={}, samplings=samplings
    )
    asks_again = next(client for client in CLIENTS if client.asks_again)
    with pytest.raises(AssertionError, match=problem):
        assert_passed(asks_again, "killed_late", done)
