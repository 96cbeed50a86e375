"""Checksums of the parameters that engines are asked for after a fast path."""

import hashlib
from pathlib import Path

from forgemq_contracts.weight_buckets import header_bytes, tensor_ranges, tensor_specs
from forgemq_contracts.weight_samples import PARAMETERS_MAX, parameters, sampled
from forgemq_contracts.weights import SampledParameter

_LENGTH_BYTES = 8
"""A safetensors file begins with its header's length."""


def sampled_parameters(
    file: Path, *, key: str, count: int = PARAMETERS_MAX
) -> tuple[SampledParameter, ...]:
    """The parameters that are read back for one version, with the SHA-256 of their bytes.

    Reads those alone, one tensor at a time.

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
                first, end = ranges[part.name]
                reading.seek(first)
                digest.update(reading.read(end - first))
            found.append(SampledParameter(name=name, sha256=digest.hexdigest()))
    return tuple(found)
