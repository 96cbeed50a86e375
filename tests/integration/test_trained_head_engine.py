"""A real engine accepts what a head guesses that the trainer has trained: both read it alike."""

import json
import random
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import Speculation
from forgemq_launcher.commands.new_head import write_new_head
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.server import EngineServer
from forgemq_trainer.storage.heads import write_head
from forgemq_trainer.training import Training
from tests.engine_fixture import ENGINE_MODEL, START_TIMEOUT_S
from tests.ports import free_port
from tests.unit.trainer.scene import Sample, configuration_of, merge, scheduled_step

sys.path.append(str(ENGINE_MODEL.parent))

from shop_desk.warm_start import Examples  # it lies in the demo's folder

STEPS = 40
pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]


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


@pytest.fixture(scope="module")
def trained_head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The folder of a head after its steps, and its overlap before each of them."""
    folder = tmp_path_factory.mktemp("heads")
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


@pytest.fixture(scope="module")
def guessing_engine(
    trained_head: tuple[Path, list[float]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """An engine that drafts three tokens with the trained head."""
    options = EngineOptions(head=str(trained_head[0]), context_tokens_max=372)
    server = EngineServer(
        str(ENGINE_MODEL), tmp_path_factory.mktemp("engine"), port=free_port(), options=options
    )
    server.start()
    try:
        server.wait_healthy(timeout_s=START_TIMEOUT_S)
        yield server.url
    finally:
        server.stop()


def _generated(url: str, prompts: Sequence[Sequence[int]]) -> list[dict[str, object]]:
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 60},
    }
    request = urllib.request.Request(
        f"{url}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return [answer["meta_info"] for answer in json.load(response)]


def test_a_pass_of_the_policy_yields_over_two_and_a_half_tokens_with_a_trained_head(
    trained_head: tuple[Path, list[float]], guessing_engine: str
) -> None:
    """A random head yields 1.03: at 4 a pass every guess is accepted."""
    _, overlaps = trained_head
    assert overlaps[0] < 0.2
    assert np.mean(overlaps[-5:]) > 0.6
    examples = Examples(AutoTokenizer.from_pretrained(ENGINE_MODEL), random.Random(1))
    starts = [each.ids[: each.is_target.index(True)] for each in examples.episodes(0)]
    answers = _generated(guessing_engine, starts)
    tokens = sum(int(str(answer["completion_tokens"])) for answer in answers)
    passes = sum(int(str(answer["spec_verify_ct"])) for answer in answers)
    assert tokens > 100
    assert 2.5 < tokens / passes <= 4
