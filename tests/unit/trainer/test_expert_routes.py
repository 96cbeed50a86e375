"""Expert route replay: equal to per-request training with the same expert routes."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from forgemq_contracts.loss import Loss
from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.expert_routes import check_expert_routes, token_expert_routes
from forgemq_trainer.core.loss import cispo, loss_function
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.probe import probe_of
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, InvalidTreeError, read_tree
from forgemq_trainer.model import prepare
from tests.unit.trainer.scene import (
    SHAPE,
    Sample,
    adversarial_samples,
    agent_samples,
    make_model,
    make_sample,
    merge,
    routed,
    sample_entries,
)

LAYERS, TOP_K, EXPERTS = 2, 2, 4
MIXTURE = replace(SHAPE, layers=LAYERS, experts=EXPERTS, experts_per_token=TOP_K)


def _samples() -> list[Sample]:
    generator = np.random.default_rng(0)
    return [*agent_samples(generator), *adversarial_samples(generator)]


def _routed(samples: list[Sample]) -> MergedTree:
    return routed(merge(samples), layers=LAYERS, top_k=TOP_K, experts=EXPERTS)


def _path(forest: Forest, leaf: int) -> list[int]:
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = int(forest.parent_N[leaf])
    return path[::-1]


def _model(kind: str, **changes: object) -> nn.Module:
    model = make_model(kind, torch.float64, **changes)
    model.set_experts_implementation("eager")
    return model


def _with_zeros(tree: MergedTree, layers: int) -> MergedTree:
    """The tree with an engine's zeros for the first layers, which have no experts."""
    routes = np.frombuffer(tree.entry_route, "<i2").reshape(-1, LAYERS, TOP_K).copy()
    routes[:, :layers] = 0
    return msgspec.structs.replace(tree, entry_route=routes.tobytes())


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 19])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("minimax_m2", {}),
        ("glm4_moe", {}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("gpt_oss", {}),
    ],
    ids=["as chosen", "normalised", "minimax_m2", "glm4_moe", "deepseek_v3", "gpt_oss"],
)
def test_gradients_equal_per_request_training_with_the_same_expert_routes(
    *, block: int | None, kind: str, changes: dict[str, object]
) -> None:
    samples = _samples()
    model = _model(kind, **changes)
    policy = prepare(model).policy
    tree = _with_zeros(_routed(samples), policy.shape.parts.dense_layers)
    forest = read_tree(tree)
    check_expert_routes(forest, policy.shape)
    routes = token_expert_routes(forest, policy.shape)
    assert routes is not None
    leaves = np.frombuffer(tree.sample_leaf, "<i4")
    model.set_attn_implementation("eager" if kind == "gpt_oss" else "sdpa")
    for sample, leaf in zip(samples, leaves.tolist(), strict=True):
        path = _path(forest, leaf)
        for layer, router in enumerate(policy.routers):
            router.recorded_TK = torch.from_numpy(routes.expert_NLK[path, layer])
        tokens = torch.tensor([sample.tokens])
        logits = model(input_ids=tokens, use_cache=False).logits[0] / sample.temperature
        places = torch.arange(sample.first_sampled, len(sample.tokens))
        logprob = logits[places - 1].log_softmax(-1)[torch.arange(len(places)), tokens[0, places]]
        entries = sample_entries(sample, torch.float64)
        cispo(logprob, entries, ratio_cap=Loss().ratio_cap).loss.sum().backward()
    expected = _gradients(model)
    model.set_attn_implementation("forgemq_tree")
    size = block or forest.token_count
    count = forest.token_count
    blocks = tuple((start, min(start + size, count)) for start in range(0, count, size))

    def of_tree(trained: Forest) -> dict[str, torch.Tensor]:
        forward_backward(
            policy,
            Objective(forests=[trained], loss_weights=[1.0], loss=loss_function(Loss())),
            [Microbatch(groups=(0,), blocks=blocks)],
            head_chunk=8,
        )
        return _gradients(model)

    replayed, unrouted = of_tree(forest), of_tree(read_tree(merge(samples)))
    least = 1e-3 * max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        difference = float((gradient - replayed[name]).norm())
        assert difference <= 1e-12 * max(least, float(gradient.norm()))
    gate = next(n for n in expected if n.endswith(("mlp.gate.weight", "mlp.router.weight")))
    assert float((expected[gate] - unrouted[gate]).norm()) > 0.01 * float(expected[gate].norm())


def test_a_token_takes_its_first_entrys_expert_route_and_other_ones_are_counted() -> None:
    tree = _routed(_samples())
    forest = read_tree(tree)
    routes = token_expert_routes(forest, MIXTURE)
    assert routes is not None
    assert routes.disagreements == 0
    sources = forest.parent_N[forest.entry_token_E]
    shared = next(token for token in sources if (sources == token).sum() == 3)
    first, *others = np.flatnonzero(sources == shared).tolist()
    changed = forest.entry_route_ER.copy()
    changed[others[0]] = (changed[others[0]] + 1) % EXPERTS
    changed[others[1], :TOP_K] = changed[others[1], :TOP_K][::-1]  # The same set of experts.
    again = read_tree(msgspec.structs.replace(tree, entry_route=changed.tobytes()))
    routes = token_expert_routes(again, MIXTURE)
    assert routes is not None
    assert routes.disagreements == 1
    assert routes.expert_NLK[shared].reshape(-1).tolist() == changed[first].tolist()


