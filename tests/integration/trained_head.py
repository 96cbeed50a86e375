"""A draft head that the trainer has trained on demonstrations of the demo, for tests of engines."""

import json
import random
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import Speculation
from forgemq_launcher.commands.new_head import write_new_head
from forgemq_trainer.storage.heads import write_head
from forgemq_trainer.training import Training
from tests.engine_fixture import ENGINE_MODEL
from tests.unit.trainer.scene import Sample, configuration_of, merge, scheduled_step

sys.path.append(str(ENGINE_MODEL.parent))

from shop_desk.warm_start import Examples  # it lies in the demo's folder

STEPS = 40


def trained_on_demonstrations(folder: Path) -> tuple[Path, list[float]]:
    """The folder of a head after its steps, and its overlap before each of them."""
    write_new_head(ENGINE_MODEL, folder / "new", seed=0)
    examples = Examples(AutoTokenizer.from_pretrained(ENGINE_MODEL), random.Random(0))
    training = Training(_configuration(folder / "new"), device="cpu", checkpoint=None)
    overlaps = []
    for step in range(STEPS):
        tree = merge(_contexts(examples), f"g-{step}")
        read = training.read(scheduled_step(step, [tree]), {tree.group_id: topics.encode(tree)})
        overlaps.append(training.train(read).draft_overlap)
    assert training.head is not None
    write_head(
        training.head.weights(), base=folder / "new", dtype="float32", folder=folder / "trained"
    )
    return folder / "trained", overlaps


def held_out_starts() -> list[list[int]]:
    """Beginnings of demonstrated episodes that the head was not trained on."""
    examples = Examples(AutoTokenizer.from_pretrained(ENGINE_MODEL), random.Random(1))
    return [each.ids[: each.is_target.index(True)] for each in examples.episodes(0)]


def generated(url: str, prompts: Sequence[Sequence[int]], **sampling: object) -> list[Any]:
    """An engine's answers to all prompts at once."""
    body = {"input_ids": prompts, "sampling_params": sampling}
    request = urllib.request.Request(
        f"{url}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return list(json.load(response))


def tokens_a_pass(answers: Sequence[Any]) -> float:
    """Tokens over passes of the policy over drafted ones."""
    passes = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return float(sum(answer["meta_info"]["completion_tokens"] for answer in answers) / passes)


def _configuration(head: Path) -> RunConfiguration:
    """A run whose policy stays where it is, as far as a learning rate can say so."""
    configuration = configuration_of(ENGINE_MODEL, steps=STEPS, head_chunk_tokens=512)
    optimizer = msgspec.structs.replace(configuration.optimizer, lr=1e-12)
    speculation = Speculation(head=str(head), learning_rate=2e-3)
    return msgspec.structs.replace(configuration, optimizer=optimizer, speculation=speculation)


def _contexts(examples: Examples) -> list[Sample]:
    """Demonstrated contexts, each with one token that counts as sampled."""
    return [
        Sample(
            tokens=tuple(each.ids),
            first_sampled=len(each.ids) - 1,
            advantage=0.0,
            behaviour=(-1.0,),
        )
        for each in examples.episodes(0)
    ]
