"""Which parameters of an engine are read back after it loaded new weights, and how they are named.

SGLang holds some tensors of a safetensors file as one parameter, and each process of a
tensor-parallel engine has a part of most. Trainer and lane use the same names here, so that a
checksum of the trainer's file can be compared with one that the engine computes.
"""

import hashlib
import re
from collections.abc import Sequence

from forgemq_contracts.weight_buckets import TensorSpec

PARAMETERS_MAX = 4
"""Read back for each version: of 300 parameters one is read every 75 versions. A bucket that is
wrong as a whole is found sooner, by any one of its parameters."""

PARAMETER_BYTES_MAX = 64 * 1024 * 1024
"""Larger ones are not read back: an engine on a CPU hashes 1 GB/s, while it is paused."""

_PACKED = (
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj.", ("q_", "k_", "v_")),
    (re.compile(r"\.mlp\.(gate|up)_proj\."), ".mlp.gate_up_proj.", ("gate_", "up_")),
)
"""In SGLang's models of the Llama and Qwen families, in this order."""

_NOT_COMPARED = ("experts", "_scale", "rotary")
"""The engine packs experts; scales are compared with the weights that they belong to."""

_VOCABULARIES = ("embed_tokens", "lm_head")
"""Parameters with a row for each token, to which SGLang adds rows of zeros."""

_VOCABULARY_ROWS = 64
"""SGLang 0.5.23 pads a vocabulary to a multiple of it."""


def parameters(tensors: Sequence[TensorSpec]) -> dict[str, tuple[TensorSpec, ...]]:
    """Engine parameter -> the tensors that are in it, in their order; those that can be compared.

    Example: `layers.0.mlp.up_proj.weight` is the second of `layers.0.mlp.gate_up_proj.weight`.
    """
    found: dict[str, list[TensorSpec]] = {}
    for tensor in sorted(tensors, key=lambda each: each.name):
        is_left_out = any(part in tensor.name for part in _NOT_COMPARED)
        if tensor.size_bytes and not is_left_out:
            found.setdefault(_parameter(tensor.name), []).append(tensor)
    return {name: _in_order(parts) for name, parts in found.items()}


def sampled(
    tensors: Sequence[TensorSpec], *, key: str, count: int = PARAMETERS_MAX
) -> tuple[str, ...]:
    """Parameters to read back for one version, by a keyed hash of their names; sorted.

    Half of them are norms, which every process of a tensor-parallel engine has whole.

    Args:
        tensors: Of the weights.
        key: Names the version.
        count: At most so many.
    """
    small = [
        name
        for name, parts in parameters(tensors).items()
        if sum(part.size_bytes for part in parts) <= PARAMETER_BYTES_MAX
    ]
    drawn = sorted(small, key=lambda name: hashlib.blake2b(f"{key}/{name}".encode()).digest())
    whole = [name for name in drawn if is_whole(name)][: count // 2]
    others = [name for name in drawn if not is_whole(name)][: count - len(whole)]
    return tuple(sorted(whole + others))


def padding_bytes(parameter: str, parts: Sequence[TensorSpec]) -> int:
    """Zeros that an engine of one process has behind a parameter's values."""
    if not any(word in parameter for word in _VOCABULARIES):
        return 0
    rows = parts[0].shape[0]
    return -rows % _VOCABULARY_ROWS * parts[0].size_bytes // rows


def is_whole(parameter: str) -> bool:
    """Whether every process of an engine has all of a parameter."""
    return "norm" in parameter


def others(tensors: Sequence[TensorSpec], wanted: Sequence[str]) -> tuple[str, ...]:
    """Parts of names that every parameter but the wanted ones has, and none of the wanted.

    SGLang's weights checker leaves out what has one of these in its name; a layer of which nothing
    is wanted is one of them.
    """
    layers = {name: re.search(r"\blayers\.\d+\.", name) for name in _all_names(tensors)}
    wanted_layers = {found[0] for name in wanted if (found := layers.get(name))}
    skipped = {*_NOT_COMPARED, *_VOCABULARIES}
    for name, found in layers.items():
        if found is not None and found[0] not in wanted_layers:
            skipped.add(found[0])
        elif name not in wanted:
            skipped.add(name)
    return tuple(sorted(part for part in skipped if not any(part in name for name in wanted)))


def _all_names(tensors: Sequence[TensorSpec]) -> list[str]:
    return sorted({_parameter(tensor.name) for tensor in tensors})


def _parameter(name: str) -> str:
    for pattern, packed, _ in _PACKED:
        name = pattern.sub(packed, name)
    return name


def _in_order(parts: list[TensorSpec]) -> tuple[TensorSpec, ...]:
    for pattern, _, order in _PACKED:
        if pattern.search(parts[0].name):
            return tuple(part for word in order for part in parts if f".{word}proj." in part.name)
    return tuple(parts)
