"""Does a draft head learn to guess the policy's next tokens?

`offline`: a random head for the demo's model, trained as a run trains it, on contexts of
demonstrated episodes; no engine runs. `overlap` is the mean of sum min(p, q) of policy and head
over the tokens of held-out contexts: the share of guesses that exact speculative sampling accepts.
The second token of a chain is guessed from the head's own state.

`demo`: the demo with a random head, on the real broker and the real engine. `accept_length` is the
tokens that a pass of the policy gives, over the completions of one version: of version 0, and over
those of the last versions that sampled `PASSES_MIN` passes together.

    make load NAME=speculation JSON=speculation.json      # about half an hour on two cores
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from measurement import Measurement, arguments
from transformers import AutoTokenizer

from forgemq_contracts.run import Loss, Optimizer
from forgemq_contracts.trees import MergedTree
from forgemq_launcher.commands.new_head import write_new_head
from forgemq_trainer.core.drafting import Drafting
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.optimizer import Updater
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.draft_head import LoadedHead, with_draft_head
from forgemq_trainer.model import load_model

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "deploy" / "demo" / "model"
sys.path.append(str(ROOT / "deploy" / "demo"))

from shop_desk.warm_start import Examples  # noqa: E402  # it lies in the folder above

STEPS = 60
LEARNING_RATE = 2e-3
TOP_K = 64
HEAD_CHUNK = 512
SEED, HELD_OUT_SEED = 0, 1
RUN = "speculation-demo"
DEMO_OVERRIDES = ("trainer.steps=16", "evaluation.tasks=16")
PASSES_MIN = 500
"""Of the policy over drafted tokens: their mean then varies by less than a tenth."""


def context_tree(name: str, tokens: Sequence[int]) -> MergedTree:
    """A tree of one context; one entry, as a step without one runs no forward."""

    def packed(*values: float, dtype: str = "<i4") -> bytes:
        return np.array(values, dtype).tobytes()

    last = len(tokens) - 1
    return MergedTree(
        group_id=name,
        domain="d",
        tokens=packed(*tokens),
        segment_start=packed(0),
        segment_length=packed(len(tokens)),
        segment_parent=packed(-1),
        entry_token=packed(last),
        entry_logprob=packed(-1.0, dtype="<f4"),
        entry_version=packed(0),
        sample_first_entry=packed(0, 1),
        sample_advantage=packed(0.0, dtype="<f4"),
        sample_temperature=packed(1.0, dtype="<f4"),
        sample_leaf=packed(last),
        sample_episode=packed(0),
        sample_turn=packed(0),
        sample_ids=("0" * 32,),
    )


def contexts(examples: Examples) -> list[Forest]:
    """A batch of demonstrated contexts."""
    found = examples.episodes(0)
    return [read_tree(context_tree(f"g-{n}", each.ids)) for n, each in enumerate(found)]


def draft(head: LoadedHead, policy: PolicyModel, forests: Sequence[Forest]) -> Drafting:
    """Add the head's gradients over these forests; the policy's own loss has no weight."""
    drafting = Drafting(head.model, forests, loss_weight=1.0)
    count = len(forests)
    forward_backward(
        policy,
        Objective(forests=forests, loss_weights=[0.0] * count, loss=loss_function(Loss())),
        [Microbatch(groups=tuple(range(count)), blocks=((0, tokens_of(forests)),))],
        head_chunk=HEAD_CHUNK,
        drafting=drafting,
    )
    return drafting


def tokens_of(forests: Sequence[Forest]) -> int:
    """Tokens of all of them."""
    return sum(forest.token_count for forest in forests)


def held_out(
    measurement: Measurement,
    when: str,
    head: LoadedHead,
    policy: PolicyModel,
    forests: Sequence[Forest],
) -> None:
    """Rows of the head over forests that it does not train on."""
    drafting = draft(head, policy, forests)
    head.layer.zero_grad()
    for number, totals in enumerate(drafting.totals, start=1):
        suffix = f"token_{number}_{when}"
        measurement.row("offline", f"overlap_{suffix}", totals.overlap / totals.rows, "share")
        measurement.row("offline", f"loss_{suffix}", totals.loss / totals.rows, "nats")


def offline(measurement: Measurement) -> None:
    """Train a random head, and compare it before and after."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    loaded = load_model(MODEL, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        numbers = write_new_head(MODEL, Path(folder), seed=SEED)
        head, policy = with_draft_head(Path(folder), loaded, top_k=TOP_K)
    test = contexts(Examples(tokenizer, random.Random(HELD_OUT_SEED)))
    updater = Updater(head.layer, Optimizer(lr=LEARNING_RATE))
    examples = Examples(tokenizer, random.Random(SEED))
    held_out(measurement, "start", head, policy, test)
    trained = 0
    for _ in range(STEPS):
        forests = contexts(examples)
        trained += tokens_of(forests)
        draft(head, policy, forests)
        updater.update(lr=LEARNING_RATE)
    held_out(measurement, "end", head, policy, test)
    measurement.row("offline", "parameters", numbers, "numbers")
    measurement.row("offline", "tokens_trained", trained, "tokens")


def play(measurement: Measurement) -> None:
    """Run the demo with a random head unless such a run exists, and read its report."""
    folder, head = ROOT / "runs" / RUN, ROOT / "runs" / f"{RUN}-head"
    if not (folder / "report.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(head, ignore_errors=True)
        write_new_head(MODEL, head, seed=SEED)
        configuration = ROOT / "runs" / f"{RUN}.toml"
        table = f'\n[speculation]\nhead = "{head}"\nlearning_rate = {LEARNING_RATE}\n'
        configuration.write_text((ROOT / "deploy/demo/run.toml").read_text() + table)
        tool = str(Path(sys.executable).with_name("forgemq"))
        command = [tool, "run", str(configuration), f"run={RUN}", *DEMO_OVERRIDES]
        subprocess.run(command, cwd=ROOT, check=True)
    read_demo(measurement, folder)


def read_demo(measurement: Measurement, folder: Path) -> None:
    """Rows of a run from its report and its curves."""
    points = json.loads((folder / "report.json").read_text())["acceptance"]
    measurement.row("demo", "accept_length_start", points[0]["length"], "tokens")
    measurement.row("demo", "accept_length_end", last_length(points), "tokens")
    rows = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
    gaps = [row["logprob_gap_max"] for row in rows if row.get("gap_entries")]
    measurement.row("demo", "logprob_gap_max", max(gaps), "nats")


def last_length(points: Sequence[Mapping[str, float]]) -> float:
    """Tokens a pass over the newest versions that have PASSES_MIN passes together."""
    tokens = passes = 0.0
    for point in reversed(points):
        tokens += point["length"] * point["verifications"]
        passes += point["verifications"]
        if passes >= PASSES_MIN:
            break
    return tokens / passes


def main() -> int:
    """Run the cases that were asked for."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    measurement = Measurement(
        name="speculation", question="Does a draft head learn to guess the policy's next tokens?"
    )
    measurement.conditions["head"] = f"{STEPS} steps, learning rate {LEARNING_RATE}, top_k {TOP_K}"
    if not options.case or "offline" in options.case:
        offline(measurement)
    if not options.case or "demo" in options.case:
        play(measurement)
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
