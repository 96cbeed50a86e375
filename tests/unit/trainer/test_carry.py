"""Keys of the live path only, in memory or put away: the same gradients as the whole tree."""

import numpy as np
import pytest
import torch

from forgemq.contracts.run import Loss
from forgemq.trainer.core.carry import MakeStore, PathKeys, path_of
from forgemq.trainer.core.loss import loss_function
from forgemq.trainer.core.memory import Microbatch
from forgemq.trainer.core.plan import pieces
from forgemq.trainer.core.step import Policy, forward_backward
from forgemq.trainer.core.tree import Forest, joined, read_tree
from forgemq.trainer.model import prepared
from forgemq.trainer.offload import store_of
from tests.unit.trainer.scene import adversarial_samples, agent_samples, make_model, merge


def _forest(seed: int) -> Forest:
    generator = np.random.default_rng(seed)
    groups = [
        agent_samples(generator, rollouts=3, turns=4),
        adversarial_samples(generator),
        agent_samples(generator, rollouts=4, is_stripped=True, vocabulary=4),
    ]
    return joined([read_tree(merge(samples, f"g-{n}")) for n, samples in enumerate(groups)])


def _gradients(
    policy: Policy, forest: Forest, *, block: int, is_offloaded: bool
) -> dict[str, torch.Tensor]:
    count = forest.token_count
    blocks = tuple((start, min(start + block, count)) for start in range(0, count, block))
    policy.decoder.zero_grad()
    forward_backward(
        policy,
        [forest],
        [Microbatch(groups=(0,), blocks=blocks, is_offloaded=is_offloaded)],
        weights=[1.0],
        loss=loss_function(Loss()),
        head_chunk=8,
    )
    return {
        name: parameter.grad.clone()
        for name, parameter in policy.decoder.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("block", [1, 7, 40, 100])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_blocks_with_the_live_path_only_are_exact_offloaded_or_not(
    *, block: int, is_offloaded: bool
) -> None:
    policy = prepared(make_model("qwen3", torch.float64)).policy
    forest = _forest(block)
    whole = _gradients(policy, forest, block=forest.token_count, is_offloaded=False)
    cut = _gradients(policy, forest, block=block, is_offloaded=is_offloaded)
    assert whole.keys() == cut.keys()
    for name, gradient in whole.items():
        assert float((gradient - cut[name]).norm()) <= 1e-12 * float(gradient.norm())


@pytest.mark.parametrize("size", [5, 20, 36])
def test_an_odd_head_size_is_exact_too(size: int) -> None:
    policy = prepared(make_model("qwen3", torch.float64, head_dim=2 * size)).policy
    forest = _forest(1)
    whole = _gradients(policy, forest, block=forest.token_count, is_offloaded=False)
    cut = _gradients(policy, forest, block=23, is_offloaded=False)
    for name, gradient in whole.items():
        assert float((gradient - cut[name]).norm()) <= 1e-12 * float(gradient.norm())


def test_a_path_is_the_ancestors_by_depth() -> None:
    forest = _forest(0)
    for token in range(forest.token_count):
        path = path_of(forest, token).tolist()
        expected = []
        above = int(forest.parent_N[token])
        while above >= 0:
            expected.append(above)
            above = int(forest.parent_N[above])
        assert path == expected[::-1]


def _sizes(rollouts: int, make_store: MakeStore) -> tuple[int, list[tuple[int, ...]]]:
    """Slots of the carries, and what was asked of the store, for blocks of 16 tokens."""
    generator = np.random.default_rng(0)
    forest = read_tree(merge(agent_samples(generator, rollouts=rollouts, turns=3, prompt=30)))
    blocks = [
        (start, min(start + 16, forest.token_count)) for start in range(0, forest.token_count, 16)
    ]
    asked: list[tuple[int, ...]] = []

    def noted(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        asked.append(size)
        return make_store(size, dtype)

    keys = PathKeys(
        forest,
        pieces(forest),
        blocks,
        layers=1,
        key_heads=1,
        head_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        make_store=noted,
    )
    return keys.enter(0).carries[0].key_KND.shape[1], asked


def test_live_keys_follow_the_longest_path_and_the_store_holds_paths_only() -> None:
    store = store_of(torch.device("cpu"))
    few, _ = _sizes(2, store)
    many, ((_, _, _, stored, _),) = _sizes(40, store)
    assert many <= few + 16
    generator = np.random.default_rng(0)
    forest = read_tree(merge(agent_samples(generator, rollouts=40, turns=3, prompt=30)))
    assert stored < 0.8 * forest.token_count
