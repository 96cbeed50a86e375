"""Checksums of the parameters that engines are asked for after a fast path."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeAlias

import torch

from forgemq_contracts.weight_buckets import (
    TensorSpec,
    header_bytes,
    tensor_ranges,
    tensor_specs,
)
from forgemq_contracts.weight_samples import (
    PARAMETERS_MAX,
    padding_bytes,
    parameters,
    sampled,
)
from forgemq_contracts.weights import SampledParameter
from forgemq_fp8_blocks import BLOCK, dequantised

_LENGTH_BYTES = 8
"""A safetensors file begins with its header's length."""

_SLAB_ROWS = 8 * BLOCK
"""Of quantised weights that are made numbers at once: some 30 MB of a wide model."""

_Ranges: TypeAlias = Mapping[str, tuple[int, int]]


def sampled_parameters(
    file: Path, *, key: str, count: int = PARAMETERS_MAX
) -> tuple[SampledParameter, ...]:
    """The parameters that are read back for one version, with the SHA-256 of their bytes.

    Those of 8-bit blocks have that of the numbers that they stand for, in bfloat16, as SGLang's
    weights checker computes it. Reads these parameters alone, one tensor at a time.

    Args:
        file: Safetensors file of the policy.
        key: Names the version.
        count: At most so many.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """
    with file.open("rb") as reading:
        start = reading.read(_LENGTH_BYTES)
        start += reading.read(header_bytes(start) - len(start))
        specs, ranges = tensor_specs(start), tensor_ranges(start)
        parts_of = parameters(specs)
        found = []
        for name in sampled(specs, key=key, count=count):
            digest = hashlib.sha256()
            for part in parts_of[name]:
                for piece in _pieces(reading, part, ranges):
                    digest.update(piece)
            digest.update(bytes(padding_bytes(name, parts_of[name])))
            found.append(SampledParameter(name=name, sha256=digest.hexdigest()))
    return tuple(found)


def _pieces(file: BinaryIO, tensor: TensorSpec, ranges: _Ranges) -> Iterator[bytes]:
    """A tensor's bytes as the engine's checker has them."""
    first, end = ranges[tensor.name]
    scales = ranges.get(f"{tensor.name}_scale_inv")
    if scales is None:
        yield _read(file, first, end)
        return
    rows, columns = tensor.shape
    stored = torch.frombuffer(bytearray(_read(file, *scales)), dtype=torch.float32)
    scales_of_blocks = stored.reshape(rows // BLOCK, columns // BLOCK)
    for row in range(0, rows, _SLAB_ROWS):
        count = min(_SLAB_ROWS, rows - row)
        slab = bytearray(_read(file, first + row * columns, first + (row + count) * columns))
        values = torch.frombuffer(slab, dtype=torch.float8_e4m3fn).reshape(count, columns)
        block = row // BLOCK
        full = dequantised(values, scales_of_blocks[block : block + math.ceil(count / BLOCK)])
        yield full.bfloat16().view(torch.uint8).numpy().tobytes()


def _read(file: BinaryIO, first: int, end: int) -> bytes:
    file.seek(first)
    return file.read(end - first)
