"""Chains of drafted tokens in plain torch: what SGLang has only as GPU kernels.

A chain is one drafted token after the other, without branches (`--speculative-eagle-topk 1`). Each
function has the arguments of the function of sglang 0.5.23 that it stands for, and writes to those
that SGLang names mutable. `speculative_engine.py` puts them in place.

Sampling is exact. At each position of the chain a token is drawn from the policy's own distribution
there; it is kept, and the chain goes on while the drawn token is the drafted one. So the law of the
output is the policy's, whatever is drafted. A request's sampling seed has no part in it.
"""

# B requests, N drafted tokens with the one before them, V vocabulary, M requests at most, C context

import torch
from torch import Tensor


def drafts(algorithm: str) -> bool:
    """Whether a CPU drafts by this algorithm of SGLang.

    EAGLE, of which NEXTN is one, drafts with a head; STANDALONE drafts with a small model.
    """
    return algorithm in ("EAGLE", "STANDALONE")


def cache_locations(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: object,
) -> Tensor:
    """Cache slots of the next `draft_token_num` tokens of each request, (B * N), int64."""
    del end_offset, batch_size, device
    return _slots(req_pool_indices, req_to_token, start_offset, draft_token_num).long()


def copy_draft_cache_locations(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_cols: int,
    positions: Tensor | None = None,
    mrope: Tensor | None = None,
) -> None:
    """Write the slots of the tokens to draft to `out_cache_loc`, first positions to `positions`."""
    _check_chain(topk)
    if mrope is not None:
        raise NotImplementedError("positions in several dimensions cannot be drafted on a CPU")
    out_cache_loc.copy_(_slots(req_pool_indices, req_to_token, seq_lens, num_cols))
    if positions is not None:
        positions.copy_(seq_lens)


def assign_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write new slots to the table `req_to_token`, request by request."""
    del batch_size
    first = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        taken = out_cache_loc[first : first + end - start]
        req_to_token[row, start:end] = taken.to(req_to_token.dtype)
        first += end - start


def copy_last_accepted(
    accept_tokens: Tensor,
    accept_lens: Tensor,
    bonus_tokens: Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write the last token of each request that holds to `bonus_tokens`."""
    last = (accept_lens.long() - 1).view(batch_size, 1)
    bonus_tokens.copy_(accept_tokens.view(batch_size, accept_stride).gather(1, last).view(-1))


def build_chain(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: object,
) -> None:
    """Describe each chain as a tree; causal attention needs no mask of it."""
    del parent_list, top_scores_index, tree_mask, spec_steps, tree_mask_mode
    _check_chain(topk)
    requests, count = seq_lens.numel(), num_verify_tokens
    positions.copy_((seq_lens.long().view(-1, 1) + torch.arange(count)).view(-1))
    retrieve_index.copy_(torch.arange(requests * count).view(requests, count))
    retrieve_next_token[:, :-1] = torch.arange(1, count)
    retrieve_next_token[:, -1] = -1
    retrieve_next_sibling.fill_(-1)


def verify_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep what is drafted as long as it is the policy's most likely token."""
    del retrieve_index, retrieve_next_token, retrieve_next_sibling
    _check_chain(abs(topk))
    _accept(predicts, accept_index, accept_token_num, candidates, target_predict)
    return predicts, accept_index, accept_token_num


def verify_sampled(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    target_probs: Tensor,
    **unused: object,
) -> None:
    """Draw a token at each position, and keep the draws as long as they are what is drafted.

    Args:
        predicts: (B * N), gets the drawn tokens.
        accept_index: (B, N), gets the positions in `predicts` that hold, then -1.
        accept_token_num: (B), gets how many drafted tokens hold, 0 to N - 1.
        candidates: (B, N), the newest token and those drafted after it.
        target_probs: (B, N, V), the policy's distributions after each of them.
        unused: SGLang's links of a tree, its random numbers and thresholds.
    """
    del unused
    drawn = torch.multinomial(target_probs.flatten(0, 1), 1).view(candidates.shape)
    _accept(predicts, accept_index, accept_token_num, candidates, drawn)


def top_k_renormalised(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Rows of `probs` with all but their `top_ks` most likely tokens at 0, and sum 1."""
    ranked, order = probs.sort(dim=-1, descending=True)
    is_out = torch.arange(probs.shape[-1]) >= top_ks.view(-1, 1)
    return _renormalised(ranked.masked_fill(is_out, 0.0), order)


def top_p_renormalised(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Rows of `probs` with only the fewest tokens that have `top_ps` together, and sum 1."""
    ranked, order = probs.sort(dim=-1, descending=True)
    is_out = ranked.cumsum(-1) - ranked > top_ps.view(-1, 1)
    return _renormalised(ranked.masked_fill(is_out, 0.0), order)


def select_drafted(
    i: int,
    topk_p: Tensor,
    topk_index: Tensor,
    hidden_states: Tensor,
    scores: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The next input of the draft: its most likely token, and its own state."""
    del i, scores
    _check_chain(topk)
    return (
        topk_index.flatten(),
        hidden_states,
        topk_p,
        (topk_p.unsqueeze(1), topk_index, topk_index),
    )


def _accept(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    chosen: Tensor,
) -> None:
    requests, count = candidates.shape
    held = (candidates[:, 1:] == chosen[:, :-1]).long().cumprod(1).sum(1)
    predicts.copy_(chosen.reshape(-1))
    accept_token_num.copy_(held)
    places = torch.arange(requests * count).view(requests, count)
    accept_index.copy_(torch.where(torch.arange(count) <= held.view(-1, 1), places, -1))


def _renormalised(ranked: Tensor, order: Tensor) -> Tensor:
    kept = ranked / ranked.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def _slots(rows: Tensor, req_to_token: Tensor, start: Tensor, count: int) -> Tensor:
    columns = start.long().view(-1, 1) + torch.arange(count)
    return req_to_token[rows.long().view(-1, 1), columns].reshape(-1)


def _check_chain(topk: int) -> None:
    if topk != 1:
        raise NotImplementedError(
            f"on a CPU drafted tokens form a chain: --speculative-eagle-topk must be 1, got {topk}"
        )
