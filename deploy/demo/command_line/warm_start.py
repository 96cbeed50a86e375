"""Make the command line's base model: `python -m command_line.warm_start --out FOLDER`.

It continues the shop desk's base model, with the same tokenizer, on episodes of a sloppy
demonstrator, in the form in which the gateway renders mini-swe-agent's messages. About 5 minutes
on one core. `deploy/demo/command_line/model` is the result of one such run; another run gives a
model of the same kind, but not the same bits.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from shop_desk.demonstrator import Demonstration
from shop_desk.shop import draw_order
from shop_desk.warm_start import Example, adamw, cosine, example_of, train
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from command_line.demonstrator import Habits, demonstration
from command_line.desk import BASH, SYSTEM
from command_line.tasks import LINES

BASE = Path(__file__).parent.parent / "model"
EPISODES_PER_STEP = 12
# Of the shop desk's rate, which is for a model that knows nothing yet.
LR_SHARE = 0.5


def main(arguments: list[str] | None = None) -> int:
    """Train the model, and write it with its tokenizer to --out."""
    parser = argparse.ArgumentParser(prog="command_line.warm_start", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = Qwen3ForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    choose = random.Random(options.seed)

    def episodes(step: int) -> list[Example]:
        del step
        return [drawn_example(tokenizer, choose) for _ in range(EPISODES_PER_STEP)]

    rate = cosine(options.steps)
    train(model, adamw(model), episodes, steps=options.steps, lr=lambda step: LR_SHARE * rate(step))
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    return 0


def drawn_example(tokenizer: PreTrainedTokenizerFast, choose: random.Random) -> Example:
    """An order, and the demonstrator's episode of it."""
    order = draw_order(choose, line_counts=LINES)
    return episode_example(tokenizer, demonstration(order, choose, Habits()))


def episode_example(tokenizer: PreTrainedTokenizerFast, episode: Demonstration) -> Example:
    """The episode as the gateway renders mini-swe-agent's messages."""
    opening = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": episode.question},
        ],
        tools=[BASH],
        tokenize=False,
        add_generation_prompt=True,
    )
    return example_of(tokenizer, opening, episode)


if __name__ == "__main__":
    sys.exit(main())
