"""The block mask of a GPU, as far as a CPU can run it: lists, padding, compilations."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import create_block_mask

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.attention.attention import AttentionBackend, BlockKeys
from forgemq_trainer.core.attention.carry import KeyShape, PathKeys
from forgemq_trainer.core.attention.cpu_attention import CpuAttention
from forgemq_trainer.core.attention.flex import (
    BLOCK,
    BLOCKS_MIN,
    CompiledFlex,
    TreeMask,
    flex_attention_of,
    tree_mask,
)
from forgemq_trainer.core.attention.gpu_attention import GpuAttention
from forgemq_trainer.core.attention.plan import attention_plan, pieces
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, joined, read_tree
from forgemq_trainer.model import prepare
from tests.unit.trainer.gpu_kernels import eager_flex
from tests.unit.trainer.scene import adversarial_samples, agent_samples, make_model, merge

SLOTS = 2048


def _groups(prompt: int) -> list[Forest]:
    generator = np.random.default_rng(prompt)
    samples = agent_samples(generator, rollouts=3, turns=3, prompt=prompt, act=40, observe=60)
    return [
        read_tree(merge(samples, "g-0")),
        read_tree(merge(adversarial_samples(generator), "g-1")),
    ]


def _end(forest: Forest) -> torch.Tensor:
    end = torch.zeros(SLOTS, dtype=torch.int32)
    end[: forest.token_count] = torch.from_numpy(forest.subtree_end_N)
    return end


def _visible_tiles(end: torch.Tensor, *, start: int, mask: TreeMask) -> torch.Tensor:
    """Which pairs are visible by definition: [query blocks, key blocks, pairs of a block]."""
    blocks = mask.lists[0].shape[-1]
    place = torch.arange(start, start + blocks * BLOCK)[:, None]
    key = torch.arange(SLOTS)[None]
    visible = (key <= place) & (place < end[None])
    return visible.view(blocks, BLOCK, SLOTS // BLOCK, BLOCK).transpose(1, 2).flatten(2)


def _listed(counts: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The lists of blocks as a dense mask; checks that each names its blocks once, in order."""
    dense = torch.zeros(order.shape[2:], dtype=torch.int64)
    for row in range(len(dense)):
        named = order[0, 0, row, : counts[0, 0, row]].long()
        assert torch.equal(named, named.sort().values)
        dense[row, named] += 1
    assert dense.max() <= 1
    return dense.bool()


