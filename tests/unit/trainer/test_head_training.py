"""A run with speculation: its head learns, is saved and restored, and leaves the policy alone."""

import re
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import Speculation
from forgemq_contracts.steps import TrainingMetrics
from forgemq_trainer.draft_head import UnsupportedHeadError
from forgemq_trainer.storage.checkpoint import OPTIMIZER_FILE, Checkpoint
from forgemq_trainer.training import Training
from tests.unit.trainer.head_scene import save_head
from tests.unit.trainer.rank_life import Life, save_checkpoint, store_of
from tests.unit.trainer.scene import Sample, configuration_of, merge, save_base, scheduled_step

TREES = Life(folder=Path(), steps=())
HEAD = Speculation(head="", learning_rate=1e-2, top_k=8)


def _configuration(folder: Path, *, is_guessing: bool = True) -> RunConfiguration:
    base = folder / "base"
    configuration = configuration_of(base if base.exists() else save_base(base), checkpoints_kept=9)
    # Slow enough that the head can follow the policy.
    optimizer = msgspec.structs.replace(configuration.optimizer, lr=1e-3)
    configuration = msgspec.structs.replace(configuration, optimizer=optimizer)
    if not is_guessing:
        return configuration
    head = folder / "head"
    head = head if head.exists() else save_head(head)
    return msgspec.structs.replace(
        configuration, speculation=msgspec.structs.replace(HEAD, head=str(head))
    )


def _training(configuration: RunConfiguration, checkpoint: Checkpoint | None = None) -> Training:
    return Training(configuration, device="cpu", checkpoint=checkpoint)


def _train(training: Training, step: int, *, trees_of: int | None = None) -> TrainingMetrics:
    trees = TREES.trees(step if trees_of is None else trees_of)
    values = {tree.group_id: topics.encode(tree) for tree in trees}
    return training.train(training.read(scheduled_step(step, trees), values))


def _weights(training: Training) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in training.model.parameters()])


def _head(training: Training) -> dict[str, torch.Tensor]:
    assert training.head is not None
    return {name: tensor.clone() for name, tensor in training.head.weights().items()}


@pytest.mark.slow
def test_a_head_learns_and_the_policy_trains_to_the_same_bytes_as_without(tmp_path: Path) -> None:
    plain = _training(_configuration(tmp_path, is_guessing=False))
    guessing = _training(_configuration(tmp_path))
    metrics = []
    for step in range(6):
        expected = _train(plain, step, trees_of=0)
        metrics.append(_train(guessing, step, trees_of=0))
        assert metrics[-1].loss == expected.loss
        assert metrics[-1].grad_norm == expected.grad_norm
        assert torch.equal(_weights(guessing), _weights(plain))
    assert expected.draft_loss == expected.draft_overlap == expected.draft_grad_norm == 0
    assert metrics[-1].draft_loss < 0.75 * metrics[0].draft_loss
    assert metrics[-1].draft_overlap > 1.1 * metrics[0].draft_overlap
    assert min(each.draft_grad_norm for each in metrics) > 0


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(2.0**-12, 2.0**-11), (2.0**11, 2.0**12)])
def test_the_loss_weight_alone_moves_no_head(tmp_path: Path, weights: tuple[float, float]) -> None:
    """If no gradient of a head is clipped, or every one: AdamW's steps have no scale."""
    heads, norms = [], []
    for weight in weights:
        configuration = _configuration(tmp_path)
        weighted = msgspec.structs.replace(configuration.speculation, loss_weight=weight)
        training = _training(msgspec.structs.replace(configuration, speculation=weighted))
        norms += [_train(training, step).draft_grad_norm for step in range(2)]
        heads.append(_head(training))
    assert max(norms) < 1.0 or min(norms) > 1.0, "grad_norm_max"
    for name, expected in heads[0].items():
        torch.testing.assert_close(heads[1][name], expected, rtol=0, atol=1e-6)


def test_a_group_without_entries_gives_a_head_no_gradient(tmp_path: Path) -> None:
    """As on several ranks, or in a budget in which it would not lie beside another group."""
    trees = TREES.trees(0)
    silent = merge([Sample(tuple(range(1, 60)), 59, 0.0, ())], "g-silent")
    heads, metrics = [], []
    for step_trees in (trees, [*trees, silent]):
        training = _training(_configuration(tmp_path))
        values = {tree.group_id: topics.encode(tree) for tree in step_trees}
        step = training.read(scheduled_step(0, step_trees), values)
        assert not step.failed
        metrics.append(training.train(step))
        heads.append(_head(training))
    assert metrics[0].draft_loss == metrics[1].draft_loss
    assert metrics[0].draft_grad_norm == metrics[1].draft_grad_norm
    assert all(torch.equal(heads[1][name], heads[0][name]) for name in heads[0])


