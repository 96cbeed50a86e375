"""Make a base model for the demo: `python -m shop_desk.warm_start --out FOLDER`.

It trains next-token prediction in two phases: copy drills without the chat frame, then episodes of
the sloppy demonstrator, with loss on the assistant's turns. About a quarter of an hour on one core.
`deploy/demo/model` is the result of one such run (success 0.38 sampled, 0.69 greedy); another run
gives a model of the same kind, but not the same bits.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from shop_desk.calls import TOOLS
from shop_desk.demonstrator import Demonstration, Habits, copy_drill, demonstrations
from shop_desk.model import small_qwen3
from shop_desk.shop import draw_order
from shop_desk.tokenizer import train_tokenizer

LR = 3e-3
WARMUP_STEPS = 50
CONTEXT_TOKENS_MAX = 372  # as in run.toml
DRILLS_PER_STEP = 64
EPISODES_PER_STEP = 12
# The first drills repeat random tokens, so that copying is learned before the words.
REPEATING_STEPS = 300
REPEATING_SHARE = 0.1
FIRST_PLAIN_TOKEN = 7  # after three special tokens and four of markup


class Example(NamedTuple):
    """Token ids, and for each whether the loss counts it."""

    ids: list[int]
    is_target: list[bool]

    def cut(self, tokens_max: int) -> "Example":
        """Its first tokens, as a context window holds them."""
        return Example(self.ids[:tokens_max], self.is_target[:tokens_max])


def main(arguments: list[str] | None = None) -> int:
    """Train the model and its tokenizer, and write them to --out."""
    parser = argparse.ArgumentParser(prog="shop_desk.warm_start", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--drill-steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = train_tokenizer()
    model = small_qwen3(tokens=len(tokenizer))
    examples = Examples(tokenizer, random.Random(options.seed))
    optimizer = adamw(model)
    train(model, optimizer, examples.drills, steps=options.drill_steps, lr=_constant)
    train(model, optimizer, examples.episodes, steps=options.steps, lr=cosine(options.steps))
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    return 0


class Examples:
    """Draws batches of both phases."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, choose: random.Random) -> None:
        self._tokenizer = tokenizer
        self._choose = choose

    def drills(self, step: int) -> list[Example]:
        """A batch of copy drills."""
        return [self._drill(step) for _ in range(DRILLS_PER_STEP)]

    def episodes(self, step: int) -> list[Example]:
        """At least EPISODES_PER_STEP contexts of demonstrated episodes."""
        del step
        found: list[Example] = []
        while len(found) < EPISODES_PER_STEP:
            order = draw_order(self._choose)
            for context in demonstrations(order, self._choose, Habits()):
                example = self.context_example(context)
                found.append(example)
                if len(example.ids) >= CONTEXT_TOKENS_MAX:
                    break  # the context is full: the episode ends there
        return found

    def context_example(self, context: Demonstration) -> Example:
        """The context as the gateway renders it; targets are the assistant's turns."""
        opening = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": context.question}],
            tools=list(TOOLS),
            tokenize=False,
            add_generation_prompt=True,
        )
        example = example_of(self._tokenizer, opening, context)
        return example.cut(CONTEXT_TOKENS_MAX)

    def _drill(self, step: int) -> Example:
        if step < REPEATING_STEPS or self._choose.random() < REPEATING_SHARE:
            count = self._choose.randint(8, 24)
            ids = [
                self._choose.randrange(FIRST_PLAIN_TOKEN, len(self._tokenizer))
                for _ in range(count)
            ]
            return Example(ids + ids, [False] * (count + 1) + [True] * (count - 1))
        given, wanted = copy_drill(self._choose, draw_order(self._choose, line_counts=(2, 3, 4, 5)))
        before, after = self._encode(given), self._encode(wanted)
        return Example(before + after, [False] * len(before) + [True] * len(after))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        return ids