@pytest.mark.parametrize("start_share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("prompt", [200, 600])
def test_lists_name_every_visible_block_once_and_full_ones_are_full(
    start_share: float, prompt: int
) -> None:
    forest = joined(_groups(prompt))
    start = int(start_share * forest.token_count)
    end = _end(forest)
    mask = tree_mask(end, start=start, queries=forest.token_count - start)
    tiles = _visible_tiles(end, start=start, mask=mask)
    partial, full = _listed(*mask.lists[:2]), _listed(*mask.lists[2:4])
    assert not (partial & full).any()
    assert torch.equal(partial | full, tiles.any(2))
    assert tiles.all(2)[full].all()
    assert full.any() == tiles.all(2).any()
    assert torch.equal(_listed(*mask.lists[4:6]), partial.t())
    assert torch.equal(_listed(*mask.lists[6:]), full.t())


def test_the_mask_of_a_whole_forest_is_torchs_mask_of_the_definition() -> None:
    forest = joined(_groups(200))
    count = forest.token_count
    end = _end(forest)
    end = end[: -(-count // BLOCK) * BLOCK]
    ours = tree_mask(end, start=0, queries=count).block_mask()
    expected = create_block_mask(
        lambda _b, _h, q, k: (k <= q) & (q < end[k]), None, None, len(end), len(end), device="cpu"
    )
    assert torch.equal(ours.to_dense() > 0, expected.to_dense() > 0)


def _gradients(
    policy: PolicyModel, groups: list[Forest], *, block: int, recomputed: int = 0
) -> dict[str, torch.Tensor]:
    count = sum(forest.token_count for forest in groups)
    blocks = tuple((start, min(start + block, count)) for start in range(0, count, block))
    policy.decoder.zero_grad()
    forward_backward(
        policy,
        Objective(forests=groups, loss_weights=[1.0, 1.0], loss=loss_function(Loss())),
        [Microbatch(groups=(0, 1), blocks=blocks, recomputed_layers=recomputed)],
        head_chunk=64,
    )
    return {n: p.grad.clone() for n, p in policy.decoder.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(("block", "recomputed"), [(10_000, 0), (10_000, 1), (300, 0), (130, 0)])
def test_the_block_mask_gives_the_same_gradients_as_the_pieces(block: int, recomputed: int) -> None:
    groups = _groups(20)
    policy = prepare(make_model("qwen3", torch.float64, head_dim=16)).policy
    backend: AttentionBackend = GpuAttention(head_size=16, flex=eager_flex)
    expected = _gradients(policy, groups, block=block)
    seen = _gradients(
        replace(policy, attention=backend), groups, block=block, recomputed=recomputed
    )
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((seen[name] - gradient).norm() / gradient.norm()) < 1e-12


class Counted:
    """A compiler's backend that runs graphs unchanged and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(
        self, graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]
    ) -> Callable[..., object]:
        self.graphs += 1
        return graph.forward


def _whole(forest: Forest) -> BlockKeys:
    plan = attention_plan(pieces(forest), start=0, end=forest.token_count)
    return BlockKeys(
        plan=plan,
        carries=(),
        subtree_end_S=forest.subtree_end_N,
        position_S=forest.position_N,
    )


def _drawn(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, heads, 16, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (100, True)])
def test_one_compilation_serves_trees_of_every_length_whole_and_in_blocks(
    *, window: int | None, has_sinks: bool
) -> None:
    backend, device = Counted(), torch.device("cpu")
    sinks = torch.ones(4) if has_sinks else None
    kernel = CompiledFlex(backend=backend)
    counts = []
    for prompt in (1, 150, 300, 700):
        keys = _whole(joined(_groups(prompt)))
        tensors = _drawn(keys.plan.end)
        seen = flex_attention_of(keys, kernel=kernel, device=device)(
            *tensors, scale=0.3, carry=None, window=window, sinks_H=sinks
        )
        exact = CpuAttention().of_run(keys, dtype=torch.float32, device=device)
        expected = exact(*tensors, scale=0.3, carry=None, window=window, sinks_H=sinks)
        assert torch.allclose(seen, expected, atol=1e-5)
        counts.append(keys.plan.end)
    assert any(count % BLOCK for count in counts)
    forest = joined(_groups(150))
    path = PathKeys(
        forest,
        pieces(forest),
        [(0, 2 * BLOCK), (2 * BLOCK, 3 * BLOCK), (3 * BLOCK, forest.token_count)],
        shape=KeyShape(
            layers=1,
            heads=2,
            head_size=16,
            dtype=torch.float32,
            device=device,
            slot_multiple=BLOCKS_MIN * BLOCK,
        ),
    )
    for number in range(3):
        keys = path.enter(number)
        attend = flex_attention_of(keys, kernel=kernel, device=device)
        tensors = _drawn(keys.plan.end - keys.plan.start)
        attend(*tensors, scale=0.3, carry=keys.carries[0], window=window, sinks_H=sinks)
    assert backend.graphs == 1


@pytest.mark.slow
def test_each_model_has_its_own_limit_of_compilations_and_refuses_more() -> None:
    keys = _whole(joined(_groups(1)))
    tensors = _drawn(keys.plan.end)
    for _model in range(2):
        kernel = CompiledFlex(backend=Counted(), kinds_max=1)
        attend = flex_attention_of(keys, kernel=kernel, device=torch.device("cpu"))
        first = attend(*tensors, scale=0.3, carry=None)
        with pytest.raises(FailOnRecompileLimitHit):
            attend(*(tensor.double() for tensor in tensors), scale=0.3, carry=None)
        assert torch.equal(attend(*tensors, scale=0.3, carry=None), first)


def test_dense_scores_are_refused_if_compilation_is_switched_off() -> None:
    keys = _whole(joined(_groups(1)))
    attend = flex_attention_of(keys, kernel=CompiledFlex(), device=torch.device("cpu"))
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(RuntimeError, match="switched off"),
    ):
        attend(*_drawn(keys.plan.end), scale=0.3, carry=None)
