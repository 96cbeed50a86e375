"""Flash over the plan's pieces: the calls of a GPU, and their gradients on a CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.attention.attention import BlockKeys, RunAttention
from forgemq_trainer.core.attention.cpu_attention import CpuAttention
from forgemq_trainer.core.attention.flash_varlen import FlashVarlen, ForwardTensors, PackedPieces
from forgemq_trainer.core.attention.flex import TreeMask
from forgemq_trainer.core.attention.gpu_attention import GpuAttention, attention_kind
from forgemq_trainer.core.attention.plan import AttentionPlan, attention_plan, pieces
from forgemq_trainer.core.attention.varlen import has_few_branches, passes, varlen_attention_of
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, joined, read_tree
from forgemq_trainer.model import prepare
from tests.unit.trainer.gpu_kernels import PieceByPiece, eager_flex
from tests.unit.trainer.scene import adversarial_samples, agent_samples, make_model, merge


def _forests(seed: int) -> list[Forest]:
    generator = np.random.default_rng(seed)
    groups = [
        agent_samples(generator, rollouts=3, turns=4),
        adversarial_samples(generator),
        agent_samples(generator, rollouts=4, is_stripped=True, vocabulary=4),
    ]
    return [read_tree(merge(samples, f"g-{n}")) for n, samples in enumerate(groups)]


@given(seed=st.integers(0, 50), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@pytest.mark.slow
def test_calls_visit_every_visible_pair_once_and_no_query_twice(
    seed: int, cut: tuple[float, float]
) -> None:
    forest = joined(_forests(seed))
    first, last = sorted(int(share * (forest.token_count - 1)) for share in cut)
    start, end = first, last + 1
    visits = np.zeros((forest.token_count, forest.token_count), dtype=int)
    for call in passes(attention_plan(pieces(forest), start=start, end=end)):
        is_taken = np.zeros(forest.token_count, dtype=bool)
        for (q0, q1), (k0, k1) in zip(call.queries, call.keys, strict=True):
            assert not is_taken[q0:q1].any()
            is_taken[q0:q1] = True
            block = np.ones((q1 - q0, k1 - k0), dtype=int)
            visits[q0:q1, k0:k1] += np.tril(block) if call.is_causal else block
    query, key = np.indices(visits.shape)
    visible = (key <= query) & (query < forest.subtree_end_N[None]) & (start <= query)
    assert np.array_equal(visits, visible & (query < end))


def test_rectangles_that_do_not_overlap_share_a_call() -> None:
    plan = AttentionPlan(
        start=0,
        end=50,
        triangles=((0, 20), (20, 30), (30, 50)),
        rectangles=((20, 50, 0, 10), (30, 40, 20, 25), (40, 50, 20, 30), (30, 35, 5, 6)),
    )
    causal, outer, inner, innermost = passes(plan)
    assert causal.is_causal
    assert causal.queries == causal.keys == plan.triangles
    assert (outer.queries, outer.keys) == (((20, 50),), ((0, 10),))
    assert (inner.queries, inner.keys) == (((30, 40), (40, 50)), ((20, 25), (20, 30)))
    assert (innermost.queries, innermost.keys) == (((30, 35),), ((5, 6),))


@pytest.mark.parametrize(("block", "recomputed"), [(10_000, 0), (10_000, 1), (40, 0), (7, 0)])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.slow
def test_calls_give_the_same_gradients_as_the_pieces(
    kind: str, block: int, recomputed: int
) -> None:
    forests = _forests(block)
    policy = prepare(make_model(kind, torch.float64)).policy

    class Varlen:
        slot_multiple = 256

        def of_run(
            self, keys: BlockKeys, /, *, dtype: torch.dtype, device: torch.device
        ) -> RunAttention:
            return varlen_attention_of(keys, kernel=PieceByPiece(), device=device)

    count = sum(forest.token_count for forest in forests)
    blocks = tuple((start, min(start + block, count)) for start in range(0, count, block))
    gradients = []
    for backend, layers in ((CpuAttention(), 0), (Varlen(), recomputed)):
        policy.decoder.zero_grad()
        forward_backward(
            replace(policy, attention=backend),
            Objective(forests=forests, loss_weights=[1.0, 0.5, 2.0], loss=loss_function(Loss())),
            [Microbatch(groups=(0, 1, 2), blocks=blocks, recomputed_layers=layers)],
            head_chunk=64,
        )
        gradients.append({n: p.grad for n, p in policy.decoder.named_parameters()})
    for name, expected in gradients[0].items():
        seen = gradients[1][name]
        assert expected is not None
        assert seen is not None
        assert float((seen - expected).norm() / expected.norm()) < 1e-12


class CountedFlex:
    """Attention under the block mask that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        /,
        *,
        mask: TreeMask,
        scale: float,
        has_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.calls += 1
        return eager_flex(query, key, value, mask=mask, scale=scale, has_lse=has_lse)


