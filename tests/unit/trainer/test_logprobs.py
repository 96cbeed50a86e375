"""The chunked head against plain log-softmax."""

import numpy as np
import pytest
import torch

from forgemq_trainer.core.logprobs import edge_logprobs, edges_of, products_of
from forgemq_trainer.core.tree import read_tree
from tests.unit.trainer.scene import Sample, adversarial_samples, merge

VOCABULARY = 43


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_values_entropy_and_gradients_equal_plain_log_softmax(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    forest = read_tree(merge(adversarial_samples(np.random.default_rng(0))))
    edges = edges_of(forest, start=0, end=forest.token_count)
    hidden = torch.randn(len(edges.source_R), 6, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCABULARY, 6, generator=generator, dtype=torch.float64)
    owed = torch.randn(len(edges.row_J), generator=generator, dtype=torch.float64)
    hidden.requires_grad_()
    head.requires_grad_()

    plain = (hidden @ head.t() / edges.temperature_R[:, None]).log_softmax(-1)
    expected = plain[edges.row_J, edges.target_J]
    expected_gradients = torch.autograd.grad((expected * owed).sum(), (hidden, head))
    logprob, entropy = edge_logprobs(hidden, head, edges, chunk=chunk)
    gradients = torch.autograd.grad((logprob * owed).sum(), (hidden, head))

    assert torch.allclose(logprob, expected, rtol=1e-13, atol=0)
    assert torch.allclose(entropy, -(plain.exp() * plain).sum(-1), rtol=1e-10, atol=0)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, wanted, rtol=1e-12, atol=1e-14)


def test_products_keep_bfloat16_weights_and_other_dtypes_multiply_in_full() -> None:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    for dtype, precision in (
        (torch.bfloat16, "tf32"),
        (torch.float32, "ieee"),
        (torch.float16, "ieee"),
    ):
        with products_of(dtype):
            assert settings.fp32_precision == precision
        assert settings.fp32_precision == before


def test_entries_of_one_token_share_an_edge_and_siblings_share_a_row() -> None:
    twin = Sample(tokens=(1, 2, 3), first_sampled=2, advantage=1.0, behaviour=(-1.0,))
    sibling = Sample(tokens=(1, 2, 4), first_sampled=2, advantage=1.0, behaviour=(-1.0,))
    colder = Sample((1, 2, 3), 2, 1.0, (-1.0,), temperature=0.5)
    forest = read_tree(merge([twin, twin, sibling, colder]))
    edges = edges_of(forest, start=0, end=forest.token_count)
    assert edges.source_R.tolist() == [1, 1]
    assert edges.temperature_R.tolist() == [0.5, 1.0]
    assert edges.row_J.tolist() == [0, 1, 1]
    assert edges.target_J.tolist() == [3, 4, 3]
    assert edges.edge_of_entry_E.tolist() == [2, 2, 1, 0]


def test_each_block_has_the_entries_that_continue_its_tokens() -> None:
    forest = read_tree(merge(adversarial_samples(np.random.default_rng(0))))
    parts = [
        edges_of(forest, start=start, end=min(start + 3, forest.token_count))
        for start in range(0, forest.token_count, 3)
    ]
    entries = torch.cat([part.entry_E for part in parts])
    assert sorted(entries.tolist()) == list(range(forest.entry_count))
