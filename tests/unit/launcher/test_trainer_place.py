"""The trainer's device and memory budget, found by themselves where the user names none."""

from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.lora import Lora
from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.speculation import Speculation
from forgemq_launcher.core.configuration import ConfigurationError, document, names_budget
from forgemq_launcher.core.trainer_place import Memory, memory_budget_bytes, trainer_device
from forgemq_launcher.placement import (
    DEVICE,
    adapter_parameters_of,
    device_of,
    parameters_of,
    with_budget,
)

DEMO_MODEL = Path(__file__).parents[3] / "deploy/demo/model"
USUAL = 8_000_000_000
RUN = RunConfiguration(
    run="r",
    seed=0,
    model=Model(path=str(DEMO_MODEL), dtype="float32"),
    queues=(Queue(domain="d", task_source="m:f", agent="m:g"),),
    trainer=Trainer(steps=1),
)


@pytest.mark.parametrize(
    ("engines", "gpus", "ranks", "expected"),
    [
        (1, 0, 1, "cpu"),
        (1, 1, 1, "cpu"),  # The engine has the only one.
        (1, 2, 1, "cuda"),
        (0, 1, 1, "cuda"),  # The engine runs elsewhere.
        (4, 8, 4, "cuda"),
        (4, 8, 5, "cpu"),
    ],
)
def test_the_trainer_takes_gpus_that_the_engines_leave(
    engines: int, gpus: int, ranks: int, expected: str
) -> None:
    assert trainer_device(engines=engines, gpus=gpus, ranks=ranks) == expected


def _budget(
    free_gb: float, *, parameters_b: float, device: str, ranks: int = 1, replicas: int = 1
) -> float:
    found = memory_budget_bytes(
        Memory(free_bytes=int(free_gb * 1e9), parameters=int(parameters_b * 1e9)),
        device=device,
        ranks=ranks,
        shard_ranks=ranks // replicas,
        dtype="bfloat16",
        usual_bytes=USUAL,
    )
    return found / 1e9


def test_a_gpus_budget_is_what_the_models_state_leaves_of_it_with_a_margin() -> None:
    assert _budget(150, parameters_b=4, device="cuda") == 63.0
    assert _budget(150, parameters_b=8, device="cuda", ranks=4) == 99.0
    assert _budget(150, parameters_b=8, device="cuda") == 0.0
    assert _budget(150, parameters_b=8, device="cuda", ranks=8, replicas=2) == 99.0


@pytest.mark.parametrize("shard_ranks", [1, 4])
def test_a_reference_is_shared_like_the_model_and_a_draft_head_is_whole_on_each_rank(
    shard_ranks: int,
) -> None:
    """Of 135 GB: 20 bytes of each of 4e9 weights over the ranks, 18 of each of 0.25e9 of a head."""
    memory = Memory(
        free_bytes=150 * 10**9,
        parameters=4 * 10**9,
        reference_parameters=4 * 10**9,
        head_parameters=25 * 10**7,
    )
    found = memory_budget_bytes(
        memory,
        device="cuda",
        ranks=4,
        shard_ranks=shard_ranks,
        dtype="bfloat16",
        usual_bytes=USUAL,
    )
    assert found == 135_000_000_000 - 80_000_000_000 // shard_ranks - 4_500_000_000


def test_of_adapters_only_they_have_a_state_beside_the_frozen_weights() -> None:
    """Of 135 GB, 2 bytes of each of 8e9 weights and 18 of each of 0.1e9 are taken."""
    memory = Memory(free_bytes=150 * 10**9, parameters=10**8, frozen_parameters=8 * 10**9)
    found = memory_budget_bytes(
        memory, device="cuda", ranks=1, shard_ranks=1, dtype="bfloat16", usual_bytes=USUAL
    )
    assert found == 117_200_000_000
    # Ranks of 16 in three layers: 128 wide, 128 of queries, 64 of keys, an MLP of 384.
    wanted = 16 * 3 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 384))
    assert adapter_parameters_of(DEMO_MODEL, Lora(rank=16)) == wanted
    assert adapter_parameters_of(DEMO_MODEL, Lora(rank=4, targets=("o_proj",))) == 4 * 3 * 256