@pytest.mark.parametrize("is_stripped", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [10_000, 150])
def test_a_gpu_takes_flash_for_few_branches_and_the_mask_for_many_with_equal_gradients(
    *, is_stripped: bool, size: int
) -> None:
    samples = agent_samples(
        np.random.default_rng(0), rollouts=4, turns=20, prompt=30, is_stripped=is_stripped
    )
    forest = read_tree(merge(samples))
    policy = prepare(make_model("qwen3", torch.float64, head_dim=16)).policy
    varlen, flex = PieceByPiece(), CountedFlex()
    count = forest.token_count
    blocks = tuple((start, min(start + size, count)) for start in range(0, count, size))
    gradients = []
    for backend in (CpuAttention(), GpuAttention(head_size=16, varlen=varlen, flex=flex)):
        policy.decoder.zero_grad()
        forward_backward(
            replace(policy, attention=backend),
            Objective(forests=[forest], loss_weights=[1.0], loss=loss_function(Loss())),
            [Microbatch(groups=(0,), blocks=blocks)],
            head_chunk=256,
        )
        gradients.append([p.grad for p in policy.decoder.parameters()])
    for seen, expected in zip(*gradients, strict=True):
        assert seen is not None
        assert expected is not None
        assert float((seen - expected).norm() / expected.norm()) < 1e-12
    if size > count:
        assert (varlen.calls > 0) == (not is_stripped)
        assert (flex.calls > 0) == is_stripped


def _error(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [
        float((left.double() - right).norm() / right.norm())
        for left, right in zip(ours, exact, strict=True)
    ]


def test_bfloat16_calls_sum_in_float32_as_the_pieces_do() -> None:
    keys = _keys(_tree(rollouts=6, turns=12))
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(keys.plan.end, heads, 16, generator=generator).bfloat16()
        for heads in (4, 2, 2, 4)
    ]

    def taken(attend: RunAttention, dtype: torch.dtype) -> list[torch.Tensor]:
        *inputs, owed = (tensor.to(dtype, copy=True) for tensor in drawn)
        for tensor in inputs:
            tensor.requires_grad_()
        output = attend(*inputs, scale=0.25, carry=None)
        return [output.detach(), *torch.autograd.grad(output, inputs, owed)]

    device = torch.device("cpu")
    pieces_of = CpuAttention().of_run(keys, dtype=torch.bfloat16, device=device)
    calls = varlen_attention_of(keys, kernel=PieceByPiece(), device=device)
    exact = taken(pieces_of, torch.float64)
    ours, theirs = (taken(attend, torch.bfloat16) for attend in (calls, pieces_of))
    for seen, known in zip(_error(ours, exact), _error(theirs, exact), strict=True):
        assert seen < 1.5 * known


@pytest.mark.parametrize(
    ("rectangles", "keys", "is_few"),
    [(64, 1, True), (65, 1, False), (2, 100, True), (2, 101, False), (0, 0, True)],
)
def test_branches_are_few_up_to_64_rectangles_and_twice_the_keys(
    rectangles: int, keys: int, *, is_few: bool
) -> None:
    plan = AttentionPlan(
        start=0, end=100, triangles=((0, 100),), rectangles=((0, 1, 0, keys),) * rectangles
    )
    assert has_few_branches(plan) == is_few


def _keys(forest: Forest) -> BlockKeys:
    plan = attention_plan(pieces(forest), start=0, end=forest.token_count)
    return BlockKeys(
        plan=plan,
        carries=(),
        subtree_end_S=forest.subtree_end_N,
        position_S=forest.position_N,
    )


def _tree(*, rollouts: int, turns: int, is_stripped: bool = False) -> Forest:
    generator = np.random.default_rng(0)
    samples = agent_samples(
        generator,
        rollouts=rollouts,
        turns=turns,
        prompt=200,
        act=20,
        observe=20,
        is_stripped=is_stripped,
        vocabulary=5000,
    )
    return read_tree(merge(samples))


@pytest.mark.slow
def test_rollouts_that_only_share_their_task_take_flash_and_stripped_ones_the_mask() -> None:
    few = _keys(_tree(rollouts=8, turns=10)).plan
    many = _keys(_tree(rollouts=8, turns=30, is_stripped=True)).plan
    assert attention_kind(few, dtype=torch.bfloat16, head_size=128) == "varlen"
    assert attention_kind(many, dtype=torch.bfloat16, head_size=128) == "flex"


@pytest.mark.parametrize(
    ("dtype", "head_size"),
    [(torch.float32, 64), (torch.bfloat16, 20), (torch.bfloat16, 264), (torch.float64, 64)],
)
def test_dtypes_and_sizes_that_flash_lacks_take_the_mask(
    dtype: torch.dtype, head_size: int
) -> None:
    few = _keys(_tree(rollouts=8, turns=10)).plan
    assert attention_kind(few, dtype=dtype, head_size=head_size) == "flex"


def test_the_operators_of_cuda_accept_a_calls_arguments() -> None:
    with FakeTensorMode():  # Checks arguments and shapes by the real operators, without a kernel.

        def halves(count: int, heads: int) -> torch.Tensor:
            return torch.empty(count, heads, 64, dtype=torch.bfloat16, device="cuda:0")

        bounds = torch.tensor([0, 5, 40], dtype=torch.int32, device="cuda:0")
        pieces = PackedPieces(
            query_bounds=bounds,
            key_bounds=bounds * 2,
            query_max=35,
            key_max=70,
            is_causal=False,
        )
        query, key, value = halves(40, 8), halves(80, 2), halves(80, 2)
        kernel = FlashVarlen()
        output, lse = kernel.forward(query, key, value, pieces, scale=0.125)
        of = ForwardTensors(
            query_PHD=query, key_CKD=key, value_CKD=value, output_PHD=output, lse_HP=lse
        )
        gradients = kernel.backward(output, of, pieces, scale=0.125)
    assert (output.shape, output.dtype) == (query.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((8, 40), torch.float32)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]
    assert output.device.type == gradients[0].device.type == "cuda"