def test_record_and_checkpoint_of_a_step_without_a_head_do_not_mention_one(tmp_path: Path) -> None:
    configuration = _configuration(tmp_path, is_guessing=False)
    training = _training(configuration)
    metrics = _train(training, 0)
    assert b"draft" not in msgspec.json.encode(metrics)
    save_checkpoint(store_of(tmp_path, configuration), training, metrics)
    folder = tmp_path / "trainer" / "checkpoints" / "step-00000000"
    assert b"head_sha256" not in (folder / "trainer.json").read_bytes()
    assert not (folder / "head").exists()


@pytest.mark.slow
def test_a_head_continues_from_a_checkpoint_to_the_same_bytes(tmp_path: Path) -> None:
    configuration = _configuration(tmp_path)
    store = store_of(tmp_path, configuration)
    whole = _training(configuration)
    metrics = [_train(whole, step) for step in range(3)]
    first = _training(configuration)
    for step in range(2):
        save_checkpoint(store, first, _train(first, step))
    checkpoint = store.newest_checkpoint()
    assert checkpoint is not None
    second = _training(configuration, checkpoint)
    again = _train(second, 2)
    assert (again.draft_loss, again.draft_grad_norm, again.draft_overlap) == (
        metrics[2].draft_loss,
        metrics[2].draft_grad_norm,
        metrics[2].draft_overlap,
    )
    expected, found = _head(whole), _head(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert whole.head is not None
    assert second.head is not None
    states = whole.head.optimizer_state(), second.head.optimizer_state()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert len(states[0]) == 3 * len(expected)


@pytest.mark.parametrize("file", ["model.safetensors", OPTIMIZER_FILE])
def test_a_checkpoint_with_a_damaged_head_is_passed_over(tmp_path: Path, file: str) -> None:
    configuration = _configuration(tmp_path)
    store = store_of(tmp_path, configuration)
    training = _training(configuration)
    for step in range(2):
        save_checkpoint(store, training, _train(training, step))
    damaged = tmp_path / "trainer" / "checkpoints" / "step-00000001" / "head" / file
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 0xFF
    damaged.write_bytes(data)
    found = store.newest_checkpoint()
    assert found is not None
    assert found.step == 0


def test_the_head_in_a_checkpoint_has_the_files_that_an_engine_loads(tmp_path: Path) -> None:
    configuration = _configuration(tmp_path)
    store = store_of(tmp_path, configuration)
    training = _training(configuration)
    save_checkpoint(store, training, _train(training, 0))
    found = store.newest_checkpoint()
    assert found is not None
    started = load_file(tmp_path / "head" / "model.safetensors")
    saved = load_file(found.head_folder / "model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in saved.items()} == {
        n: (t.shape, t.dtype) for n, t in started.items()
    }
    assert all(not torch.equal(saved[name], started[name]) for name in saved)
    config = (found.head_folder / "config.json").read_bytes()
    assert msgspec.json.decode(config)["architectures"] == ["LlamaForCausalLMEagle"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size of its config.json must be 32, got 64"),
        ({"vocab_size": 65}, "vocab_size of its config.json must be 64, got 65"),
        ({"num_hidden_layers": 2}, "num_hidden_layers of its config.json must be 1, got 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings of its config.json must be False"),
    ],
)
def test_a_head_of_another_policy_is_refused_by_field(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    save_head(tmp_path / "head", **changes)
    with pytest.raises(UnsupportedHeadError, match=f"^speculation.head: {re.escape(message)}"):
        _training(_configuration(tmp_path))


def test_a_head_whose_file_has_another_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    save_head(tmp_path / "head", attention_bias=True)
    config = tmp_path / "head" / "config.json"
    fields = msgspec.json.decode(config.read_bytes())
    config.write_bytes(msgspec.json.encode(fields | {"attention_bias": False}))
    with pytest.raises(
        UnsupportedHeadError, match=r"differing: layers\.0\.self_attn\.k_proj\.bias"
    ):
        _training(_configuration(tmp_path))


@pytest.mark.parametrize(
    ("size", "message"),
    [(0, "a safetensors file has at least 8 bytes, got 0"), (20_000, "it was copied in part")],
)
def test_a_head_whose_file_was_copied_in_part_is_refused(
    tmp_path: Path, size: int, message: str
) -> None:
    file = save_head(tmp_path / "head") / "model.safetensors"
    assert file.stat().st_size > size
    with file.open("r+b") as opened:
        opened.truncate(size)
    with pytest.raises(UnsupportedHeadError, match=rf"^speculation\.head: .*{message}"):
        _training(_configuration(tmp_path))


def test_a_head_with_a_value_that_is_no_number_is_refused_by_its_tensor(tmp_path: Path) -> None:
    """No gradient would be finite, so no update would ever change it."""
    file = save_head(tmp_path / "head") / "model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(UnsupportedHeadError, match=r"fc\.weight in .* infinite or no numbers$"):
        _training(_configuration(tmp_path))
