"""The demo's tokenizer: byte-level BPE trained on generated episodes, and a qwen-style template."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shop_desk.calls import BAD_CALL, NO_ITEM, TOOLS
from shop_desk.demonstrator import Habits, demonstrations
from shop_desk.shop import ITEMS, draw_order

VOCABULARY = 642
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Single tokens, but not special ones: decoding that skips special tokens keeps them, as in Qwen.
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Letters, one or two digits, or anything else: merges never cross these.
WORDS = r"[A-Za-z]+|[0-9]{1,2}|[^A-Za-z0-9]+"
TEMPLATE = Path(__file__).parent.parent / "model" / "chat_template.jinja"


def train_tokenizer(*, episodes: int = 3000, seed: int = 1) -> PreTrainedTokenizerFast:
    """A tokenizer trained on this many generated episodes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]  # as tokenizers ships it
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIAL, *MARKUP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(_corpus(episodes=episodes, seed=seed), trainer)
    fields = json.loads(trained.to_str())
    for token in fields["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(fields)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE.read_text()
    return tokenizer


def _corpus(*, episodes: int, seed: int) -> Iterator[str]:
    choose = random.Random(seed)
    yield json.dumps(TOOLS)
    yield "# Tools\n<tools></tools>system user assistant"
    for _ in range(episodes):
        order = draw_order(choose)
        yield f"user\n{order.question}\nNotes: "
        yield from (f"\n{order.page(line.item)}\n" for line in order.lines)
        for context in demonstrations(order, choose, Habits()):
            for text, _ in context.turns:
                yield from _without_markup(text)
        yield f'\n{BAD_CALL}\n{NO_ITEM}\n{{"total": 1}}\n'
    yield from ITEMS * 20
    for number in range(100):
        yield from [str(number)] * 20 + [f"{number:02d}"] * 20


def _without_markup(text: str) -> Iterator[str]:
    for markup in MARKUP:
        text = text.replace(markup, "\0")
    return (part for part in text.split("\0") if part)
