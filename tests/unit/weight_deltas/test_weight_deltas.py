"""What a delta makes of a file of weights, whatever their bits, and what it refuses."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from forgemq_weight_deltas import DeltaError, OtherLayoutError, patch, write_delta, writing

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
)


def weights(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / f"{name}.safetensors"
    save_file(tensors, path)
    return path


def delta_of(base: Path, new: Path) -> bytes:
    file = io.BytesIO()
    assert write_delta(base, new, file).size_bytes == len(file.getvalue())
    return file.getvalue()


def patched(base: Path, delta: bytes) -> bytes:
    target = base.with_name("target.safetensors")
    target.write_bytes(base.read_bytes())
    patch(target, io.BytesIO(delta))
    return target.read_bytes()


def random_bits(generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]):
    size = int(np.prod(shape)) * dtype.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.01, 0.2, 0.3, 1.0]),
    part_bytes=st.sampled_from([8, 64, 1000 * 8, 2**26]),
)
def test_the_patched_file_is_the_newer_one_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, seed, dtypes, share, part_bytes
):
    """NaN, infinities and signs of zero included: the bits are random."""
    monkeypatch.setattr(writing, "PART_BYTES", part_bytes)
    generator = torch.Generator().manual_seed(seed)
    base, new = {}, {}
    for number, dtype in enumerate(dtypes):
        shape = tuple(torch.randint(0, 30, (2,), generator=generator).tolist())
        base[f"t{number}"] = before = random_bits(generator, dtype, shape)
        kept = (torch.rand(shape, generator=generator) >= share).reshape(-1, 1)
        bits = [
            each.reshape(-1).view(torch.uint8).reshape(-1, dtype.itemsize)
            for each in (before, random_bits(generator, dtype, shape))
        ]
        new[f"t{number}"] = torch.where(kept, *bits).reshape(-1).view(dtype).reshape(shape)
    old, newer = weights(tmp_path, "old", base), weights(tmp_path, "new", new)
    assert patched(old, delta_of(old, newer)) == newer.read_bytes()


def test_figures_count_the_values_that_changed(tmp_path: Path):
    before = torch.zeros(1000, dtype=torch.bfloat16)
    after = before.clone()
    after[[0, 500, 999]] = 1.0
    dense = torch.arange(100.0)
    old = weights(tmp_path, "old", {"a": before, "b": dense, "c": dense.clone()})
    new = weights(tmp_path, "new", {"a": after, "b": dense + 1, "c": dense})
    figures = write_delta(old, new, io.BytesIO())
    assert (figures.values, figures.changed) == (1200, 103)
    assert write_delta(old, old, io.BytesIO()).changed == 0


def test_few_changes_of_a_large_file_take_few_bytes(tmp_path: Path):
    """One value in a hundred, each by one unit in the last place: below two bytes for each."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(200_000, generator=generator).to(torch.bfloat16)
    after = before.clone()
    after.view(torch.int16)[torch.rand(200_000, generator=generator) < 0.01] += 1
    old, new = weights(tmp_path, "old", {"a": before}), weights(tmp_path, "new", {"a": after})
    figures = write_delta(old, new, io.BytesIO())
    assert 1_800 < figures.changed < 2_200
    assert figures.size_bytes < 2 * figures.changed


def test_other_tensors_have_no_delta(tmp_path: Path):
    old = weights(tmp_path, "old", {"a": torch.zeros(4)})
    for name, other in (("b", torch.zeros(4)), ("a", torch.zeros(5)), ("a", torch.zeros(4).half())):
        with pytest.raises(OtherLayoutError, match="same tensors"):
            write_delta(old, weights(tmp_path, "new", {name: other}), io.BytesIO())


def pair(tmp_path: Path) -> tuple[Path, Path]:
    generator = torch.Generator().manual_seed(1)
    base = {"a": torch.randn(64, generator=generator), "b": torch.randn(64, generator=generator)}
    new = {"a": base["a"] + 1, "b": base["b"].clone()}
    new["b"][3] = 9.0
    return weights(tmp_path, "old", base), weights(tmp_path, "new", new)


def test_a_wrong_base_is_found_and_its_tensor_named(tmp_path: Path):
    old, new = pair(tmp_path)
    delta = delta_of(old, new)
    with pytest.raises(DeltaError, match="tensor a does not have the checksum"):
        patched(new, delta)
    small = weights(tmp_path, "small", {"a": torch.zeros(4)})
    with pytest.raises(DeltaError, match="these have"):
        patched(small, delta)


def test_a_delta_cut_anywhere_is_refused(tmp_path: Path):
    old, new = pair(tmp_path)
    delta = delta_of(old, new)
    for end in range(len(delta)):
        with pytest.raises(DeltaError):
            patched(old, delta[:end])


@pytest.mark.slow
def test_a_damaged_delta_changes_nothing_unseen(tmp_path: Path):
    """Whichever byte differs: the file is refused, or the file is right all the same."""
    old, new = pair(tmp_path)
    delta, wanted = delta_of(old, new), new.read_bytes()
    refused = 0
    for position in range(len(delta)):
        damaged = bytearray(delta)
        damaged[position] ^= 0x15
        try:
            assert patched(old, bytes(damaged)) == wanted
        except DeltaError:
            refused += 1
    assert refused > 0.9 * len(delta)


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    old, _ = pair(tmp_path)
    with pytest.raises(DeltaError, match="at most"):
        patched(old, b"PK\x03\x04" * 100)
