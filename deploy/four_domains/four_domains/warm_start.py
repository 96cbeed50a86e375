"""Make the base model of the four domains: `python -m four_domains.warm_start --out FOLDER`.

It continues the shop desk's base model, with the same tokenizer, on episodes of the demonstrator of
all domains. Other runs give a model of the same kind, but not the same bits.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from shop_desk.warm_start import Example, continue_base, replies_text
from transformers import PreTrainedTokenizerFast

from four_domains.bookings import TOOLS
from four_domains.demonstrator import Habits, turns
from four_domains.tasks import draw

BASE = Path(__file__).parents[2] / "demo" / "model"
EPISODES_PER_STEP = {"reasoning": 16, "documents": 16, "programs": 12, "bookings": 6}
"""Episodes of the desk are four times as long as the others."""


def main(arguments: list[str] | None = None) -> int:
    """Train the model, and write it with its tokenizer to --out."""
    parser = argparse.ArgumentParser(prog="four_domains.warm_start", description=__doc__)
    parser.set_defaults(base=BASE, steps=900, lr_share=0.7)
    return continue_base(arguments, parser, step_examples)


def step_examples(tokenizer: PreTrainedTokenizerFast, choose: random.Random) -> list[Example]:
    """The demonstrated episodes of one step."""
    return [
        episode_example(tokenizer, domain, draw(choose, domain, is_held_out=False), choose)
        for domain, count in EPISODES_PER_STEP.items()
        for _ in range(count)
    ]


def episode_example(
    tokenizer: PreTrainedTokenizerFast,
    domain: str,
    drawn: dict[str, Any],
    choose: random.Random,
    habits: Habits | None = None,
) -> Example:
    """A demonstrated episode as the gateway renders it; targets are the assistant's turns."""
    opening = tokenizer.apply_chat_template(
        [{"role": "user", "content": drawn["question"]}],
        tools=list(TOOLS) if domain == "bookings" else None,
        tokenize=False,
        add_generation_prompt=True,
    )
    ids: list[int] = tokenizer.encode(opening)
    is_target = [False] * len(ids)
    for text, reply in turns(domain, drawn, choose, habits or Habits()):
        sampled = [*tokenizer.encode(text), tokenizer.eos_token_id]
        given = tokenizer.encode(replies_text((reply,))) if reply else []
        ids += sampled + given
        is_target += [True] * len(sampled) + [False] * len(given)
    return Example(ids, is_target)


if __name__ == "__main__":
    sys.exit(main())
