"""Buckets of a mapped file: the right bytes, and a bounded number of them in memory."""

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from forgemq_contracts.weight_buckets import buckets, tensor_specs
from forgemq_trainer.mapped_weights import MappedWeights
from forgemq_trainer.transfer_deadline import TransferDeadline

CPU = torch.device("cpu")
APART = {
    "a": torch.tensor([1.0, 2.0]),
    "b": torch.tensor([3], dtype=torch.uint8),
    "c": torch.tensor([4.0, 5.0]),
    "d": torch.tensor([6], dtype=torch.uint8),
}
"""Two buckets, (a, b) and (c, d), of 9 bytes each; the file has the order a, c, b, d."""


def _never_raises() -> None:
    pass


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text("ab.", min_size=1, max_size=4),
        st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]), st.integers(0, 9)),
        min_size=1,
        max_size=9,
    )
)
def test_every_bucket_has_the_bytes_of_its_tensors(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, tuple[torch.dtype, int]]
) -> None:
    file = tmp_path_factory.mktemp("weights") / "w.safetensors"
    tensors = {
        name: (100 * torch.randn(size)).abs().to(dtype) for name, (dtype, size) in kinds.items()
    }
    save_file(tensors, file)
    weights = MappedWeights(file, device=CPU)
    expected = [
        b"".join(_bytes(tensors[spec.name]) for spec in bucket)
        for bucket in buckets(tensor_specs(file.read_bytes()))
    ]
    found = []
    for index in range(len(weights.bucket_bytes)):
        with weights.lent(index, check=_never_raises) as flat:
            found.append(bytes(flat.tolist()))
    assert found == expected
    assert weights.bucket_bytes == tuple(map(len, expected))


def test_buckets_of_one_dtype_are_views_of_one_mapping_for_all_lanes(tmp_path: Path) -> None:
    # The largest of them travels alone, above the bytes of a bucket.
    tensors = {"a": torch.ones(300), "b": torch.ones(17 * 2**20), "c": torch.ones(500)}
    save_file(tensors, tmp_path / "w.safetensors")
    weights = MappedWeights(tmp_path / "w.safetensors", device=CPU, copied_bytes_max=1)
    assert weights.bucket_bytes == (1200, 17 * 2**22, 2000)
    for index in range(3):
        with (
            weights.lent(index, check=_never_raises) as one,
            weights.lent(index, check=_never_raises) as other,
        ):
            assert one.data_ptr() == other.data_ptr()
            assert one.untyped_storage().nbytes() == (tmp_path / "w.safetensors").stat().st_size
    assert weights.copied_bytes_peak == 0


def test_lanes_share_a_copy_and_wait_for_room_for_another_one(tmp_path: Path) -> None:
    save_file(APART, tmp_path / "w.safetensors")
    weights = MappedWeights(tmp_path / "w.safetensors", device=CPU, copied_bytes_max=17)

    def refuse() -> None:
        raise TimeoutError

    with weights.lent(0, check=_never_raises) as one:
        with weights.lent(0, check=refuse) as other:
            assert one.data_ptr() == other.data_ptr()
        with pytest.raises(TimeoutError), weights.lent(1, check=refuse):
            pytest.fail("18 bytes are more than 17")
    with weights.lent(1, check=refuse) as after:
        assert bytes(after[:8].tolist()) == _bytes(APART["c"])
    assert weights.copied_bytes_peak == 9


def test_copies_of_many_lanes_stay_within_their_bound(tmp_path: Path) -> None:
    """16 lanes that each hold a bucket until another lane, or none, waits for room."""
    save_file(APART, tmp_path / "w.safetensors")
    weights = MappedWeights(tmp_path / "w.safetensors", device=CPU, copied_bytes_max=9)
    received: list[bytes] = []

    def lane(first: int) -> None:
        for index in (first, 1 - first) * 20:
            with weights.lent(index, check=_never_raises) as flat:
                received.append(bytes(flat.tolist()))

    lanes = [threading.Thread(target=lane, args=(number % 2,)) for number in range(16)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    expected = [_bytes(APART["a"]) + b"\x03", _bytes(APART["c"]) + b"\x06"]
    assert sorted(received) == sorted(expected * 16 * 20)
    assert weights.copied_bytes_peak == 9


def test_a_bucket_above_the_bound_is_copied_alone(tmp_path: Path) -> None:
    save_file(APART, tmp_path / "w.safetensors")
    weights = MappedWeights(tmp_path / "w.safetensors", device=CPU, copied_bytes_max=1)
    for index in (0, 1):
        with weights.lent(index, check=_never_raises) as flat:
            assert len(flat) == 9
    assert weights.copied_bytes_peak == 9


def test_a_deadline_follows_the_size() -> None:
    deadline = TransferDeadline(floor_s=30, bytes_per_s_min=2e8)
    assert deadline.of(0) == 30
    assert deadline.of(61 * 10**9) == 335
