"""Graders see the message that the agent received, whatever it asked and its protocol."""

from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_rendering import Rendering
from forgemq_rendering.tokenizer import FolderTokenizer
from forgemq_reward.core.pending import PendingEpisodes
from forgemq_reward.transcript import grading_episode
from tests.unit.reward.records import finished_completion, finished_episode

MODEL = Path("deploy/demo/model")
CALL = '<tool_call>\n{"name": "price", "arguments": {}}\n</tool_call>'
TOOLS = b'[{"type":"function","function":{"name":"price","parameters":{"type":"object"}}}]'
TEXT = {"role": "assistant", "content": CALL}


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering.load(str(MODEL))


def message_of(rendering: Rendering, output: str, *, stop: str = "", **turn) -> dict:
    """The message of a completion that ended with this output."""
    ids = FolderTokenizer(MODEL).encode(output)
    made = finished_completion(0, 0, tools=TOOLS)
    made = msgspec.structs.replace(
        made,
        output=pack_ids(ids),
        logprobs=pack_floats([-0.5] * len(ids)),
        stop_string=stop,
        turn=msgspec.structs.replace(made.turn, **turn),
    )
    pending, episode = PendingEpisodes(), finished_episode(0, task=b"{}")
    pending.on_completion(made, offset=0)
    held = pending.completions_of(episode)
    return grading_episode(episode, held, rendering=rendering).completions[0].message


def test_a_call_is_read_if_the_policy_could_make_one(rendering: Rendering) -> None:
    message = message_of(rendering, CALL + "<|im_end|>")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["price"]


@pytest.mark.parametrize("choice", ['"none"', '{"type": "none"}'])
def test_a_call_stays_text_if_the_agent_chose_no_tools(rendering: Rendering, choice: str) -> None:
    asked = f'{{"tool_choice":{choice}}}'.encode()
    assert message_of(rendering, CALL + "<|im_end|>", asked=asked) == TEXT


def test_the_output_of_a_prompt_without_a_template_is_text_as_it_stands(
    rendering: Rendering,
) -> None:
    output = "<think>\nwhy\n</think>\n\nyes\n"
    message = message_of(rendering, output, protocol="completions")
    assert message == {"role": "assistant", "content": output}


def test_a_message_ends_before_its_stop_string(rendering: Rendering) -> None:
    assert message_of(rendering, "one STOP", stop=" STOP")["content"] == "one"
    assert message_of(rendering, "one STOP")["content"] == "one STOP"
