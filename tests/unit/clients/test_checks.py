"""What the tests of clients let pass, and what fails them."""

from typing import Any

import msgspec
import pytest

from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import FinishedCompletion, TurnPart, WeightSpan
from tests.clients.bench import ASKED_AGAIN, ON_KAFKA, Client, Mode, Outcome
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


def turns(client: Client, *, failure: str = "") -> Outcome:
    """An outcome of the client's whole task, whose second turn was sampled twice."""
    records = [_record(number) for number in range(len(client.steps))]
    failed = [_lost(failure)] if failure else []
    return Outcome(
        exit_code=0,
        output="",
        file="hello",
        records=records,
        prompts={f"r{number}": list(range(2 * number + 1)) for number in range(len(records))},
        samplings=len(records) + 1,
        failed=failed,
        delivered=[record.request_id for record in records],
        model_calls=len(records),
    )


def _record(number: int, **changes: Any) -> Any:
    """A turn with one new token of context and one of output."""
    parent = f"r{number - 1}" if number else None
    record = FinishedCompletion(
        request_id=f"r{number}",
        attempt=0,
        episode_id="e",
        group_id="g",
        lane=0,
        epoch=1,
        finish_reason="stop",
        turn=TurnPart(sequence=number, protocol="chat_completions", body_digest="d"),
        parent_id=parent,
        shared_prefix_tokens=2 * number,
        context=pack_ids([2 * number]),
        output=pack_ids([2 * number + 1]),
        logprobs=pack_floats([-0.5]),
        spans=(WeightSpan(start=0, end=1, lineage=0, version=0),),
    )
    empty = {"output": b"", "logprobs": b"", "spans": ()} if "error" in changes else {}
    return msgspec.structs.replace(record, **empty, **changes)


PLAIN = CLIENTS[0]


@pytest.mark.parametrize("mode", ON_KAFKA)
def test_a_turn_that_was_sampled_again_and_delivered_once_passes(mode: Mode) -> None:
    failure = "engine" if mode == "engine_killed" else ""
    assert_passed(PLAIN, mode, turns(PLAIN, failure=failure))


@pytest.mark.parametrize(
    ("mode", "retries", "is_passed"),
    [
        ("inference_killed", 1, True),
        ("inference_killed", 2, False),
        ("engine_killed", 1, False),
    ],
)
def test_a_client_may_ask_once_more_if_inference_is_killed_and_never_if_an_engine_is(
    mode: Mode, retries: int, is_passed: bool
) -> None:
    outcome = turns(PLAIN)
    changed = msgspec.structs.replace(outcome, model_calls=outcome.model_calls + retries)
    assert passes(PLAIN, mode, **msgspec.structs.asdict(changed)) == is_passed


@pytest.mark.parametrize("mode", ON_KAFKA)
@pytest.mark.parametrize(
    "changes",
    [
        {"delivered": ["r0", "r1", "r1", "r2"]},
        {"delivered": ["r0", "r1"]},
        {"samplings": 3},
        {"prompts": {"r0": [0], "r1": [0, 9, 2], "r2": [0, 1, 2, 3, 4]}},
    ],
    ids=["twice", "never", "not_killed", "another_prefix"],
)
def test_a_turn_that_is_not_delivered_once_on_an_exact_path_fails(
    mode: Mode, changes: dict[str, Any]
) -> None:
    outcome = msgspec.structs.replace(turns(PLAIN), **changes)
    assert not passes(PLAIN, mode, **msgspec.structs.asdict(outcome))


def test_only_an_engine_may_fail_an_attempt() -> None:
    failed = msgspec.structs.asdict(turns(PLAIN, failure="engine"))
    assert passes(PLAIN, "engine_killed", **failed)
    assert not passes(PLAIN, "inference_killed", **failed)
    assert not passes(PLAIN, "engine_killed", **{**failed, "failed": [_lost("deadline")]})


def _lost(failure: str) -> Any:
    return _record(1, finish_reason="error", failure=failure, error="gone")