def test_the_trainers_router_chooses_for_tokens_that_no_entry_continues() -> None:
    forest = read_tree(_routed(_samples()))
    routes = token_expert_routes(forest, MIXTURE)
    assert routes is not None
    free = np.setdiff1d(np.arange(forest.token_count), forest.parent_N[forest.entry_token_E])
    assert len(free) > 0
    assert (routes.expert_NLK[free] == EXPERTS).all()
    assert token_expert_routes(read_tree(merge(_samples())), MIXTURE) is None


def test_only_the_newest_versions_routes_of_a_completion_are_replayed() -> None:
    """The engine's routes of older tokens are those of a pass that sampled none of them."""
    generator = np.random.default_rng(0)
    tree = _routed([make_sample([1, 2, 3], [4, 5, 6, 7], generator)])
    versions = np.array([6, 6, 7, 7], "<i4").tobytes()
    forest = read_tree(msgspec.structs.replace(tree, entry_version=versions))
    routes = token_expert_routes(forest, MIXTURE)
    assert routes is not None
    # Tokens 2 to 5 are those that the four entries continue.
    chosen = routes.expert_NLK.reshape(7, -1)
    assert (chosen[[0, 1, 2, 3, 6]] == EXPERTS).all()
    assert chosen[[4, 5]].tolist() == forest.entry_route_ER[[2, 3]].tolist()
    assert routes.disagreements == 0


def test_an_older_weight_span_neither_lends_its_routes_nor_counts_as_a_disagreement() -> None:
    """Of two completions of one context, the first goes on under newer weights."""
    generator = np.random.default_rng(0)
    samples = [make_sample([1, 2], tokens, generator) for tokens in ([3, 4], [3, 5])]
    tree = _routed(samples)
    routes = read_tree(tree).entry_route_ER.copy()
    routes[0] = (routes[0] + 1) % EXPERTS
    changed = msgspec.structs.replace(
        tree,
        entry_route=routes.tobytes(),
        entry_version=np.array([6, 7, 6, 6], "<i4").tobytes(),
    )
    found = token_expert_routes(read_tree(changed), MIXTURE)
    assert found is not None
    assert found.expert_NLK[1].reshape(-1).tolist() == routes[2].tolist()
    assert found.disagreements == 0


def test_a_probes_entries_are_of_its_version_and_keep_their_routes() -> None:
    """The budget leaves out the newest entry of the second sample; its older two are of 6."""
    generator = np.random.default_rng(0)
    tree = _routed([make_sample([1, 2], tokens, generator) for tokens in ([3, 4], [3, 4, 5])])
    versions = np.array([7, 7, 6, 6, 7], "<i4").tobytes()
    forest = read_tree(msgspec.structs.replace(tree, entry_version=versions))
    part = probe_of(forest, version=7, tokens_max=4)
    assert part is not None
    assert part.entry_version_E.tolist() == [7, 7]
    assert part.entry_is_routed_E.tolist() == [True, True]
    assert part.entry_route_ER.tolist() == forest.entry_route_ER[[0, 1]].tolist()


@pytest.mark.parametrize(("experts", "itemsize"), [(4, 1), (255, 1), (256, 2), (512, 2)])
def test_a_tokens_experts_are_of_the_narrowest_dtype_and_the_plan_counts_them(
    experts: int, itemsize: int
) -> None:
    tree = routed(merge(_samples()), layers=LAYERS, top_k=TOP_K, experts=experts)
    shape = replace(MIXTURE, experts=experts)
    routes = token_expert_routes(read_tree(tree), shape)
    assert routes is not None
    assert routes.expert_NLK.dtype.itemsize == itemsize
    assert routes.expert_NLK.max() == experts
    wider = replace(shape, experts=experts + 256)
    grown = wider.saved_bytes_per_token(is_carried=False) - shape.saved_bytes_per_token(
        is_carried=False
    )
    of_routes = LAYERS * TOP_K * (2 - itemsize)
    assert grown == LAYERS * 256 * shape.wide_bytes + of_routes


@pytest.mark.parametrize(
    ("layers", "experts", "match"),
    [(3, 4, "the model has 3 layers"), (2, 3, "experts must be in 0..2")],
)
def test_expert_routes_of_another_model_are_refused(layers: int, experts: int, match: str) -> None:
    forest = read_tree(_routed(_samples()))
    with pytest.raises(InvalidTreeError, match=match):
        check_expert_routes(forest, replace(MIXTURE, layers=layers, experts=experts))


def test_one_expert_twice_is_refused() -> None:
    tree = _routed(_samples())
    forest = read_tree(tree)
    routes = np.zeros_like(forest.entry_route_ER)
    twice = read_tree(msgspec.structs.replace(tree, entry_route=routes.tobytes()))
    with pytest.raises(InvalidTreeError, match="one expert twice"):
        check_expert_routes(twice, MIXTURE)
