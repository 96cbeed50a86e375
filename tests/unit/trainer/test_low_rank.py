"""Adapters: gradients of per-request training, frozen weights, memory and FLOPs."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch_allocation import peak_allocated_bytes

from forgemq_contracts.lora import ATTENTION_TARGETS, MLP_TARGETS, AdapterTarget, Lora
from forgemq_contracts.loss import Loss
from forgemq_trainer.core.flops import flops
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.low_rank import add_adapters, merge_factors
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.precision import make_precise
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, joined, read_tree
from forgemq_trainer.loading import fill_adapters
from forgemq_trainer.model import LoadedModel, prepare, with_adapters
from tests.unit.trainer.scene import (
    Sample,
    adversarial_samples,
    agent_samples,
    make_model,
    merge,
    sample_entries,
)

LOSS = loss_function(Loss())
ALL = ATTENTION_TARGETS + MLP_TARGETS
slow = partial(pytest.param, marks=pytest.mark.slow)


def adapted(kind: str, dtype: torch.dtype, *targets: AdapterTarget, **sizes: object) -> LoadedModel:
    """A tiny model with adapters whose B is not zero, so that A has gradients too."""
    model = make_model(kind, dtype, **sizes)
    if kind == "qwen3_moe":
        model.set_experts_implementation("eager")  # type: ignore[operator]  # transformers' method
    lora = Lora(rank=3, alpha=6.0, targets=targets)
    loaded = with_adapters(prepare(model), lora)
    fill_adapters(loaded.model, None, seed=5)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in loaded.model.named_parameters():
        if name.endswith("b_OR"):
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return loaded


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def merged(model: nn.Module, *, scale: float) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = model.state_dict()
    merge_factors(state, scale=scale)
    return state


def per_request(model: nn.Module, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Train every request alone, with torch's causal attention."""
    model.set_attn_implementation("sdpa")  # type: ignore[operator]  # transformers' method
    count = sum(len(sample.behaviour) for sample in samples)
    for sample in samples:
        tokens = torch.tensor([sample.tokens])
        logits = model(input_ids=tokens, use_cache=False).logits[0] / sample.temperature
        sampled = torch.arange(sample.first_sampled, len(sample.tokens))
        shares = logits[sampled - 1].log_softmax(-1)
        logprob = shares[torch.arange(len(sampled)), tokens[0, sampled]]
        result = LOSS(logprob, sample_entries(sample, logprob.dtype))
        (result.loss.sum() / count).backward()  # type: ignore[no-untyped-call]
    return gradients_of(model)


def trained_tree(loaded: LoadedModel, forest: Forest, *, block: int) -> dict[str, torch.Tensor]:
    count = forest.token_count
    blocks = tuple((start, min(start + block, count)) for start in range(0, count, block))
    forward_backward(
        prepare(loaded.model).policy,
        Objective(
            forests=[forest], loss_weights=group_loss_weights([forest], loss=Loss()), loss=LOSS
        ),
        [Microbatch(groups=(0,), blocks=blocks)],
        head_chunk=8,
    )
    return gradients_of(loaded.model)


