"""Blocks with the keys of the live path only have the gradients of the whole tree."""

import msgspec
import numpy as np
import pytest
import torch

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.attention.carry import KeyShape, MakeStore, PathKeys
from forgemq_trainer.core.attention.plan import pieces
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.loss import Entries, loss_function
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.paths import path_of
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, joined, read_tree
from forgemq_trainer.model import prepare
from forgemq_trainer.offload import store_of
from tests.unit.trainer.scene import adversarial_samples, agent_samples, make_model, merge


def _forests(seed: int) -> list[Forest]:
    generator = np.random.default_rng(seed)
    groups = [
        agent_samples(generator, rollouts=3, turns=4),
        adversarial_samples(generator),
        agent_samples(generator, rollouts=4, is_stripped=True, vocabulary=4),
    ]
    return [read_tree(merge(samples, f"g-{n}")) for n, samples in enumerate(groups)]


def _gradients(
    policy: PolicyModel, forests: list[Forest], *, block: int | None, is_offloaded: bool = False
) -> dict[str, torch.Tensor]:
    count = sum(forest.token_count for forest in forests)
    block = block or count
    blocks = tuple((start, min(start + block, count)) for start in range(0, count, block))
    policy.decoder.zero_grad()
    forward_backward(
        policy,
        Objective(forests=forests, loss_weights=[1.0, 0.5, 2.0], loss=loss_function(Loss())),
        [Microbatch(groups=(0, 1, 2), blocks=blocks, is_offloaded=is_offloaded)],
        head_chunk=8,
    )
    return {
        name: parameter.grad.clone()
        for name, parameter in policy.decoder.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(
    "block", [*(pytest.param(block, marks=pytest.mark.slow) for block in (1, 7, 100)), 40]
)
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_blocks_with_the_live_path_only_are_exact_offloaded_or_not(
    *, block: int, is_offloaded: bool
) -> None:
    policy = prepare(make_model("qwen3", torch.float64)).policy
    forests = _forests(block)
    whole = _gradients(policy, forests, block=None)
    cut = _gradients(policy, forests, block=block, is_offloaded=is_offloaded)
    assert whole.keys() == cut.keys()
    for name, gradient in whole.items():
        assert float((gradient - cut[name]).norm()) <= 1e-12 * float(gradient.norm())


@pytest.mark.parametrize(
    "size", [5, *(pytest.param(size, marks=pytest.mark.slow) for size in (20, 36))]
)
def test_an_odd_head_size_is_exact_too(size: int) -> None:
    policy = prepare(make_model("qwen3", torch.float64, head_dim=2 * size)).policy
    forests = _forests(1)
    whole = _gradients(policy, forests, block=None)
    cut = _gradients(policy, forests, block=23)
    for name, gradient in whole.items():
        assert float((gradient - cut[name]).norm()) <= 1e-12 * float(gradient.norm())


def test_a_path_is_the_ancestors_by_depth() -> None:
    forest = joined(_forests(0))
    for token in range(forest.token_count):
        path = path_of(forest, token).tolist()
        expected = []
        above = int(forest.parent_N[token])
        while above >= 0:
            expected.append(above)
            above = int(forest.parent_N[above])
        assert path == expected[::-1]


def _sizes(rollouts: int, make_store: MakeStore) -> tuple[int, list[tuple[int, ...]]]:
    """Slots of the carries, and the sizes of requested stores, for blocks of 16 tokens."""
    generator = np.random.default_rng(0)
    forest = read_tree(merge(agent_samples(generator, rollouts=rollouts, turns=3, prompt=30)))
    blocks = [
        (start, min(start + 16, forest.token_count)) for start in range(0, forest.token_count, 16)
    ]
    asked: list[tuple[int, ...]] = []

    def noting(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        asked.append(size)
        return make_store(size, dtype)

    keys = PathKeys(
        forest,
        pieces(forest),
        blocks,
        shape=KeyShape(
            layers=1,
            heads=1,
            head_size=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        ),
        make_store=noting,
    )
    return keys.enter(0).carries[0].key_KND.shape[1], asked


def test_live_keys_follow_the_longest_path_and_the_store_holds_paths_only() -> None:
    store = store_of(torch.device("cpu"))
    few, _ = _sizes(2, store)
    many, ((_, _, stored, _, _),) = _sizes(40, store)
    assert many <= few + 16
    generator = np.random.default_rng(0)
    forest = read_tree(merge(agent_samples(generator, rollouts=40, turns=3, prompt=30)))
    assert stored < 0.8 * forest.token_count


def test_a_users_loss_sees_the_reference_log_probability_of_every_entry() -> None:
    generator = np.random.default_rng(5)
    samples = agent_samples(generator)
    tree = merge(samples)
    count = sum(len(sample.behaviour) for sample in samples)
    reference = generator.uniform(-4, -1, count).astype("<f4")
    with_reference = msgspec.structs.replace(tree, entry_reference_logprob=reference.tobytes())
    seen: list[torch.Tensor | None] = []

    def towards_reference(logprob: torch.Tensor, entries: Entries) -> torch.Tensor:
        seen.append(entries.reference)
        if entries.reference is None:
            return 0 * logprob
        return (logprob - entries.reference) ** 2

    policy = prepare(make_model("qwen3", torch.float64)).policy
    for wire in (tree, with_reference):
        forest = read_tree(wire)
        values = forward_backward(
            policy,
            Objective(
                forests=[forest],
                loss_weights=[1.0],
                loss=loss_function(Loss(kind="losses:towards_reference"), user=towards_reference),
            ),
            [Microbatch(groups=(0,), blocks=((0, forest.token_count),))],
            head_chunk=8,
        )
    assert seen[0] is None
    assert seen[1] is not None
    assert seen[1].tolist() == reference.tolist()
    assert values.loss == pytest.approx(((values.logprob_E - reference) ** 2).sum())
