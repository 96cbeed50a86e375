"""Make the base model of the four domains: `python -m four_domains.warm_start --out FOLDER`.

It continues the shop desk's base model, with the same tokenizer, on episodes of the demonstrator of
all domains. Other runs give a model of the same kind, but not the same bits.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from shop_desk.warm_start import Example, adamw, cosine, replies_text, train
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from four_domains.bookings import TOOLS
from four_domains.demonstrator import Habits, turns
from four_domains.tasks import draw

BASE = Path(__file__).parents[2] / "demo" / "model"
EPISODES_PER_STEP = {"reasoning": 16, "documents": 16, "programs": 12, "bookings": 6}
"""Episodes of the desk are four times as long as the others."""


def main(arguments: list[str] | None = None) -> int:
    """Train the model, and write it with its tokenizer to --out."""
    parser = argparse.ArgumentParser(prog="four_domains.warm_start", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--base", type=Path, default=BASE, help="the model to continue")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--lr-share", type=float, default=0.7, help="of the shop desk's rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    model = Qwen3ForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    choose = random.Random(options.seed)

    def episodes(step: int) -> list[Example]:
        del step
        return [
            episode_example(tokenizer, domain, draw(choose, domain, is_held_out=False), choose)
            for domain, count in EPISODES_PER_STEP.items()
            for _ in range(count)
        ]

    rate = cosine(options.steps)
    train(
        model,
        adamw(model),
        episodes,
        steps=options.steps,
        lr=lambda step: options.lr_share * rate(step),
        dtype=torch.float32,
    )
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    return 0


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
