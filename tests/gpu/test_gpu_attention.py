"""A GPU's ways of tree attention, and steps through them, compared with a CPU's pieces."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.attention.attention import AttentionBackend, BlockKeys
from forgemq_trainer.core.attention.cpu_attention import CpuAttention
from forgemq_trainer.core.attention.flash4_varlen import Flash4Varlen, is_flash4_here
from forgemq_trainer.core.attention.flash_varlen import FlashVarlen
from forgemq_trainer.core.attention.gpu_attention import GpuAttention
from forgemq_trainer.core.attention.plan import attention_plan, pieces
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.logprobs import Edges, edge_logprobs
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, joined, read_tree
from forgemq_trainer.model import prepare
from tests.unit.trainer.scene import agent_samples, make_model, merge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    # torch reads `.grad` of every input while it compiles, and hides the warning from users.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # flash-attn-4 uses old names of its compiler.
    pytest.mark.filterwarnings("ignore:cutlass:DeprecationWarning"),
]

DEVICE = torch.device("cuda", 0)
HEAD_SIZE = 64


def _groups(*, turns: int = 4, is_stripped: bool = False) -> list[Forest]:
    generator = np.random.default_rng(turns)
    return [
        read_tree(
            merge(
                agent_samples(
                    generator,
                    rollouts=4,
                    turns=turns,
                    prompt=300,
                    act=40,
                    observe=70,
                    is_stripped=is_stripped,
                ),
                f"g-{n}",
            )
        )
        for n in range(2)
    ]


def _taken(
    backend: AttentionBackend, forest: Forest, tensors: list[Tensor], *, device: torch.device
) -> list[Tensor]:
    """Output and gradients of attention over the whole forest."""
    plan = attention_plan(pieces(forest), start=0, end=forest.token_count)
    keys = BlockKeys(
        plan=plan,
        carries=(),
        subtree_end_S=forest.subtree_end_N,
        position_S=forest.position_N,
    )
    query, key, value, owed = (tensor.to(device) for tensor in tensors)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    attend = backend.of_run(keys, dtype=query.dtype, device=device)
    output = attend(*inputs, scale=0.125, carry=None)
    return [output, *torch.autograd.grad(output, inputs, owed)]


def _way(name: str) -> GpuAttention:
    """One of a GPU's ways for every run: `flex`, or pieces by torch's kernels or flash-attn-4."""
    if name == "flex":
        return GpuAttention(head_size=HEAD_SIZE, kind="flex")
    if name == "flash4" and not is_flash4_here():
        pytest.skip("flash-attn-4 is not installed, or is not made for this GPU")
    kernel = Flash4Varlen() if name == "flash4" else FlashVarlen()
    return GpuAttention(head_size=HEAD_SIZE, kind="varlen", varlen=kernel)


def _difference(seen: Tensor, expected: Tensor) -> float:
    wanted = expected.detach().double()
    return float((seen.detach().double().cpu() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("is_stripped", [False, True])
@pytest.mark.parametrize(
    ("way", "dtype", "rounding"),
    [
        ("flash", torch.bfloat16, 0.01),
        ("flash", torch.float16, 0.002),
        ("flash4", torch.bfloat16, 0.01),
        ("flash4", torch.float16, 0.002),
        ("flex", torch.bfloat16, 0.01),
        ("flex", torch.float32, 1e-5),
    ],
)
def test_output_and_gradients_are_those_of_the_exact_pieces(
    way: str, dtype: torch.dtype, rounding: float, *, is_stripped: bool
) -> None:
    forest = joined(_groups(is_stripped=is_stripped))
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(forest.token_count, heads, HEAD_SIZE, generator=generator).to(dtype)
        for heads in (4, 2, 2, 4)
    ]
    exact = [tensor.double() for tensor in tensors]
    expected = _taken(CpuAttention(), forest, exact, device=torch.device("cpu"))
    seen = _taken(_way(way), forest, tensors, device=DEVICE)
    for ours, wanted in zip(seen, expected, strict=True):
        assert _difference(ours, wanted) < rounding


def _gradients(policy: PolicyModel, groups: list[Forest], blocks: Microbatch) -> dict[str, Tensor]:
    policy.decoder.zero_grad()
    forward_backward(
        policy,
        Objective(forests=groups, loss_weights=[1.0, 0.5], loss=loss_function(Loss())),
        [blocks],
        head_chunk=256,
    )
    return {
        name: parameter.grad.clone()
        for name, parameter in policy.decoder.named_parameters()
        if parameter.grad is not None
    }


def _blocks(
    groups: list[Forest], size: int, *, is_offloaded: bool = False, recomputed: int = 0
) -> Microbatch:
    count = sum(forest.token_count for forest in groups)
    return Microbatch(
        groups=(0, 1),
        blocks=tuple((start, min(start + size, count)) for start in range(0, count, size)),
        is_offloaded=is_offloaded,
        recomputed_layers=recomputed,
    )


@pytest.mark.parametrize(
    ("size", "recomputed", "is_offloaded"),
    [(100_000, 0, False), (100_000, 1, False), (500, 0, False), (500, 0, True)],
)
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_a_step_has_the_gradients_of_a_cpu_whole_recomputed_in_blocks_and_offloaded(
    kind: str, size: int, recomputed: int, *, is_offloaded: bool
) -> None:
    groups = _groups()
    model = make_model(kind, torch.float32, head_dim=HEAD_SIZE)
    expected = _gradients(prepare(model).policy, groups, _blocks(groups, 100_000))
    policy = prepare(model.to(DEVICE)).policy
    assert isinstance(policy.attention, GpuAttention)
    microbatch = _blocks(groups, size, is_offloaded=is_offloaded, recomputed=recomputed)
    seen = _gradients(policy, groups, microbatch)
    assert seen.keys() == expected.keys()
    for name, wanted in expected.items():
        assert _difference(seen[name], wanted) < 1e-4


@pytest.mark.parametrize(("size", "recomputed"), [(100_000, 0), (100_000, 2), (500, 0)])
@pytest.mark.parametrize("way", ["flash", "flash4", "flex"])
def test_a_step_in_bfloat16_differs_from_float32_by_rounding_only(
    way: str, size: int, recomputed: int
) -> None:
    groups = _groups()
    model = make_model("qwen3", torch.bfloat16, head_dim=HEAD_SIZE)
    expected = _gradients(
        prepare(make_model("qwen3", torch.bfloat16, head_dim=HEAD_SIZE).float()).policy,
        groups,
        _blocks(groups, 100_000),
    )
    policy = replace(prepare(model.to(DEVICE)).policy, attention=_way(way))
    seen = _gradients(policy, groups, _blocks(groups, size, recomputed=recomputed))
    for name, wanted in expected.items():
        assert _difference(seen[name], wanted) < 0.1


def test_nothing_is_compiled_again_for_another_tree() -> None:
    policy = prepare(make_model("qwen3", torch.float32, head_dim=HEAD_SIZE).to(DEVICE)).policy

    def train(turns: int) -> int:
        groups = _groups(turns=turns)
        _gradients(policy, groups, _blocks(groups, 100_000))
        _gradients(policy, groups, _blocks(groups, 100_000, recomputed=1))
        _gradients(policy, groups, _blocks(groups, 300 + 64 * turns))
        return int(counters["stats"]["unique_graphs"])

    compiled = train(2)
    assert [train(turns) for turns in (3, 5, 8)] == [compiled] * 3


def test_the_head_of_bfloat16_weights_has_the_logits_of_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 512, generator=generator).bfloat16()
    head = (torch.randn(4096, 512, generator=generator) / 20).bfloat16()
    rows = torch.arange(300)

    def logprobs(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        edges = Edges(
            entry_E=rows,
            edge_of_entry_E=rows,
            source_R=rows,
            temperature_R=torch.ones(300, device=device),
            row_J=rows.to(device),
            target_J=(7 * rows).to(device),
        )
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (hidden, head)]
        logprob, entropy = edge_logprobs(*inputs, edges, chunk=64)
        return [logprob, entropy, *torch.autograd.grad(logprob.sum(), inputs)]

    expected = logprobs(torch.device("cpu"), torch.float64)
    seen = logprobs(DEVICE, torch.bfloat16)
    for number, (ours, wanted) in enumerate(zip(seen, expected, strict=True)):
        assert _difference(ours, wanted) < (1e-5 if number < 2 else 0.005)