def test_a_cpus_budget_is_the_usual_one_or_half_of_what_is_free() -> None:
    assert _budget(64, parameters_b=0.001, device="cpu") == 8.0
    assert _budget(10, parameters_b=0.001, device="cpu") == 4.9
    assert _budget(10, parameters_b=0.001, device="cpu", ranks=2) == 2.4
    # Two replicas hold 18 bytes of each of 0.1e9 parameters twice.
    assert _budget(10, parameters_b=0.1, device="cpu", ranks=2, replicas=2) == 0.7


def test_what_is_named_stays() -> None:
    assert device_of(RUN, {DEVICE: "cuda:3"}) == "cuda:3"
    assert device_of(RUN, {"CUDA_VISIBLE_DEVICES": "-1"}) == "cpu"
    assert names_budget(
        document("[trainer]\nsteps = 1", overrides=["trainer.memory_budget_bytes=5"])
    )
    assert not names_budget(document("[trainer]\nsteps = 1", overrides=[]))
    assert not names_budget({})


def test_a_run_on_this_machine_gets_a_budget_that_fits_it() -> None:
    assert parameters_of(DEMO_MODEL) == 681_024
    found = with_budget(RUN, {}, device="cpu").trainer.memory_budget_bytes
    assert 0 < found <= USUAL
    huge = msgspec.structs.replace(RUN.trainer, memory_budget_bytes=10**15)
    bounded = with_budget(msgspec.structs.replace(RUN, trainer=huge), {}, device="cpu")
    assert bounded.trainer.memory_budget_bytes < 10**15


def _write_header(file: Path, shapes: dict[str, list[int]]) -> None:
    """A file of weights that has only a header."""
    entries = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    header = msgspec.json.encode(entries)
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def test_only_the_tensors_that_the_trainer_loads_are_counted(tmp_path: Path) -> None:
    """Not a tied head, layers past the last, weights in a second form, nor adapters of experts."""
    config = {"num_hidden_layers": 2, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    mlp = "model.layers.{}.mlp.{}.gate_proj.weight"
    first = {"model.embed_tokens.weight": [64, 32], "lm_head.weight": [64, 32]}
    first |= {mlp.format(0, "experts.7"): [24, 32], mlp.format(1, "shared_experts"): [24, 32]}
    second = {mlp.format(2, "shared_experts"): [24, 32], "model.layers.2.eh_proj.weight": [32, 64]}
    _write_header(tmp_path / "model-1.safetensors", first)
    _write_header(tmp_path / "model-2.safetensors", second)
    _write_header(tmp_path / "consolidated.safetensors", {"tok_embeddings.weight": [64, 32]})
    named = dict.fromkeys(first, "model-1.safetensors") | dict.fromkeys(
        second, "model-2.safetensors"
    )
    index = msgspec.json.encode({"metadata": {}, "weight_map": named})
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    assert parameters_of(tmp_path) == (64 + 24 + 24) * 32
    assert adapter_parameters_of(tmp_path, Lora(rank=4, targets=("gate_proj",))) == 4 * (24 + 32)
    config = {"num_hidden_layers": 3, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    assert parameters_of(tmp_path) == (64 + 64 + 3 * 24 + 64) * 32


def test_a_draft_head_that_leaves_nothing_finds_no_budget(tmp_path: Path) -> None:
    """The file of a head has only a header here, of 10^12 values."""
    _write_header(tmp_path / "model.safetensors", {"fc.weight": [10**6, 10**6]})
    huge = msgspec.structs.replace(RUN.trainer, memory_budget_bytes=10**15)
    run = msgspec.structs.replace(RUN, trainer=huge)
    guessing = msgspec.structs.replace(run, speculation=Speculation(head=str(tmp_path)))
    assert with_budget(guessing, {}, device="cpu") == guessing


@pytest.mark.parametrize("size", [0, 7, 300])
def test_a_head_whose_file_has_no_whole_header_is_refused_by_its_name(
    tmp_path: Path, size: int
) -> None:
    whole = (DEMO_MODEL / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:size])
    guessing = msgspec.structs.replace(RUN, speculation=Speculation(head=str(tmp_path)))
    with pytest.raises(ConfigurationError, match=r"model\.safetensors is no safetensors file, or"):
        with_budget(guessing, {}, device="cpu")
