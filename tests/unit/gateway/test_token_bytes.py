"""The bytes beside a log-probability: of all tokens together, those of the text."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from forgemq_rendering.token_bytes import TokenBytes
from tests.unit.gateway.talk import talk

SAID = "caf\u00e9 \U0001f600 \u6f22"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_bytes_of_tokens_that_are_parts_of_a_character_join_to_the_text(model: Path) -> None:
    async with talk(model, lambda _: SAID) as agent:
        chat = await agent.openai.chat.completions.create(
            model="m", messages=HELLO, logprobs=True, top_logprobs=2
        )
        response = await agent.openai.responses.create(
            model="m", input="hello", include=["message.output_text.logprobs"]
        )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    parts = [token for token in content if token.token == "\ufffd"]
    assert len(parts) > 4, "the tokenizer has no token for these characters"
    assert b"".join(bytes(token.bytes or ()) for token in content) == f"{SAID}<|im_end|>".encode()
    assert [token.top_logprobs[0].bytes for token in content] == [token.bytes for token in content]
    text: Any = response.output[0]
    assert [each.bytes for each in text.content[0].logprobs] == [each.bytes for each in content]


async def test_a_part_of_a_character_begins_where_the_character_does(model: Path) -> None:
    async with talk(model, lambda _: SAID) as agent:
        answer = await agent.openai.completions.create(
            model="m", prompt="hello", logprobs=0, max_tokens=100
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    offsets, tokens = logprobs.text_offset or [], logprobs.tokens or []
    parts = {SAID[at] for at, token in zip(offsets, tokens, strict=True) if token == "\ufffd"}
    assert parts == {"\u00e9", "\U0001f600", "\u6f22"}
    assert all(
        SAID.startswith(token, at)
        for at, token in zip(offsets[:-1], tokens, strict=False)
        if "\ufffd" not in token
    )
    assert offsets[-1] == len(SAID)


@pytest.mark.parametrize(
    ("token", "text", "data"), [("y", "y", b"y"), ("<0xE6>", "\ufffd", None), ("", "\ufffd", None)]
)
def test_a_vocabulary_of_another_kind_does_not_say_which_part_of_a_character_it_is(
    token: str, text: str, data: bytes | None
) -> None:
    tokenizer = Tokenizer(models.WordLevel({"y": 0, "<0xE6>": 1}, unk_token="y"))
    tokenizer.decoder = decoders.Fuse()
    token_id = {"y": 0, "<0xE6>": 1}.get(token, 7)
    assert TokenBytes(tokenizer, is_bytewise=False).of(token_id, text=text) == data