@pytest.mark.parametrize("targets", [ALL, ("o_proj",), ("k_proj", "down_proj")])
@pytest.mark.parametrize(
    "kind",
    ["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "qwen3_moe"))],
)
def test_an_adapters_gradients_on_a_tree_are_those_of_its_requests(
    kind: str, targets: tuple[AdapterTarget, ...]
) -> None:
    """Whole and in blocks; nothing else has a gradient."""
    if kind == "qwen3_moe":
        targets = tuple(each for each in targets if each in ATTENTION_TARGETS)
    generator = np.random.default_rng(3)
    samples = [*agent_samples(generator), *adversarial_samples(generator)]
    loaded = adapted(kind, torch.float64, *targets)
    make_precise(loaded.model)
    expected = per_request(loaded.model, samples)
    assert len(expected) == 2 * 2 * len(targets)  # Two factors in each of two layers.
    forest = read_tree(merge(samples))
    floor = 1e-3 * max(gradient.norm() for gradient in expected.values())
    for block in (forest.token_count, 37):
        gradients = trained_tree(loaded, forest, block=block)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            difference = (gradient - expected[name]).norm()
            assert difference <= 1e-12 * max(expected[name].norm(), floor), name


def test_the_merged_weights_are_the_adapted_models() -> None:
    """Stock transformers with the merged weights gives the adapted model's logits."""
    loaded = adapted("qwen2", torch.float64, *ALL)
    plain = make_model("qwen2", torch.float64)
    plain.load_state_dict(merged(loaded.model, scale=2.0))
    make_precise(plain)
    plain.set_attn_implementation("sdpa")  # type: ignore[operator]  # transformers' method
    loaded.model.set_attn_implementation("sdpa")  # type: ignore[operator]  # transformers' method
    with torch.no_grad():
        tokens = torch.arange(1, 30)[None]
        logits = [model(tokens).logits for model in (loaded.model, plain)]
        base = make_model("qwen2", torch.float64)(tokens).logits
    assert float((logits[1] - logits[0]).abs().max()) < 1e-12
    assert float((logits[1] - base).abs().max()) > 0.1


def test_a_new_adapter_changes_nothing_and_is_drawn_from_the_seed() -> None:
    drawn = []
    for seed in (1, 1, 2):
        model = make_model("qwen3", torch.float32)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        add_adapters(model, Lora(rank=4, targets=("q_proj",)))
        fill_adapters(model, None, seed=seed)
        after = merged(model, scale=8.0)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        drawn.append(torch.stack([p for n, p in model.named_parameters() if n.endswith("a_RI")]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert 0.16 < float(drawn[0].detach().abs().max()) < 32**-0.5


def test_a_target_that_is_no_linear_layer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^lora\.targets: gate_proj is no linear layer of Qwen3M"):
        add_adapters(make_model("qwen3_moe", torch.float32), Lora(rank=4))


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("target", MLP_TARGETS)
def test_an_mlp_beside_experts_gets_no_adapter(kind: str, target: AdapterTarget) -> None:
    """Both families have a dense first layer, and an MLP that all tokens share in the others."""
    with pytest.raises(ValueError, match=rf"^lora\.targets: {target} is no .* has o_proj \(in a"):
        adapted(kind, torch.float32, "o_proj", target)


def test_frozen_weights_cost_no_gradient_in_the_formula() -> None:
    """6 W t + 14 Q L p + 8 H V r becomes (4 W + 6 A) t + 14 Q L p + 6 H V r."""
    loaded = adapted("qwen3", torch.float32, "q_proj", "down_proj")
    full = flops(
        prepare(make_model("qwen3", torch.float32)).policy.shape, tokens=7, pairs=9, rows=4
    )
    low = flops(loaded.policy.shape, tokens=7, pairs=9, rows=4)
    parameters = sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
    assert parameters == 2 * 3 * ((32 + 32) + (48 + 32))
    assert low.weights == pytest.approx(full.weights * 4 / 6 + 6 * parameters * 7)
    assert low.attention == full.attention
    assert low.head == pytest.approx(full.head * 6 / 8)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32"), slow(torch.bfloat16, id="bf16")]
)
@pytest.mark.parametrize(
    ("targets", "share", "sizes"),
    [
        (ALL, 1.0, {}),
        slow(ATTENTION_TARGETS, 0.5, {}),
        slow(("q_proj", "v_proj"), 1.0, {"intermediate_size": 512}),
        slow(("k_proj", *MLP_TARGETS), 0.4, {"vocab_size": 4096}),
    ],
)
def test_the_measured_peak_is_within_a_twentieth_of_the_predicted(
    targets: tuple[AdapterTarget, ...], share: float, sizes: dict[str, int], dtype: torch.dtype
) -> None:
    """Counts torch's allocations, without the adapters' gradients."""
    changes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4}
    loaded = adapted("qwen3", dtype, *targets, **(changes | sizes))
    generator = np.random.default_rng(0)
    samples = agent_samples(
        generator, rollouts=5, turns=4, prompt=60, act=20, observe=30, vocabulary=60
    )
    forest, shape = joined([read_tree(merge(samples))]), loaded.policy.shape
    whole = shape.block_bytes(forest.token_count, chunk=32, is_carried=False)
    (microbatch,) = plan_step([forest], shape=shape, budget_bytes=int(whole * share), head_chunk=32)
    assert not microbatch.is_offloaded  # torch would count the mapped file too

    def run() -> None:
        forward_backward(
            loaded.policy,
            Objective(forests=[forest], loss_weights=[1.0], loss=LOSS),
            [microbatch],
            head_chunk=32,
        )

    run()  # Makes the adapters' gradients.
    assert peak_allocated_bytes(run) == pytest.approx(microbatch.predicted_bytes, rel=0.05)
    is_kept = microbatch.recomputed_layers == 0 and len(microbatch.blocks) == 1
    assert is_kept == (share == 1.0)
