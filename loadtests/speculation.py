"""Does a draft head learn to guess the policy's next tokens?

`offline`: a random head for the demo's model, trained as a run trains it, on contexts of
demonstrated episodes; no engine runs. `overlap` is the mean of sum min(p, q) of policy and head
over the tokens of held-out contexts: the share of guesses that exact speculative sampling accepts.
The second token of a chain is guessed from the head's own state.

`demo`: the demo with a random head, on the real broker and the real engine. `accept_length` is the
tokens that a pass of the policy gives, over the completions of one version: of version 0, and over
those of the last versions that sampled `PASSES_MIN` passes together. Then the demo again, with a
head that was trained as in `offline` and stays as it is while the policy learns: `frozen`. Then
without any: `plain`. `success` is the share of held-out tasks solved after the last step. A run
that has ended is read from its folder and not played again: after a change of the code delete
`runs/speculation-*` first.

    make load NAME=speculation JSON=speculation.json      # about an hour on two cores
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from measurement import Measurement, arguments
from safetensors.torch import save_file
from transformers import AutoTokenizer

from forgemq_contracts.loss import Loss
from forgemq_contracts.run import Optimizer
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
LEARNING_RATE = 5e-3
TOP_K = 64
HEAD_CHUNK = 512
SEED, HELD_OUT_SEED = 0, 1
TUNED_RUN, FROZEN_RUN, PLAIN_RUN = "speculation-tuned", "speculation-frozen", "speculation-plain"
NEVER = 1_000_000
"""More versions than a run has: as a push interval it leaves the engines' head as it is."""
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


class Apprentice:
    """A random head for the demo's model, and its training on demonstrated contexts."""

    def __init__(self, folder: Path) -> None:
        """Write the head to a folder."""
        self._folder = folder
        self.parameters = write_new_head(MODEL, folder, seed=SEED)
        self._examples = Examples(AutoTokenizer.from_pretrained(MODEL), random.Random(SEED))
        loaded = load_model(MODEL, dtype="float32")
        self.head, self.policy = with_draft_head(folder, loaded, top_k=TOP_K)
        self.trained_tokens = 0

    def train(self) -> None:
        """Train it, and write it to its folder."""
        updater = Updater(self.head.layer, Optimizer(lr=LEARNING_RATE))
        for _ in range(STEPS):
            forests = contexts(self._examples)
            self.trained_tokens += tokens_of(forests)
            draft(self.head, self.policy, forests)
            updater.update(lr=LEARNING_RATE)
        save_file(self.head.layer.state_dict(), self._folder / "model.safetensors")


def offline(measurement: Measurement) -> None:
    """Train a random head, and compare it before and after."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    test = contexts(Examples(tokenizer, random.Random(HELD_OUT_SEED)))
    with tempfile.TemporaryDirectory() as folder:
        apprentice = Apprentice(Path(folder))
        held_out(measurement, "start", apprentice.head, apprentice.policy, test)
        apprentice.train()
        held_out(measurement, "end", apprentice.head, apprentice.policy, test)
    measurement.row("offline", "parameters", apprentice.parameters, "numbers")
    measurement.row("offline", "tokens_trained", apprentice.trained_tokens, "tokens")


def demo(measurement: Measurement) -> None:
    """The demo with a head that is tuned, with one that is not, and with none."""
    tuned = drafted(TUNED_RUN, lambda folder: write_new_head(MODEL, folder, seed=SEED), every=1)
    frozen = drafted(FROZEN_RUN, lambda folder: Apprentice(folder).train(), every=NEVER)
    plain = played(PLAIN_RUN, lambda: "")
    for name, folder in (("", tuned), ("_frozen", frozen)):
        points = json.loads((folder / "report.json").read_text())["acceptance"]
        start, end = f"accept_length{name}_start", f"accept_length{name or '_end'}"
        measurement.row("demo", start, points[0]["length"], "tokens")
        measurement.row("demo", end, last_length(points), "tokens")
    rows = [json.loads(line) for line in (tuned / "curves.jsonl").read_text().splitlines()]
    gaps = [row["logprob_gap_max"] for row in rows if row.get("gap_entries")]
    measurement.row("demo", "logprob_gap_max", max(gaps), "nats")
    for name, folder in (("", tuned), ("_frozen", frozen), ("_plain", plain)):
        report = json.loads((folder / "report.json").read_text())
        for metric in ("success_end", "success_end_greedy"):
            measurement.row("demo", f"{metric}{name}", report[metric], "share")


def drafted(run: str, make_head: Callable[[Path], object], *, every: int) -> Path:
    """The folder of a demo with this head; the engines get a new one every so many versions."""

    def table() -> str:
        head = ROOT / "runs" / f"{run}-head"
        shutil.rmtree(head, ignore_errors=True)
        make_head(head)
        lines = f'\n[speculation]\nhead = "{head}"\nlearning_rate = {LEARNING_RATE}\n'
        return lines + f"push_every_steps = {every}\n"

    return played(run, table)


def played(run: str, table: Callable[[], str]) -> Path:
    """The folder of a demo with more in its file; one that exists is read and not run again."""
    folder = ROOT / "runs" / run
    if (folder / "report.json").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    configuration = ROOT / "runs" / f"{run}.toml"
    configuration.parent.mkdir(exist_ok=True)
    configuration.write_text((ROOT / "deploy/demo/run.toml").read_text() + table())
    tool = str(Path(sys.executable).with_name("forgemq"))
    subprocess.run([tool, "run", str(configuration), f"run={run}"], cwd=ROOT, check=True)
    return folder


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
        demo(measurement)
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
