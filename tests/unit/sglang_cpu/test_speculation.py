"""Chains of drafted tokens in plain torch, and that sampling with them follows the policy."""

import itertools

import pytest
import torch

from forgemq_sglang_cpu import speculation

VOCABULARY = 4
# Of the next token after each token, and of the first.
POLICY = torch.tensor(
    [
        [0.55, 0.25, 0.15, 0.05],
        [0.05, 0.15, 0.70, 0.10],
        [0.30, 0.30, 0.20, 0.20],
        [0.02, 0.90, 0.03, 0.05],
    ]
)
START = 0
LENGTH = 3
DRAWS = 20_000
CHI_SQUARE_MAX = 140.0
"""With 63 degrees of freedom it is above this once in ten million."""


def verified(candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    requests, count = candidates.shape
    predicts = torch.zeros(requests * count, dtype=torch.int32)
    accept_index = torch.full((requests, count), -1, dtype=torch.int32)
    held = torch.empty(requests, dtype=torch.int32)
    speculation.verify_sampled(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=held,
        candidates=candidates,
        target_probs=POLICY[candidates],
        retrive_index=None,
        deterministic=True,
    )
    return predicts, accept_index, held


def sampled(drafts: torch.Tensor, *, steps: int) -> tuple[torch.Tensor, float]:
    """LENGTH tokens of each request, drafted by a table, and the mean that a pass gave."""
    tokens: list[list[int]] = [[START] for _ in range(DRAWS)]
    passes = given = 0
    while unfinished := [row for row in tokens if len(row) <= LENGTH]:
        chain = [torch.tensor([row[-1] for row in unfinished])]
        for _ in range(steps):
            chain.append(drafts[chain[-1]])
        predicts, accept_index, held = verified(torch.stack(chain, 1))
        for row, places, count in zip(unfinished, accept_index, held.tolist(), strict=True):
            row += predicts[places[: count + 1].long()].tolist()
        passes, given = passes + len(unfinished), given + len(unfinished) + int(held.sum())
    return torch.tensor([row[1 : LENGTH + 1] for row in tokens]), given / passes


@pytest.mark.parametrize(
    ("drafts", "steps", "least", "most"),
    [
        (POLICY.argmax(1), 2, 1.8, 2.6),
        (POLICY.argmin(1), 2, 1.0, 1.2),
        (torch.tensor([1, 1, 3, 0]), 1, 1.05, 1.5),
    ],
    ids=["likely", "unlikely", "arbitrary"],
)
@pytest.mark.slow
def test_whatever_is_drafted_the_tokens_follow_the_policy(
    drafts: torch.Tensor, steps: int, least: float, most: float
) -> None:
    """Chi-square of 20,000 draws of three tokens against the product of the policy's numbers."""
    torch.manual_seed(20)
    drawn, accepted = sampled(drafts, steps=steps)
    assert least < accepted < most
    statistic = 0.0
    counts = torch.bincount(drawn @ torch.tensor([16, 4, 1]), minlength=VOCABULARY**LENGTH)
    for number, chain in enumerate(itertools.product(range(VOCABULARY), repeat=LENGTH)):
        path = (START, *chain)
        expected = DRAWS * float(
            torch.stack([POLICY[a, b] for a, b in itertools.pairwise(path)]).prod()
        )
        statistic += (int(counts[number]) - expected) ** 2 / expected
    assert statistic < CHI_SQUARE_MAX


def test_a_greedy_chain_holds_until_the_first_token_that_is_not_the_most_likely() -> None:
    candidates = torch.tensor([[9, 5, 6, 7], [9, 5, 0, 7], [9, 0, 6, 7]])
    likely = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    predicts = torch.zeros(12, dtype=torch.int32)
    accept_index = torch.full((3, 4), -1, dtype=torch.int32)
    held = torch.empty(3, dtype=torch.int32)
    speculation.verify_greedy(
        predicts, accept_index, held, candidates, candidates, candidates, candidates, likely, 1
    )
    assert held.tolist() == [3, 1, 0]
    assert accept_index.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1]]
    assert predicts.tolist() == [5, 6, 7, 8] * 3


def test_slots_are_written_and_read_by_request() -> None:
    table = torch.zeros((3, 8), dtype=torch.int32)
    rows, start = torch.tensor([2, 0]), torch.tensor([1, 3])
    speculation.assign_slots(
        rows, table, start, torch.tensor([3, 6]), torch.tensor([11, 12, 21, 22, 23]), 2
    )
    assert table.tolist() == [[0, 0, 0, 21, 22, 23, 0, 0], [0] * 8, [0, 11, 12, 0, 0, 0, 0, 0]]
    slots = speculation.cache_locations(
        req_pool_indices=rows,
        req_to_token=table,
        start_offset=start,
        end_offset=start + 2,
        batch_size=2,
        draft_token_num=2,
        device="cpu",
    )
    assert (slots.tolist(), slots.dtype) == ([11, 12, 21, 22], torch.int64)
    drafted, positions = torch.empty(4, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    speculation.copy_draft_cache_locations(rows, table, start, drafted, 1, 2, positions)
    assert (drafted.tolist(), positions.tolist()) == ([11, 12, 21, 22], [1, 3])


def test_a_chain_is_a_tree_without_branches_at_the_positions_that_follow() -> None:
    positions = torch.empty(6, dtype=torch.long)
    index, following, sibling = torch.full((3, 2, 3), 7, dtype=torch.long)
    unused = torch.empty(0)
    speculation.build_chain(
        *(unused, unused, torch.tensor([5, 9]), unused),
        *(positions, index, following, sibling, 1, 2, 3, None),
    )
    assert positions.tolist() == [5, 6, 7, 9, 10, 11]
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert following.tolist() == [[1, 2, -1]] * 2
    assert sibling.tolist() == [[-1, -1, -1]] * 2


def test_the_last_token_that_holds_is_the_newest_of_a_request() -> None:
    newest = torch.empty(2, dtype=torch.int32)
    tokens = torch.tensor([4, 5, 6, 7, 8, 9], dtype=torch.int32)
    speculation.copy_last_accepted(tokens, torch.tensor([1, 3]), newest, 3, 2)
    assert newest.tolist() == [4, 9]


def test_a_tree_of_drafted_tokens_is_refused_by_the_name_of_the_option() -> None:
    nothing = torch.empty(0)
    with pytest.raises(NotImplementedError, match="--speculative-eagle-topk must be 1, got 2"):
        speculation.select_drafted(0, nothing, nothing, nothing, None, 2)


def test_probabilities_outside_top_k_and_top_p_become_zero_and_the_others_sum_to_one() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.25, 0.25, 0.3, 0.2]])
    by_k = speculation.top_k_renormalised(probs, torch.tensor([2, 9]))
    assert by_k[0].tolist() == pytest.approx([0, 2 / 3, 0, 1 / 3])
    assert by_k[1].tolist() == pytest.approx(probs[1].tolist())
    by_p = speculation.top_p_renormalised(probs, torch.tensor([0.6, 1.0]))
    assert by_p[0].tolist() == pytest.approx([0, 2 / 3, 0, 1 / 3])
    assert by_p[1].tolist() == pytest.approx(probs[1].tolist())


@pytest.mark.parametrize(
    ("algorithm", "is_supported"),
    [("EAGLE", True), ("STANDALONE", True), ("EAGLE3", False), ("NGRAM", False)],
)
def test_a_cpu_drafts_with_a_head_or_a_small_model_and_sglang_refuses_the_rest_by_name(
    algorithm: str, is_supported: bool
) -> None:
    assert speculation.drafts(algorithm) is is_supported
