"""Both ends of the fast path derive the same buckets."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.weight_buckets import TensorSpec, buckets, header_bytes, tensor_specs

SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.text("ab.", min_size=1, max_size=6),
        st.sampled_from(["float32", "bfloat16", "uint8"]),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    unique_by=lambda spec: spec.name,
    max_size=12,
)


def _file(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def test_tensors_fill_buckets_in_name_order() -> None:
    sizes = {"b": 30, "a": 40, "d": 10, "c": 50}
    specs = [TensorSpec(name, "uint8", (size,)) for name, size in sizes.items()]
    names = [[spec.name for spec in bucket] for bucket in buckets(specs, 80)]
    assert names == [["a", "b"], ["c", "d"]]


def test_a_tensor_larger_than_a_bucket_travels_alone() -> None:
    specs = [TensorSpec(name, "float32", (size,)) for name, size in (("a", 1), ("b", 99), ("c", 1))]
    assert [len(bucket) for bucket in buckets(specs, 8)] == [1, 1, 1]


@given(SPECS, st.integers(1, 200), st.randoms())
def test_buckets_hold_every_tensor_once_aligned_and_within_the_limit(
    specs: list[TensorSpec], bytes_max: int, random: object
) -> None:
    made = buckets(specs, bytes_max)
    names = [spec.name for bucket in made for spec in bucket]
    assert names == sorted(spec.name for spec in specs if spec.size_bytes)
    for bucket in made:
        offset = 0
        for spec in bucket:
            item = {"float32": 4, "bfloat16": 2, "uint8": 1}[spec.dtype]
            assert offset % item == 0
            offset += spec.size_bytes
        assert offset <= bytes_max or len(bucket) == 1
    shuffled = list(specs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis' Random
    assert buckets(shuffled, bytes_max) == made


def test_specs_come_from_the_header_sorted_and_without_its_metadata() -> None:
    file = _file(
        {
            "__metadata__": {"format": "pt"},
            "w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
            "a": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
        }
    )
    assert header_bytes(file[:8]) == len(file)
    assert tensor_specs(file + b"values") == (
        TensorSpec("a", "float32", ()),
        TensorSpec("w", "bfloat16", (2, 3)),
    )


def test_what_is_no_safetensors_file_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 bytes"):
        header_bytes(b"abc")
    with pytest.raises(ValueError, match="safetensors header of"):
        header_bytes(b"\xff" * 8)
    with pytest.raises(ValueError, match="header needs"):
        tensor_specs(_file({"a": {"dtype": "F32", "shape": []}})[:-1])
    with pytest.raises(ValueError, match="tensor a: dtype C64"):
        tensor_specs(_file({"a": {"dtype": "C64", "shape": [], "data_offsets": [0, 8]}}))
    with pytest.raises(ValueError, match="two tensors are named a"):
        buckets([TensorSpec("a", "uint8", (1,))] * 2)


@pytest.mark.parametrize(
    "header",
    [
        [1],
        {"a": {"shape": [], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2]}},
    ],
    ids=["no object", "no dtype", "negative size", "no sizes", "no place"],
)
def test_a_damaged_header_is_refused(header: object) -> None:
    with pytest.raises(ValueError, match="safetensors header: "):
        tensor_specs(_file(header))
