"""A draft head's loss and gradients on trees: those of its samples one by one, and no other's."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.draft_loss import draft_loss
from forgemq_trainer.core.drafting import Drafting, row_count, with_lone_roots
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.precision import make_precise
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.draft_head import LoadedHead, with_draft_head
from forgemq_trainer.model import LoadedModel, prepare
from tests.unit.trainer.head_scene import save_head
from tests.unit.trainer.scene import (
    Sample,
    adversarial_samples,
    agent_samples,
    make_model,
    make_sample,
    merge,
)

TOP_K = 5
Gradients = dict[str, torch.Tensor]


def _groups(seed: int) -> list[list[Sample]]:
    generator = np.random.default_rng(seed)
    return [
        agent_samples(generator),
        adversarial_samples(generator),
        agent_samples(generator, is_stripped=True),
    ]


def _loaded(folder: Path, kind: str, *, depths: int) -> tuple[LoadedModel, LoadedHead]:
    loaded = prepare(make_model(kind, torch.float64))
    head, _ = with_draft_head(save_head(folder), loaded, top_k=TOP_K, depths=depths)
    return loaded, head


def _take_gradients(module: nn.Module) -> Gradients:
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    module.zero_grad(set_to_none=True)
    return gradients


def _trees(
    loaded: LoadedModel,
    head: LoadedHead | None,
    forests: Sequence[Forest],
    *,
    block: int | None,
    is_offloaded: bool = False,
) -> tuple[float, Gradients, Gradients]:
    """Loss, gradients of the head and of the policy, of a step over the forests at once."""
    count = sum(forest.token_count for forest in forests)
    size = count if block is None else block
    blocks = tuple((start, min(start + size, count)) for start in range(0, count, size))
    drafting = None if head is None else Drafting(head.model, forests, loss_weight=0.7)
    forward_backward(
        loaded.policy,
        Objective(
            forests=forests,
            loss_weights=group_loss_weights(forests, loss=Loss()),
            loss=loss_function(Loss()),
        ),
        [Microbatch(groups=tuple(range(len(forests))), blocks=blocks, is_offloaded=is_offloaded)],
        head_chunk=8,
        drafting=drafting,
    )
    totals = [] if drafting is None else drafting.totals
    return (
        sum(0.7 * total.loss / total.rows for total in totals),
        {} if head is None else _take_gradients(head.layer),
        _take_gradients(loaded.model),
    )


def _row_loss(teacher: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The loss of each row, term by term as the module's text defines it."""
    p, q = teacher.softmax(-1), logits.softmax(-1)
    top_p, top = p.topk(TOP_K, dim=-1)
    top_q = q.gather(-1, top)
    tail_p, tail_q = 1 - top_p.sum(-1), 1 - top_q.sum(-1)
    return (top_p * (top_p / top_q).log()).sum(-1) + tail_p * (tail_p / tail_q).log()


def _of_samples(
    loaded: LoadedModel, head: LoadedHead, groups: Sequence[Sequence[Sample]], *, depths: int
) -> tuple[float, Gradients]:
    """Each sample alone, with torch's causal attention; a token that k samples share counts 1/k.

    The samples of a group share a token if they are equal up to and with it.
    """
    model, layer = loaded.model, head.layer
    rows = [
        sum(
            len({s.tokens[: n + 1] for s in samples for n in range(depth, len(s.tokens))})
            for samples in groups
        )
        for depth in range(1, depths + 1)
    ]
    total = 0.0
    for samples in groups:
        prefixes = [s.tokens[: n + 1] for s in samples for n in range(len(s.tokens))]
        for sample in samples:
            tokens = torch.tensor(sample.tokens)
            with torch.no_grad():
                state = _causal_states(model, tokens)
                teacher = state @ model.get_output_embeddings().weight.t()
                embedded = model.get_input_embeddings()(tokens)
            share = torch.tensor(
                [1 / prefixes.count(sample.tokens[: n + 1]) for n in range(len(tokens))],
                dtype=torch.float64,
            )
            before = state
            for depth in range(1, depths + 1):
                # Row i of this is the row of token i + 1, whose state before is that of token i.
                own = _causal_layer(layer, embedded[1:], before[:-1])
                logits = own @ model.get_output_embeddings().weight.t().detach()
                loss = _row_loss(teacher[1:], logits) * share[1:]
                part = 0.7 * loss[depth - 1 :].sum() / rows[depth - 1]
                if len(tokens) > depth:
                    part.backward()
                    total += float(part.detach())
                before = torch.cat((state[:1], own.detach()))
    return total, _take_gradients(layer)