def example_of(tokenizer: PreTrainedTokenizerFast, opening: str, context: Demonstration) -> Example:
    """The context behind its rendered opening; targets are the assistant's turns."""
    ids: list[int] = tokenizer.encode(opening)
    is_target = [False] * len(ids)
    for text, replies in context.turns:
        sampled = [*tokenizer.encode(text), tokenizer.eos_token_id]
        given = tokenizer.encode(replies_text(replies)) if replies else []
        ids += sampled + given
        is_target += [True] * len(sampled) + [False] * len(given)
    return Example(ids, is_target)


def replies_text(replies: tuple[str, ...]) -> str:
    """What the template puts between two assistant turns for these tool results."""
    blocks = "".join(f"\n<tool_response>\n{reply}\n</tool_response>" for reply in replies)
    return f"\n<|im_start|>user{blocks}<|im_end|>\n<|im_start|>assistant\n"


def adamw(model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    """The optimizer of both phases; only matrices decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
    )


def train(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.AdamW,
    batch: Callable[[int], list[Example]],
    *,
    steps: int,
    lr: Callable[[int], float],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Train on a batch for each step; matrix products are in `dtype`."""
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.zero_grad()
        loss = _backward(model, batch(step), dtype=dtype)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            sys.stderr.write(f"{batch.__name__} {step}/{steps} loss {loss:.4f}\n")


def _backward(model: Qwen3ForCausalLM, examples: list[Example], *, dtype: torch.dtype) -> float:
    """Gradient of the mean loss over the batch's targets, in pieces of like length."""
    total = sum(sum(example.is_target[1:]) for example in examples)
    loss_sum = 0.0
    for piece in _pieces(sorted(examples, key=lambda example: len(example.ids))):
        width = max(len(example.ids) for example in piece)
        ids = torch.zeros(len(piece), width, dtype=torch.long)
        is_target = torch.zeros(len(piece), width, dtype=torch.bool)
        for row, example in enumerate(piece):
            ids[row, : len(example.ids)] = torch.tensor(example.ids)
            is_target[row, : len(example.ids)] = torch.tensor(example.is_target)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        wanted = is_target[:, 1:]
        logits = model.lm_head(hidden[:, :-1].float()[wanted])
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][wanted], reduction="sum")
        (loss / total).backward()  # type: ignore[no-untyped-call]  # as torch ships it
        loss_sum += loss.item()
    return loss_sum / total


def _pieces(examples: list[Example], *, rows_max: int = 32) -> Iterator[list[Example]]:
    for start in range(0, len(examples), rows_max):
        yield examples[start : start + rows_max]


def continue_base(
    arguments: list[str] | None,
    parser: argparse.ArgumentParser,
    examples: Callable[[PreTrainedTokenizerFast, random.Random], list[Example]],
) -> int:
    """Train a base model further on a domain's own examples, and write it with its tokenizer.

    Args:
        arguments: Of the command; None: those of the process.
        parser: Has the defaults of --base, --steps and --lr-share.
        examples: Draws those of one step.
    """
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--base", type=Path, help="the model to continue")
    parser.add_argument("--steps", type=int)
    # The rate here is for a model that knows nothing yet.
    parser.add_argument("--lr-share", type=float, help="of the shop desk's rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    model = Qwen3ForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    choose, rate = random.Random(options.seed), cosine(options.steps)
    train(
        model,
        adamw(model),
        lambda _: examples(tokenizer, choose),
        steps=options.steps,
        lr=lambda step: options.lr_share * rate(step),
        dtype=torch.float32,
    )
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    return 0


def _constant(step: int) -> float:
    return LR * min(1.0, (step + 1) / WARMUP_STEPS)


def cosine(steps: int) -> Callable[[int], float]:
    """The rate of a step: a short rise, then a fall to a twentieth over so many steps."""

    def lr(step: int) -> float:
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        return _constant(step) * (0.05 + 0.95 * decay)

    return lr


if __name__ == "__main__":
    sys.exit(main())
