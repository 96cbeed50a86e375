"""A head's durable copy as requests that load it into the draft alone.

SGLang's load from a folder goes to policy and draft alike, and a policy would take `layers.0` of a
head for its own. So the head's tensors travel in the requests, a bucket in each.
"""

from collections.abc import Iterator
from pathlib import Path

from forgemq_contracts.weight_buckets import buckets, header_bytes, tensor_ranges, tensor_specs
from forgemq_inference.core.tensor_pickle import Tensor, pickled
from forgemq_inference.durable import WEIGHTS_FILE, DurableCopyError

_HEADER_START_BYTES = 8
"""A safetensors file begins with its header's length, a 64-bit integer."""


def head_payloads(folder: Path) -> Iterator[bytes]:
    """The tensors of a head, pickled bucket by bucket.

    Raises:
        DurableCopyError: the file cannot be read, or holds what no head has.
    """
    path = folder / WEIGHTS_FILE
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER_START_BYTES)
            start += file.read(header_bytes(start) - len(start))
            ranges = tensor_ranges(start)
            for bucket in buckets(tensor_specs(start)):
                tensors = []
                for spec in bucket:
                    first, end = ranges[spec.name]
                    file.seek(first)
                    tensors.append(Tensor(spec, file.read(end - first)))
                yield pickled(tensors)
    except (OSError, ValueError) as error:
        raise DurableCopyError(f"{path}: {error}") from error
