"""Named tensors as SGLang's `/update_weights_from_tensor` takes them, written without torch.

SGLang 0.5.23 reads a pickle that may name only a list of harmless functions. It is written here
byte by byte, since Python's `pickle` would have to import those functions, and with them torch. A
tensor is a view of a storage, and a storage is what `torch.save` wrote before it wrote zip files.
"""

import math
import pickle
import struct
from collections.abc import Sequence
from typing import NamedTuple

from forgemq_contracts.weight_buckets import TensorSpec

_MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps(1001, protocol=2)
"""How each file of the old `torch.save` begins: its magic number and its version."""
_SIZES = {"short": 2, "int": 4, "long": 8}
_SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": _SIZES}
_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
}
_KEY = "0"
"""Name of the only storage in a file."""

_PROTO, _STOP, _MARK = b"\x80\x02", b".", b"("
_TUPLE, _REDUCE, _EMPTY_TUPLE, _EMPTY_LIST, _APPENDS = b"t", b"R", b")", b"]", b"e"
_PERSISTENT, _FALSE = b"Q", b"\x89"


class Tensor(NamedTuple):
    """One tensor: what it is, and the little-endian bytes of its values."""

    spec: TensorSpec
    values: bytes


def pickled(tensors: Sequence[Tensor]) -> bytes:
    """A pickle of the list of pairs (name, tensor).

    Raises:
        ValueError: A dtype that no weights of a head have, or other bytes than the shape says.
    """
    pairs = (_tuple(_text(each.spec.name), _tensor(each)) for each in tensors)
    return b"".join((_PROTO, _EMPTY_LIST, _MARK, *pairs, _APPENDS, _STOP))


def _tensor(tensor: Tensor) -> bytes:
    spec, values = tensor
    if spec.dtype not in _STORAGES or len(values) != spec.size_bytes:
        raise ValueError(f"{spec.name}: {len(values)} bytes of {spec.dtype} for {spec.shape}")
    strides = [math.prod(spec.shape[place + 1 :]) for place in range(len(spec.shape))]
    storage = _call("torch.storage", "_load_from_bytes", _bytes(_storage(tensor)))
    return _call(
        *("torch._utils", "_rebuild_tensor_v2", storage, _number(0)),
        *(_numbers(spec.shape), _numbers(strides), _FALSE),
        _call("collections", "OrderedDict"),
    )


def _storage(tensor: Tensor) -> bytes:
    """The file that the old `torch.save` would have written of the tensor's values."""
    spec, values = tensor
    count = math.prod(spec.shape)
    kind = _global("torch", _STORAGES[spec.dtype])
    named = _tuple(_text("storage"), kind, _text(_KEY), _text("cpu"), _number(count), b"N")
    system, keys = (pickle.dumps(each, protocol=2) for each in (_SYSTEM, [_KEY]))
    return b"".join(
        (_MAGIC, system, _PROTO, named, _PERSISTENT, _STOP, keys, struct.pack("<q", count), values)
    )


def _call(module: str, name: str, *arguments: bytes) -> bytes:
    return _global(module, name) + _tuple(*arguments) + _REDUCE


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _tuple(*parts: bytes) -> bytes:
    return b"".join((_MARK, *parts, _TUPLE)) if parts else _EMPTY_TUPLE


def _numbers(values: Sequence[int]) -> bytes:
    return _tuple(*map(_number, values))


def _number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def _bytes(value: bytes) -> bytes:
    return b"\x8e" + struct.pack("<Q", len(value)) + value


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded
