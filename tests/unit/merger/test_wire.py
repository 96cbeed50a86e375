"""What is on the wire is what was sampled: exact reconstruction of random groups."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_merger.core.merger import MergerCore
from tests.unit.merger.records import feed, finished, name, only_summary, read_back, scored


@st.composite
def histories(draw: st.DrawFn):
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=5)
    records, lengths = [], []
    for number in range(draw(st.integers(1, 10))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        shared = draw(st.integers(0, lengths[parent])) if parent is not None else 0
        context, output = draw(tokens), draw(tokens)
        support = draw(st.sampled_from(["full", "full", "top_p"]))
        records.append(finished(number, parent, shared, context, output, support=support))
        lengths.append(shared + len(context) + len(output))
    chosen = draw(st.lists(st.sampled_from(range(len(records))), unique=True))
    return records, sorted(chosen)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(histories())
def test_the_wire_reconstructs_every_sample_exactly(history):
    records, chosen = history
    outputs = feed(MergerCore(4), *records, scored(*chosen))
    full: list[list[int]] = []
    for record in records:
        parent = [] if record.parent_id is None else full[int(record.parent_id, 16)]
        full.append(
            parent[: record.shared_prefix_tokens]
            + unpack_ids(record.context)
            + unpack_ids(record.output)
        )
    training = [number for number in chosen if records[number].support == "full"]
    if not training:
        assert only_summary(outputs).not_trainable == "failed"
        return
    samples = read_back(outputs[0].record)
    assert list(samples) == [name(number) for number in training]
    for number in training:
        sample, record = samples[name(number)], records[number]
        count = len(unpack_ids(record.output))
        length = len(full[number])
        assert sample["tokens"] == full[number]
        assert sample["positions"] == list(range(length - count, length))
        assert sample["logprobs"] == unpack_floats(record.logprobs)
        assert sample["versions"] == [number] * count
        assert sample["advantage"] == number - 1.5
        assert (sample["turn"], sample["episode"]) == (number, number % 3)
    summary = outputs[1].record
    assert summary.request_tokens == sum(len(full[number]) for number in training)
    assert summary.append_tokens == brute_append_tokens(full, training)
    assert summary.version_min == training[0]


def brute_append_tokens(full: list[list[int]], training: list[int]) -> int:
    """Sum over each episode's distinct sequences that no other sequence of it continues."""
    total = 0
    for episode in range(3):
        distinct = {tuple(full[number]) for number in training if number % 3 == episode}
        total += sum(
            len(sequence)
            for sequence in distinct
            if not any(o != sequence and o[: len(sequence)] == sequence for o in distinct)
        )
    return total
