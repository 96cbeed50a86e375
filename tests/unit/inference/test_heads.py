"""When a lane's engine needs a draft head, and how the head's tensors reach it without torch."""

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.utils.common import SafeUnpickler

from forgemq_contracts.weight_buckets import TensorSpec
from forgemq_contracts.weights import PublishedHead, PublishedWeights, Rendezvous
from forgemq_inference.core.acceptance import AcceptanceMeter
from forgemq_inference.core.tensor_pickle import Tensor, pickled
from forgemq_inference.core.weights import (
    BASE,
    DurableLoad,
    FastLoad,
    Rename,
    WeightsState,
    served_by,
)
from forgemq_inference.durable import DurableCopyError
from forgemq_inference.head_payloads import head_payloads
from tests.unit.run_view.synthetic import SyntheticRun
from tests.unit.run_view.test_acceptance import drafted

BASE_SHA, OTHER_SHA = "a" * 64, "b" * 64
FIRST, SECOND = (
    PublishedHead(sha256=letter * 64, uri=f"/heads/{letter}", size_bytes=1) for letter in "cd"
)
OFFER = Rendezvous(lane=0, epoch=1, host="h", port=1, group_name="g", backend="gloo", is_new=True)


def published(version: int, **fields: object) -> PublishedWeights:
    values = {"sha256": OTHER_SHA, "uri": "/w", "size_bytes": 1} | fields
    return PublishedWeights(lineage=1, version=version, **values)


def state() -> WeightsState:
    return WeightsState(lane=0, epoch=1, served=served_by(BASE.name, base_sha256=BASE_SHA))


def test_weights_that_the_engine_holds_are_renamed_only_if_it_holds_their_head_too() -> None:
    lane = state()
    start = published(0, sha256=BASE_SHA, head=FIRST)
    lane.observe(start)
    assert lane.next_load() == DurableLoad(start)
    lane.note_head(FIRST.sha256)
    assert lane.next_load() == Rename(start)


def test_a_version_without_a_head_keeps_that_of_the_version_before() -> None:
    lane = state()
    lane.observe(published(1, head=FIRST))
    lane.observe(published(2))
    assert lane.missing_head(published(9)) == FIRST
    lane.note_head(FIRST.sha256)
    assert lane.missing_head(published(9)) is None
    lane.observe(published(3, head=SECOND))
    assert lane.missing_head(published(9)) == SECOND


def test_a_broken_update_of_the_policy_leaves_the_head_and_a_new_engine_has_none() -> None:
    lane = state()
    lane.observe(published(1, head=FIRST))
    lane.note_head(FIRST.sha256)
    lane.note_broken()
    assert lane.missing_head(published(9)) is None
    lane.note_restarted(served_by(BASE.name, base_sha256=None))
    assert lane.missing_head(published(9)) == FIRST


def test_a_durable_copy_is_loaded_with_the_newest_durable_head() -> None:
    """The head that comes with a version whose copies are still to come lies nowhere yet."""
    lane = state()
    lane.observe(published(1, head=FIRST))
    lane.observe(early := published(2, head=SECOND, is_durable=False))
    assert lane.missing_head(early) == SECOND
    assert lane.missing_head(published(1)) == FIRST
    lane.observe(published(2, head=SECOND))
    assert lane.missing_head(published(1)) == SECOND


def test_a_fast_path_is_taken_with_and_without_a_head() -> None:
    for head in (None, FIRST):
        lane, newest = state(), published(1, fast_paths=(OFFER,), head=head)
        lane.observe(newest)
        assert lane.next_load() == FastLoad(newest, OFFER)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_sglang_reads_the_tensors_that_are_written_without_torch(dtype: str) -> None:
    torch.manual_seed(1)
    tensors = {
        name: torch.randn(shape).to(getattr(torch, dtype))
        for name, shape in (("fc.weight", (3, 5)), ("fc.bias", (7,)), ("deep", (2, 3, 4)))
    }
    data = pickled(
        [
            Tensor(TensorSpec(name, dtype, tuple(value.shape)), as_bytes(value))
            for name, value in tensors.items()
        ]
    )
    read = SafeUnpickler(io.BytesIO(data)).load()
    assert [name for name, _ in read] == list(tensors)
    for name, value in read:
        assert value.dtype == tensors[name].dtype
        assert torch.equal(value, tensors[name])


def as_bytes(value: torch.Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("dtype", "size"), [("int8", 4), ("float32", 15)])
def test_bytes_that_are_no_tensor_of_a_head_are_refused_by_name(dtype: str, size: int) -> None:
    with pytest.raises(ValueError, match=r"fc\.bias: "):
        pickled([Tensor(TensorSpec("fc.bias", dtype, (4,)), bytes(size))])


@pytest.mark.slow
def test_a_large_head_travels_in_several_requests(tmp_path: Path) -> None:
    tensors = {name: torch.randn(9_000_000) for name in ("a", "b", "c")}
    save_file(tensors, tmp_path / "model.safetensors")
    read = [
        pair
        for payload in head_payloads(tmp_path)
        for pair in [SafeUnpickler(io.BytesIO(payload)).load()]
    ]
    assert [[name for name, _ in pairs] for pairs in read] == [["a"], ["b"], ["c"]]
    assert all(torch.equal(value, tensors[name]) for pairs in read for name, value in pairs)


@pytest.mark.parametrize("content", [None, b"no"])
def test_a_head_that_cannot_be_read_says_where(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DurableCopyError, match=r"model\.safetensors: "):
        next(head_payloads(tmp_path))


def test_the_acceptance_length_is_that_of_the_newest_weights_alone() -> None:
    messages = SyntheticRun().play(steps=1).messages
    plain = next(each for each in messages if hasattr(each.record, "verifications"))
    meter = AcceptanceMeter()
    sequence = [
        (None, plain),
        (3.0, drafted(plain, tokens=13, passes=4, version=4)),
        (2.0, drafted(plain, tokens=7, passes=5, version=4)),
        (1.0, drafted(plain, tokens=5, passes=4, version=5)),
        (None, drafted(plain, tokens=13, passes=4, version=4)),
    ]
    for expected, message in sequence:
        assert meter.observe(message.record) == expected
