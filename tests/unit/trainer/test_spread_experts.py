"""Which experts can be spread, and how rows are shared out over parts."""

from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.spread_experts import parts_of
from forgemq_trainer.ranks.expert_groups import ExpertGroups, spread_experts
from tests.unit.trainer.scene import make_model


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
def test_parts_have_every_row_once_and_no_rank_receives_more_than_the_most(
    ranks: int, own: int, rows_max: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, 9, (ranks, ranks * own)) * generator.integers(
        0, 2, (ranks, ranks * own)
    )
    of_rank = [parts_of(counts, rank=rank, rows_max=rows_max) for rank in range(ranks)]
    received = counts.sum(axis=0).reshape(ranks, own).sum(axis=1)
    fewest = max(1, -(-int(received.max()) // rows_max))
    assert {len(parts) for parts in of_rank} == {fewest}
    for rank, parts in enumerate(of_rank):
        assert np.array_equal(sum(part.sent_E for part in parts), counts[rank])
        assert max(part.received_XL.sum() for part in parts) <= rows_max
        mine = slice(rank * own, (rank + 1) * own)
        for number, part in enumerate(parts):
            # What this rank receives is what each rank sends to its experts in the same part.
            sent = np.stack([other[number].sent_E[mine] for other in of_rank])
            assert np.array_equal(part.received_XL, sent)


def test_experts_of_an_unknown_class_are_refused_by_name() -> None:
    model = make_model("llama", torch.float32)
    with pytest.raises(SettingsError, match=r"trainer\.expert_ranks: the experts of Llama"):
        spread_experts(model, cast(ExpertGroups, None))  # No layer gets that far.
