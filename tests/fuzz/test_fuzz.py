"""The fuzzer finds what is wrong in an answer, and nothing in those of a gateway."""

import asyncio
from pathlib import Path

import pytest

from tests.fuzz.answers import PROTOCOLS, Answered, defect, request_id
from tests.fuzz.serving import fuzz
from tests.unit.rendering.folders import write_model_folder

CHAT, MESSAGES, RESPONSES, _ = PROTOCOLS


@pytest.mark.parametrize(
    ("answered", "found"),
    [
        (Answered(status=200, is_stream=False, text='{"id": "chatcmpl-1"}'), ""),
        (Answered(status=200, is_stream=False, text='{"id": ""}'), "an answer without its id"),
        (Answered(status=200, is_stream=False, text='{"id": "chatcmpl-1"'), "200 without JSON"),
        (Answered(status=500, is_stream=False, text="{}"), "500: "),
        (Answered(status=503, is_stream=False, text='{"error": {"message": "m"}}'), "503: "),
        (Answered(status=400, is_stream=False, text='{"detail": "d"}'), "400 without an error"),
        (
            Answered(
                status=400, is_stream=False, text='{"error": {"message": "m", "type": "t_error"}}'
            ),
            "",
        ),
        (Answered(status=200, is_stream=True, text="data: {}\n\ndata: [DONE]\n\n"), ""),
        (Answered(status=200, is_stream=True, text="data: {}\n\n"), "a stream that ends with"),
    ],
)
def test_an_answer_that_no_client_may_get_is_a_defect(answered: Answered, found: str) -> None:
    said = defect(CHAT, answered)
    assert said.startswith(found)
    assert bool(said) == bool(found)


def test_the_turn_of_a_stream_is_that_of_its_first_event_with_an_id() -> None:
    text = 'data: {"type": "ping"}\n\ndata: {"type": "message_start", "message": {"id": "msg_r7"}}'
    assert request_id(MESSAGES, Answered(status=200, is_stream=True, text=text)) == "r7"
    text = 'data: {"type": "response.created", "response": {"id": "resp_r8"}}'
    assert request_id(RESPONSES, Answered(status=200, is_stream=True, text=text)) == "r8"


@pytest.mark.slow
def test_a_gateway_answers_fuzzed_bodies_of_every_protocol_and_loses_no_turn(
    tmp_path: Path,
) -> None:
    model = write_model_folder(tmp_path / "model")
    found = asyncio.run(fuzz(model, first=0, count=2_000))
    assert found.defects == []
    assert sum(found.answers.values()) == 2_000
    assert found.turns > 500
    assert found.answers["400"] > 500
    assert found.answers["cut"] > 20
