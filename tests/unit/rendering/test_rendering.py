"""Messages to tokens and back, for an opaque template and for a hand-written renderer."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgemq_rendering import Parsed, Rendering, ToolCall
from tests.unit.rendering.folders import REWRITING_TEMPLATE, write_model_folder

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "find things",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]
ID = "0123456789abcdef0123456789abcdef"
HEAD: list[dict[str, Any]] = [
    {"role": "system", "content": "you sell shoes"},
    {"role": "user", "content": "hello"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "opaque": write_model_folder(root / "opaque"),
        "qwen3": write_model_folder(root / "qwen3", name="Qwen/Qwen3-4B"),
        "rewriting": write_model_folder(root / "rewriting", template=REWRITING_TEMPLATE),
    }


@pytest.fixture(scope="module", params=["opaque", "qwen3"])
def rendering(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Rendering:
    return Rendering.load(str(folders[request.param]))


def encoded(rendering: Rendering, text: str) -> list[int]:
    return rendering._tokenizer.encode(text)


def test_a_published_name_gets_its_own_renderer_and_any_other_the_template(
    folders: dict[str, Path],
) -> None:
    assert Rendering.load(str(folders["opaque"])).name == "DefaultRenderer"
    assert Rendering.load(str(folders["qwen3"])).name == "Qwen3Renderer"
    assert Rendering.load(str(folders["opaque"]), renderer="qwen3").name == "Qwen3Renderer"


def test_an_unknown_renderer_is_refused_by_name(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="qwen99"):
        Rendering.load(str(folders["opaque"]), renderer="qwen99")


def test_a_folder_without_fast_tokenizer_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        Rendering.load(str(tmp_path))


def test_message_ends_are_where_the_rendering_of_the_messages_so_far_ends(
    rendering: Rendering,
) -> None:
    rendered = rendering.render(HEAD)
    assert len(rendered.message_ends) == 2
    first, second = rendered.message_ends
    assert rendering.decode(rendered.ids[:first]).endswith("you sell shoes<|im_end|>\n")
    assert rendering.decode(rendered.ids[first:second]).endswith("hello<|im_end|>\n")
    assert rendering.decode(rendered.ids[second:]) == "<|im_start|>assistant\n"


def test_an_extension_is_what_a_full_rendering_has_behind_the_turn(rendering: Rendering) -> None:
    context = rendering.render(HEAD, tools=TOOLS).ids
    output = encoded(rendering, "good day<|im_end|>")
    new = [{"role": "user", "content": "the price?"}]
    extension = rendering.extend(context, output, new, tools=TOOLS)
    assert extension is not None
    whole = rendering.render(
        [*HEAD, {"role": "assistant", "content": "good day"}, *new], tools=TOOLS
    )
    assert rendering.decode([*context, *output, *extension.ids]) == rendering.decode(whole.ids)


def test_a_cut_turn_is_closed_before_the_next_message(rendering: Rendering) -> None:
    context = rendering.render(HEAD).ids
    extension = rendering.extend(
        context, encoded(rendering, "good da"), [{"role": "user", "content": "go on"}]
    )
    assert extension is not None
    text = rendering.decode(extension.ids)
    assert text == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_new_assistant_messages_are_never_an_extension(rendering: Rendering) -> None:
    context = rendering.render(HEAD).ids
    new = [{"role": "assistant", "content": "invented"}, {"role": "user", "content": "x"}]
    assert rendering.extend(context, encoded(rendering, "a<|im_end|>"), new) is None


def test_a_template_that_rewrites_its_head_is_never_extended(folders: dict[str, Path]) -> None:
    rendering = Rendering.load(str(folders["rewriting"]))
    context = rendering.render(HEAD).ids
    output = encoded(rendering, "good day<|im_end|>")
    assert rendering.extend(context, output, [{"role": "user", "content": "x"}]) is None


@pytest.mark.parametrize("folder", ["opaque", "qwen3"])
def test_the_template_policy_renders_the_history_again(
    folders: dict[str, Path], folder: str
) -> None:
    rendering = Rendering.load(str(folders[folder]), history="template")
    context = rendering.render(HEAD).ids
    output = encoded(rendering, "good day<|im_end|>")
    assert rendering.extend(context, output, [{"role": "user", "content": "x"}]) is None


words = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=20)
news = st.one_of(
    st.builds(lambda text: [{"role": "user", "content": text}], words),
    st.lists(
        st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": text}, words),
        min_size=1,
        max_size=3,
    ),
)


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.lists(st.integers(3, 400), max_size=12), st.booleans(), news),
        min_size=1,
        max_size=4,
    )
)
def test_sampled_ids_stay_an_exact_prefix_over_any_number_of_turns(
    rendering: Rendering, turns: list[tuple[list[int], bool, list[dict[str, Any]]]]
) -> None:
    """Whatever ids were sampled, closed or cut: the next context starts with exactly them."""
    stop = rendering.stop_token_ids[0]
    ids = rendering.render(HEAD, tools=TOOLS).ids
    for sampled, is_closed, new in turns:
        output = [*sampled, stop] if is_closed or not sampled else sampled
        extension = rendering.extend(ids, output, new, tools=TOOLS)
        if extension is None:  # Open reasoning that was stopped: renderers refuse to extend it.
            return
        ids = [*ids, *output, *extension.ids]
        assert rendering.decode(ids).endswith("<|im_start|>assistant\n")


def test_calls_are_parsed_with_unique_ids_and_json_arguments(rendering: Rendering) -> None:
    output = encoded(
        rendering,
        'let me see<tool_call>\n{"name": "find", "arguments": {"query": "a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call><|im_end|>',
    )
    parsed = rendering.parse(output, completion_id=ID, tools=TOOLS)
    assert parsed.content == "let me see"
    assert [(call.id, call.name, call.arguments) for call in parsed.tool_calls] == [
        (f"call_{ID}_0", "find", '{"query":"a"}'),
        (f"call_{ID}_1", "find", "{}"),
    ]
    assert parsed.malformed == 0
    assert len(parsed.tool_calls[1].id) <= 40


def test_a_malformed_call_is_counted_and_stays_text(rendering: Rendering) -> None:
    output = encoded(rendering, "hm<tool_call>\n{bad\n</tool_call><|im_end|>")
    parsed = rendering.parse(output, completion_id=ID, tools=TOOLS)
    assert parsed.tool_calls == ()
    assert parsed.malformed == 1
    assert parsed.content == "hm\n<tool_call>\n{bad\n</tool_call>"


def test_without_tools_markup_is_text(rendering: Rendering) -> None:
    output = encoded(rendering, '<tool_call>\n{"name": "find"}\n</tool_call><|im_end|>')
    parsed = rendering.parse(output, completion_id=ID)
    assert parsed.content == '<tool_call>\n{"name": "find"}\n</tool_call>'
    assert parsed.tool_calls == ()


def test_an_output_without_a_template_is_text_up_to_the_token_that_ended_it(
    rendering: Rendering,
) -> None:
    text = "<think>\nwhy not\n</think>\n\n yes \n"
    parsed = rendering.parse(encoded(rendering, text + "<|im_end|>"), completion_id=ID, tools=None)
    assert parsed == Parsed(content=text)


@pytest.mark.parametrize(
    ("stop", "reasoning", "content", "calls"),
    [
        ("", "a b", "c d", 1),
        ("e", "a b", "c d", 1),
        (" d", "a b", "c", 0),
        ("c", "a b", "", 0),
        (" b", "a", "", 0),
    ],
)
def test_a_message_ends_before_the_stop_string_wherever_it_stands(
    stop: str, reasoning: str, content: str, calls: int
) -> None:
    call = ToolCall(id="1", name="find", arguments="{}")
    cut = Parsed(content="c d", reasoning="a b", tool_calls=(call,), malformed=1).up_to(stop)
    assert (cut.reasoning, cut.content, len(cut.tool_calls)) == (reasoning, content, calls)
    assert cut.malformed == 1


def test_reasoning_is_separate_from_content(rendering: Rendering) -> None:
    output = encoded(rendering, "<think>\nwhy not\n</think>\n\nyes<|im_end|>")
    parsed = rendering.parse(output, completion_id=ID, tools=TOOLS)
    assert parsed.reasoning == "why not"
    assert parsed.content.strip() == "yes"


def test_brackets_nested_too_deep_to_parse_are_text(rendering: Rendering) -> None:
    text = "<tool_call>" + "[" * 5000 + "</tool_call>"
    parsed = rendering.parse(encoded(rendering, text), completion_id=ID, tools=TOOLS)
    assert parsed.malformed == 1
    assert parsed.tool_calls == ()
    assert parsed.content == text


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "find", "arguments": {"query": "\\ud800"}}',
        '{"name": "find", "arguments": {"\\udfff": 1}}',
        '{"name": "f\\ud800", "arguments": {}}',
        '{"name": "find", "arguments": "\\ud800"}',
        '{"name": "find", "arguments": "no JSON"}',
        '{"name": "find", "arguments": {"limit": ' + "9" * 5000 + "}}",
        '{"name": ["find"], "arguments": {}}',
        '[{"name": "find"}]',
    ],
    ids=lambda call: call[:44],
)
def test_a_call_that_no_client_can_be_given_is_malformed_and_stays_text(
    rendering: Rendering, call: str
) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>"
    parsed = rendering.parse(encoded(rendering, text), completion_id=ID, tools=TOOLS)
    assert (parsed.tool_calls, parsed.malformed) == ((), 1)
    assert parsed.content == text


fragments = st.sampled_from(
    [
        *("<tool_call>\n", "\n</tool_call>", "<think>", "</think>", "<|im_end|>"),
        *('{"name": ', '"find"', ', "arguments": ', "{}", '{"query": ', '"\\ud800"', '"\\udc00a"'),
        *("9" * 5000, "1e999", "NaN", "[" * 3000, "}", "]", "null", '"', "\\"),
        *("<function=find>", "<parameter=query>", "</parameter>", "</function>"),
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(
        st.one_of(fragments, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8)), max_size=12
    ),
    has_tools=st.booleans(),
)
def test_any_ids_are_a_message_that_can_be_encoded(
    rendering: Rendering, pieces: list[str | list[int]], has_tools: bool
) -> None:
    ids = [
        token_id
        for piece in pieces
        for token_id in (encoded(rendering, piece) if isinstance(piece, str) else piece)
    ]
    parsed = rendering.parse(ids, completion_id=ID, tools=TOOLS if has_tools else ())
    assert parsed.content.encode().decode() == parsed.content
    assert parsed.reasoning.encode().decode() == parsed.reasoning
    for call in parsed.tool_calls:
        assert call.name.encode().decode() == call.name
        msgspec.json.decode(call.arguments.encode())


@pytest.mark.parametrize(
    "arguments", ['{"query": "\\ud800"}', "[" * 20_000 + "]" * 20_000], ids=["surrogate", "deep"]
)
def test_what_cannot_be_rendered_is_a_value_error(folders: dict[str, Path], arguments: str) -> None:
    rendering = Rendering.load(str(folders["opaque"]))
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    messages = [*HEAD, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(ValueError, match="the messages cannot be rendered"):
        rendering.render(messages, tools=TOOLS)


def test_systems_at_the_head_are_one_and_later_ones_are_user_turns(rendering: Rendering) -> None:
    rendered = rendering.render(
        [
            {"role": "developer", "content": "one"},
            {"role": "system", "content": [{"type": "text", "text": "two"}]},
            {"role": "user", "content": None},
            {"role": "system", "content": "three"},
        ]
    )
    assert rendering.decode(rendered.ids) == (
        "<|im_start|>system\none\n\ntwo<|im_end|>\n<|im_start|>user\n<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_a_function_answered_is_read_as_a_tools_result(rendering: Rendering) -> None:
    result = {"role": "function", "name": "find", "content": "3 shoes"}
    rendered = rendering.render([*HEAD, result])
    assert rendered == rendering.render([*HEAD, {**result, "role": "tool"}])
    assert "<tool_response>\n3 shoes\n</tool_response>" in rendering.decode(rendered.ids)


@pytest.mark.slow
def test_importing_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, forgemq_rendering;"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'sglang')))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=50, check=False).returncode == 0


def test_long_texts_have_the_ids_of_their_parts(rendering: Rendering) -> None:
    """Long texts take another call of the tokenizer than short ones."""
    part = "<|im_start|>user\nthe price<|im_end|>\n"
    assert encoded(rendering, part * 400) == encoded(rendering, part) * 400