def _causal_states(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("sdpa")
    output = model.get_decoder()(input_ids=tokens[None], use_cache=False)
    model.set_attn_implementation("forgemq_tree")
    return output.last_hidden_state[0]


def _causal_layer(layer: nn.Module, embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The engine's forward: no input norm, no final norm, one causal layer."""
    if len(embedded) == 0:
        return embedded
    hidden = layer.fc(torch.cat((embedded, before), dim=-1))
    inner, attention = layer.layers[0], layer.layers[0].self_attn
    count = len(hidden)
    cos, sin = layer.rotary_embedding(hidden[None], torch.arange(count)[None])

    def heads(projection: nn.Module) -> torch.Tensor:
        return projection(hidden).view(count, -1, 8).transpose(0, 1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos[0] + torch.cat((-right, left), dim=-1) * sin[0]

    query, key, value = (
        rotated(heads(attention.q_proj)),
        rotated(heads(attention.k_proj)).repeat_interleave(2, dim=0),
        heads(attention.v_proj).repeat_interleave(2, dim=0),
    )
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + attention.o_proj(output.transpose(0, 1).reshape(count, -1))
    return hidden + inner.mlp(inner.post_attention_layernorm(hidden))


def _worst(left: Gradients, right: Gradients) -> float:
    assert left.keys() == right.keys()
    return max(float((left[n] - right[n]).norm() / left[n].norm()) for n in left)


@pytest.mark.parametrize("depths", [1, 2, 3])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.slow
def test_tree_rows_train_the_head_as_the_rows_of_each_sample_do(
    tmp_path: Path, kind: str, depths: int
) -> None:
    loaded, head = _loaded(tmp_path, kind, depths=depths)
    make_precise(loaded.model)
    groups = _groups(3)
    expected_loss, expected = _of_samples(loaded, head, groups, depths=depths)
    forests = [read_tree(merge(samples, f"g-{n}")) for n, samples in enumerate(groups)]
    for block, is_offloaded in ((None, False), (37, False), (11, True)):
        loss, gradients, _ = _trees(loaded, head, forests, block=block, is_offloaded=is_offloaded)
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert _worst(expected, gradients) <= 1e-12
    assert len(expected) == len(list(head.layer.parameters()))


@pytest.mark.parametrize("block", [None, 37])
def test_a_head_changes_no_bit_of_the_policys_gradients(tmp_path: Path, block: int | None) -> None:
    loaded, head = _loaded(tmp_path, "qwen3", depths=2)
    forests = [read_tree(merge(samples, f"g-{n}")) for n, samples in enumerate(_groups(3))]
    _, _, alone = _trees(loaded, None, forests, block=block)
    _, _, beside = _trees(loaded, head, forests, block=block)
    assert alone.keys() == beside.keys()
    assert all(torch.equal(alone[name], beside[name]) for name in alone)


def test_the_head_alone_gives_the_policy_no_gradient(tmp_path: Path) -> None:
    """A policy loss of weight 0 leaves zeros; the head's own would show in embedding and head."""
    loaded, head = _loaded(tmp_path, "llama", depths=2)
    forest = read_tree(merge(_groups(3)[0]))
    forward_backward(
        loaded.policy,
        Objective(forests=[forest], loss_weights=[0.0], loss=loss_function(Loss())),
        [Microbatch(groups=(0,), blocks=((0, forest.token_count),))],
        head_chunk=8,
        drafting=Drafting(head.model, [forest], loss_weight=1.0),
    )
    assert min(g.abs().max() for g in _take_gradients(head.layer).values()) > 0
    assert max(g.abs().max() for g in _take_gradients(loaded.model).values()) == 0


def _compare(p: Sequence[float], q: Sequence[float], *, top_k: int) -> tuple[float, float]:
    """Loss and overlap of one row with these distributions, through a head of the identity."""
    state, teacher = (torch.tensor([list(x)], dtype=torch.float64).log() for x in (q, p))
    totals, _ = draft_loss(
        state,
        teacher,
        torch.eye(len(p), dtype=torch.float64),
        is_row_T=torch.tensor([True]),
        top_k=top_k,
        chunk=1,
    )
    return totals.loss, totals.overlap


def test_the_loss_of_a_row_by_hand() -> None:
    """K = 2: buckets 1/2, 1/4 and 1/4 against 1/4, 1/4 and 1/2; (ln 2)/2 - (ln 2)/4."""
    p, q = (0.5, 0.25, 0.125, 0.125), (0.25, 0.25, 0.375, 0.125)
    loss, overlap = _compare(p, q, top_k=2)
    assert loss == pytest.approx(np.log(2) / 4, abs=1e-15)
    assert overlap == pytest.approx(0.25 + 0.25 + 0.125 + 0.125, abs=1e-15)


def test_the_loss_is_0_if_the_buckets_are_equal_and_above_0_otherwise() -> None:
    p = (0.5, 0.25, 0.125, 0.125)
    assert _compare(p, (0.5, 0.25, 0.2, 0.05), top_k=2)[0] == pytest.approx(0, abs=1e-15)
    # More than the policy on its top tokens: without the tail this would be below 0.
    assert _compare(p, (0.6, 0.3, 0.05, 0.05), top_k=2)[0] > 0.01
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        p, q = torch.rand(2, 6, generator=generator, dtype=torch.float64).pow(4).add(1e-9)
        for top_k in (1, 3, 6):
            assert _compare((p / p.sum()).tolist(), (q / q.sum()).tolist(), top_k=top_k)[0] > 1e-6


@pytest.mark.parametrize("top_k", [1, 4, 12, 99])
def test_the_gradient_is_that_of_finite_differences(top_k: int) -> None:
    torch.manual_seed(0)
    state, teacher = torch.randn(2, 7, 6, dtype=torch.float64)
    head = torch.randn(12, 6, dtype=torch.float64)
    is_row = torch.tensor([True, True, False, True, True, True, True])

    def total(states: torch.Tensor) -> tuple[float, torch.Tensor]:
        totals, grad = draft_loss(states, teacher, head, is_row_T=is_row, top_k=top_k, chunk=3)
        return totals.loss, grad

    _, grad = total(state)
    for row in range(7):
        for column in range(6):
            step = torch.zeros_like(state)
            step[row, column] = 1e-6
            slope = (total(state + step)[0] - total(state - step)[0]) / 2e-6
            assert grad[row, column].item() == pytest.approx(slope, abs=1e-8)
    assert grad[2].abs().max() == 0


def test_a_tail_with_no_float_left_moves_nothing() -> None:
    """In float32 the policy is certain: its tail is 0, and the head's may be too."""
    teacher = torch.tensor([[200.0, 0.0, -3.0], [200.0, 0.0, -3.0]])
    state = torch.tensor([[1.0, 2.0, 0.5], [300.0, 0.0, 0.0]], requires_grad=False)
    totals, grad = draft_loss(
        state, teacher, torch.eye(3), is_row_T=torch.tensor([True, True]), top_k=1, chunk=2
    )
    assert totals.loss == pytest.approx(float(-state[0].log_softmax(-1)[0]), rel=1e-6)
    assert torch.isfinite(grad).all()
    assert grad[1].abs().max() == 0


def test_every_root_is_alone_and_the_layout_stays() -> None:
    """Tokens 5 6 7 with children; a root of one token with two children; a lone root."""
    generator = np.random.default_rng(0)
    samples = [
        make_sample(context, sampled, generator)
        for context, sampled in (([5, 6, 7], [8, 9]), ([5, 6, 7], [10]), ([20], [21]), ([20], [22]))
    ]
    forest = read_tree(merge(samples))
    rows = with_lone_roots(forest)
    assert forest.parent_N.tolist() == [-1, 0, 1, 2, 3, 2, -1, 6, 6]
    assert rows.parent_N.tolist() == [-1, -1, 1, 2, 3, 2, -1, -1, -1]
    assert rows.position_N.tolist() == [0, 0, 1, 2, 3, 2, 0, 0, 0]
    assert rows.subtree_end_N.tolist() == [1, 6, 6, 5, 5, 6, 7, 8, 9]
    assert rows.segment_start_M.tolist() == [0, 1, 3, 5, 6, 7, 8]
    assert rows.segment_end_M.tolist() == [1, 3, 5, 6, 7, 8, 9]
    assert rows.segment_parent_M.tolist() == [-1, -1, 1, 1, -1, -1, -1]
    assert [row_count(forest, depth) for depth in range(5)] == [7, 4, 3, 1, 0]


def test_a_head_that_is_certain_of_wrong_tokens_has_a_finite_gradient() -> None:
    """Its tail has a log-probability of -200: p_tail / q_tail is no float32."""
    state = torch.tensor([[200.0, 0.0, 0.0]])
    teacher = torch.tensor([[1.0, 0.0, 0.0]])
    totals, grad = draft_loss(
        state, teacher, torch.eye(3), is_row_T=torch.tensor([True]), top_k=1, chunk=1
    )
    p = teacher[0].softmax(-1).tolist()
    assert totals.loss > 80
    assert grad[0].tolist() == pytest.approx([1 - p[0], -p[1], -p[2]], abs=1e-6)


def test_a_narrow_head_keeps_its_rotary_frequencies(tmp_path: Path) -> None:
    wide, narrow = (
        with_draft_head(save_head(tmp_path), prepare(make_model("qwen3", dtype)), top_k=TOP_K)[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert narrow.layer.fc.weight.dtype == torch.bfloat16
    frequencies = [head.layer.rotary_embedding.frequency for head in (wide, narrow)]
    assert torch.equal(frequencies[0], frequencies[1])
    assert frequencies[1].dtype == torch.float32
