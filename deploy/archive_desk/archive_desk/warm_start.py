"""Make the archive desk's base model: `python -m archive_desk.warm_start --out FOLDER`.

It continues the shop desk's base model, with the same tokenizer, on episodes of the demonstrator,
some with its notes and some in the fixed window. `deploy/archive_desk/model` was made by two calls,
the first with the defaults, the second with `--base` naming its result, `--steps 260`,
`--lr-share 0.6` and `--seed 1`. Other runs give a model of the same kind, but not the same bits.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from shop_desk.warm_start import Example, continue_base, replies_text
from transformers import PreTrainedTokenizerFast

from archive_desk.agent import NOTE
from archive_desk.archive import draw_inquiry
from archive_desk.demonstrator import Demonstration, Habits, in_window, with_notes
from archive_desk.desk import READ
from forgemq_agents import Tool

BASE = Path(__file__).parents[2] / "demo" / "model"
CONTEXT_TOKENS_MAX = 404  # as in run.toml
EPISODES_PER_STEP = 3
NOTES_SHARE = 0.65


def main(arguments: list[str] | None = None) -> int:
    """Train the model, and write it with its tokenizer to --out."""
    parser = argparse.ArgumentParser(prog="archive_desk.warm_start", description=__doc__)
    parser.set_defaults(base=BASE, steps=140, lr_share=0.5)
    return continue_base(arguments, parser, step_examples)


def step_examples(tokenizer: PreTrainedTokenizerFast, choose: random.Random) -> list[Example]:
    """The demonstrated episodes of one step."""
    drawn = (episode_examples(tokenizer, choose) for _ in range(EPISODES_PER_STEP))
    return [example for episode in drawn for example in episode]


def episode_examples(
    tokenizer: PreTrainedTokenizerFast, choose: random.Random
) -> Iterator[Example]:
    """The contexts of one demonstrated episode, up to the one that is full."""
    inquiry = draw_inquiry(choose)
    is_noting = choose.random() < NOTES_SHARE
    tools = (READ, NOTE.tool) if is_noting else (READ,)
    demonstrate = with_notes if is_noting else in_window
    for context in demonstrate(inquiry, choose, Habits()):
        example = context_example(tokenizer, context, tools)
        yield example.cut(CONTEXT_TOKENS_MAX)
        if len(example.ids) >= CONTEXT_TOKENS_MAX:
            return


def context_example(
    tokenizer: PreTrainedTokenizerFast, context: Demonstration, tools: tuple[Tool, ...]
) -> Example:
    """The context as the gateway renders it; targets are the turns that are to be learned."""
    opening = tokenizer.apply_chat_template(
        [{"role": "user", "content": context.opening}],
        tools=list(tools),
        tokenize=False,
        add_generation_prompt=True,
    )
    ids: list[int] = tokenizer.encode(opening)
    is_target = [False] * len(ids)
    for index, (text, reply) in enumerate(context.turns):
        sampled = [*tokenizer.encode(text), tokenizer.eos_token_id]
        given = tokenizer.encode(replies_text((reply,))) if reply else []
        ids += sampled + given
        is_target += [index >= context.given] * len(sampled) + [False] * len(given)
    return Example(ids, is_target)


if __name__ == "__main__":
    sys.exit(main())
