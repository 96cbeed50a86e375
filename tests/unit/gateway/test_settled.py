"""What leaves of an answer before it is sampled to its end is the beginning of what it will be.

Outputs are drawn from text of one to four bytes a character, blanks, marks of reasoning and calls,
and stop strings; they are read token by token, and written at random places.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgemq_contracts.arrays import pack_ids
from forgemq_gateway.composer import Composer
from forgemq_gateway.core.replies import Answer, Reply, cut_at
from forgemq_gateway.core.requests import Request, Text, Thinking
from forgemq_gateway.core.settled import before_stops, continues
from forgemq_gateway.protocols import PROTOCOLS
from forgemq_rendering import Rendering
from tests.unit.gateway.scripted_lane import _ended
from tests.unit.rendering.folders import write_model_folder

TOOLS: list[Any] = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "a"}}\n</tool_call>'
WORDS = [
    "a",
    "quick fox",
    "\n",
    "\n\n",
    " ",
    "  \n",
    "\xe9",
    "\u6f22\u5b57",
    "\u3000",
    "\U0001f98a",
    "<",
    "</think",
    "END",
    "EN",
]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<think>\nhm\n</think>\n\n"]
OUTPUTS = st.lists(st.sampled_from(WORDS + MARKS), max_size=12).map("".join)
STOPS = st.sampled_from([(), ("END",), ("\n\n", "x f"), ("\u5b57",)])
IS_OPEN = "<|im_start|>assistant\n<think>\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary has the marks of reasoning, and one that writes them as text."""
    folder = tmp_path_factory.mktemp("settled")
    write_model_folder(folder / "m")
    wordy = write_model_folder(folder / "wordy") / "tokenizer.json"
    tokenizer = json.loads(wordy.read_text())
    added = tokenizer["added_tokens"]
    tokenizer["added_tokens"] = [each for each in added if "think" not in each["content"]]
    wordy.write_text(json.dumps(tokenizer))
    return folder


@lru_cache
def rendering_of(folder: Path, renderer: str) -> Rendering:
    return Rendering.load(str(folder), renderer=renderer)


def answer_of(reply: Reply) -> Answer:
    return Answer(
        request_id="0" * 32,
        created_s=1,
        model="m",
        reply=reply,
        finish_reason="stop",
        context_tokens=3,
        output_tokens=9,
    )


def request(protocol: Any) -> Request:
    return Request(
        protocol=protocol.name, model="m", messages=(), digests=(), body_digest="", asked=b"{}"
    )


def told(data: bytes) -> list[Any]:
    """What a client adds up: the deltas of each part joined, and every other event."""
    added: dict[Any, str] = {}
    for line in data.decode().split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        for where, text in deltas(event):
            added[where] = added.get(where, "") + text
    return sorted((str(where), text) for where, text in added.items() if text)


def deltas(event: Any) -> list[tuple[Any, str]]:
    """The places and texts of one event of any protocol."""
    kind = event.get("type", "")
    if isinstance(event.get("delta"), str):
        return [((kind, event["output_index"]), event["delta"])]
    if kind == "content_block_delta":
        return [
            ((event["index"], key), text) for key, text in event["delta"].items() if key != "type"
        ]
    found = []
    for choice in event.get("choices", ()):
        whole = {**choice.get("delta", {}), "text": choice.get("text", "")}
        found += [(key, str(value)) for key, value in whole.items() if key != "role"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "renderer"), [("m", "auto"), ("m", "qwen3"), ("wordy", "auto")])
@settings(max_examples=25, deadline=None)
@given(
    text=OUTPUTS,
    stops=STOPS,
    tools=st.sampled_from([None, (), TOOLS]),
    is_open=st.booleans(),
    cuts=st.sets(st.integers(0, 40), max_size=8),
)
def test_what_is_written_at_any_tokens_adds_up_to_the_recorded_answer(
    folder: Path,
    name: str,
    renderer: str,
    text: str,
    stops: Any,
    tools: Any,
    is_open: bool,
    cuts: set[int],
) -> None:
    rendering = rendering_of(folder / name, renderer)
    composer = Composer({"append_only": rendering}, context_tokens_max=4096)
    stop, ends = _ended(text, stops)
    ids = rendering.encode(text[:ends])
    context = pack_ids(rendering.encode(IS_OPEN)) if is_open else b""
    whole = cut_at(composer.parse(pack_ids(ids), "r", tools, context), stop)
    streams = [protocol.stream(request(protocol)) for protocol in PROTOCOLS]
    data, written = [b"" for _ in streams], Reply()
    for count in range(len(ids) + 1):
        begun = composer.begun(pack_ids(ids[:count]), "r", tools, context, stops=stops)
        assert continues(whole, begun), (begun, whole)
        if count in cuts and continues(begun, written) and begun != written:
            written = begun
            for place, stream in enumerate(streams):
                data[place] += stream.more(answer_of(begun))
    for protocol, stream, before in zip(PROTOCOLS, streams, data, strict=True):
        recorded = protocol.stream(request(protocol)).finish([answer_of(whole)])
        assert told(before + stream.finish([answer_of(whole)])) == told(recorded)


@pytest.mark.parametrize(
    ("renderer", "texts", "is_open"),
    [
        ("qwen3", ["good \n", "\u3000"], False),  # A blank of three bytes ends the text.
        ("auto", ["so <|im_", "start|> is"], False),  # A control token's text, written as text.
        ("qwen3", ["<|im_start|>", "assistant\nhm"], True),  # Its own turn's head once more.
    ],
)
def test_nothing_leaves_that_the_next_tokens_change(
    folder: Path, renderer: str, texts: list[str], is_open: bool
) -> None:
    rendering = rendering_of(folder / "m", renderer)
    composer = Composer({"append_only": rendering}, context_tokens_max=4096)
    context = pack_ids(rendering.encode(IS_OPEN)) if is_open else b""
    ids = [token for text in texts for token in rendering.encode(text, is_start=False)]
    whole = composer.parse(pack_ids(ids), "r", (), context)
    assert whole.parts
    for count in range(len(ids)):
        begun = composer.begun(pack_ids(ids[:count]), "r", (), context, stops=())
        assert continues(whole, begun), (begun, whole)


@pytest.mark.parametrize("renderer", ["auto", "qwen3"])
def test_text_and_reasoning_leave_before_the_output_ends(folder: Path, renderer: str) -> None:
    rendering = rendering_of(folder / "m", renderer)
    composer = Composer({"append_only": rendering}, context_tokens_max=4096)
    ids = rendering.encode("<think>\nhm\n</think>\n\ngood d")
    plain = rendering.encode("good d")

    def begun(tokens: list[int], tools: Any) -> Any:
        return composer.begun(pack_ids(tokens), "r", tools, b"", stops=("END",)).parts

    blanks = "\n\n" if renderer == "auto" else ""
    for tools in ((), TOOLS):
        assert begun(ids, tools) == (Thinking("hm"), Text(f"{blanks}good d"))
        assert begun(plain, tools) == (Text("good d"),)
    assert begun(plain, None) == (Text("good d"),)


@pytest.mark.parametrize(
    ("text", "before"),
    [("a EN", "a "), ("a END b", "a "), ("a ENx", "a ENx"), ("E", ""), ("", "")],
)
def test_the_beginning_of_a_stop_string_is_held_back(text: str, before: str) -> None:
    assert before_stops(text, ("END",)) == before
