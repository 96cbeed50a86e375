"""Which stored tensors make each tensor of a model, by transformers' table of conversions.

Most are stored as they are. A mixture's experts are stored one by one, gate and up apart, and are
one tensor of three dimensions in memory. Other conversions than to stack and to join are refused.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from forgemq_trainer.storage.tensor_files import Piece, Place, StoredTensor, StoredTensorsError

_FLOATS = ("float64", "float32", "float16", "bfloat16")


def model_layout(
    model: nn.Module, stored: Mapping[str, StoredTensor]
) -> dict[str, tuple[Piece, ...]]:
    """The pieces of each tensor of a model's state that is stored, by its name in the model.

    Notes in the model which conversions it came through, so that transformers saves it as it was.

    Args:
        model: A causal language model of transformers; its tensors may be empty.
        stored: All tensors in its folder, by name.

    Raises:
        StoredTensorsError: a stored tensor is unknown to the model, there twice, or of another
            shape; an expert is missing.
    """
    transforms = get_model_conversion_mapping(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    sources = _Sources(model, shapes, transforms)
    for name in sorted(stored, key=dot_natural_key):
        sources.add(stored[name])
    # As transformers' own loading does.
    used: Any = [each for each in transforms if each.was_used()]
    model._weight_conversions = used
    return {name: sources.pieces(name) for name in sources.names}


class _Sources:
    """Collects stored tensors by the model's tensor that they are part of."""

    def __init__(
        self, model: nn.Module, shapes: Mapping[str, Place], transforms: Sequence[Any]
    ) -> None:
        self._shapes = shapes
        self._prefix = str(model.base_model_prefix)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._converter_of = {
            pattern: each for each in self._converters for pattern in each.source_patterns
        }
        ignored: Any = model._keys_to_ignore_on_load_unexpected or ()
        # What transformers knows that folders have and no model of the kind asks for. Besides, old
        # folders hold this buffer, which follows from the configuration.
        self._ignored = re.compile("|".join([r"rotary_emb\.inv_freq$", *ignored]))
        self._plain: dict[str, StoredTensor] = {}
        self._converted: dict[str, dict[str, list[StoredTensor]]] = {}

    @property
    def names(self) -> list[str]:
        """Of the model's tensors that something stored is part of."""
        return [*self._plain, *self._converted]

    def add(self, stored: StoredTensor) -> None:
        """Note what a stored tensor is part of."""
        place, pattern = self._renamed(stored.name, self._renamings, self._converters)
        if place not in self._shapes and stored.name in self._shapes:
            place, pattern = stored.name, None
        if place not in self._shapes:
            if not self._ignored.search(stored.name):
                raise StoredTensorsError(
                    f"tensor {stored.name} in {stored.file} is unknown to the model, whose "
                    "config.json asks for none of that name"
                )
            return
        if stored.dtype not in _FLOATS:
            raise StoredTensorsError(
                f"tensor {stored.name} in {stored.file} is of {stored.dtype}; supported: "
                f"{', '.join(_FLOATS)}"
            )
        other = self._plain.get(place)
        if other is None and pattern is not None:
            self._converted.setdefault(place, {}).setdefault(pattern, []).append(stored)
            return
        if other is None and place in self._converted:
            other = next(iter(self._converted[place].values()))[0]
        if other is not None:
            raise StoredTensorsError(
                f"tensors {other.name} and {stored.name} in {stored.file.parent} are both {place}"
            )
        self._plain[place] = stored

    def _renamed(
        self, name: str, renamings: list[WeightRenaming], converters: list[WeightConverter]
    ) -> tuple[str, str | None]:
        shapes: Any = self._shapes  # It is only asked which names it has.
        renamed: tuple[str, str | None] = rename_source_key(
            name, renamings, converters, self._prefix, shapes
        )
        return renamed

    def pieces(self, place: str) -> tuple[Piece, ...]:
        """The pieces of one of the model's tensors, each of the right shape."""
        shape = self._shapes[place]
        if (plain := self._plain.get(place)) is not None:
            _check_shape(plain, expected=shape)
            return (Piece(stored=plain, start=(0,) * len(shape), shape=shape),)
        parts = self._converted[place]
        converter = self._converter_of[next(iter(parts))]
        is_stacked, joined = _operations(converter, place)
        sources = []
        for pattern in converter.source_patterns:
            if pattern not in parts:
                raise StoredTensorsError(f"{place} has no part like {pattern} in the folder")
            sources.append(parts[pattern])
        if not is_stacked:
            assert joined is not None, f"{place} is neither stacked nor joined"
            return _filling(_joined(sources, shape=shape, dim=joined), place=place, shape=shape)
        numbered = [
            self._by_number(found, pattern, count=shape[0])
            for found, pattern in zip(sources, converter.source_patterns, strict=True)
        ]
        return _filling(_stacked(numbered, shape=shape, dim=joined), place=place, shape=shape)

    def _by_number(
        self, found: list[StoredTensor], pattern: str, *, count: int
    ) -> list[StoredTensor]:
        """An expert's tensor for each number from 0."""
        number = re.compile(pattern.replace("*.", r"(\d+)\."))
        by_number: dict[int, StoredTensor] = {}
        for stored in found:
            name, _ = self._renamed(stored.name, self._renamings, [])
            match = number.search(name)
            assert match is not None, f"{name} has no number for {pattern}"
            by_number[int(match.group(1))] = stored
        for expected in range(count):
            if expected not in by_number:
                raise StoredTensorsError(
                    f"{found[0].file.parent} has no tensor like {found[0].name} with number "
                    f"{expected}; the model has {count}"
                )
        if len(found) > count:
            extra = by_number[max(by_number)]
            raise StoredTensorsError(
                f"tensor {extra.name} in {extra.file} is one too many: the model has {count}"
            )
        return [by_number[expected] for expected in range(count)]


def _operations(converter: WeightConverter, place: str) -> tuple[bool, int | None]:
    """Whether a converter stacks its sources, and the dimension that it joins them in."""
    operations = list(converter.operations)
    is_stacked = bool(operations) and isinstance(operations[0], MergeModulelist)
    rest = operations[1:] if is_stacked else operations
    is_known = len(converter.target_patterns) == 1 and (
        not rest or (len(rest) == 1 and isinstance(rest[0], Concatenate))
    )
    if not is_known or (is_stacked and operations[0].dim != 0):
        raise StoredTensorsError(
            f"{place} is stored in another form, and to convert it by {operations} is not supported"
        )
    return is_stacked, rest[0].dim if rest else None


def _stacked(
    sources: Sequence[Sequence[StoredTensor]], *, shape: Place, dim: int | None
) -> list[Piece]:
    """Pieces of a whole that stacks each source's tensors, and joins the sources in `dim`."""
    pieces = []
    for source, found in enumerate(sources):
        start, size = [0] * len(shape), list(shape)
        size[0] = 1
        if dim is not None:
            # What is stacked is joined of parts of one width: an expert's gate and up.
            size[dim] = shape[dim] // len(sources)
            start[dim] = source * size[dim]
        for number, stored in enumerate(found):
            _check_shape(stored, expected=tuple(size[1:]))
            pieces.append(
                Piece(stored=stored, start=(number, *start[1:]), shape=tuple(size)),
            )
    return pieces


def _joined(sources: Sequence[Sequence[StoredTensor]], *, shape: Place, dim: int) -> list[Piece]:
    """Pieces of a whole that joins all sources' tensors in `dim`, whatever their widths."""
    pieces, at = [], 0
    for stored in itertools.chain.from_iterable(sources):
        width = stored.shape[dim] if len(stored.shape) == len(shape) else 0
        size = (*shape[:dim], width, *shape[dim + 1 :])
        _check_shape(stored, expected=size)
        start = (*(0 for _ in shape[:dim]), at, *(0 for _ in shape[dim + 1 :]))
        pieces.append(Piece(stored=stored, start=start, shape=size))
        at += width
    return pieces


def _filling(pieces: list[Piece], *, place: str, shape: Place) -> tuple[Piece, ...]:
    if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
        names = ", ".join(dict.fromkeys(f"{p.stored.name} {p.stored.shape}" for p in pieces[:4]))
        raise StoredTensorsError(f"{place} has shape {shape}, which its parts do not make: {names}")
    return tuple(pieces)


def _check_shape(stored: StoredTensor, *, expected: Place) -> None:
    if stored.shape != expected:
        raise StoredTensorsError(
            f"tensor {stored.name} in {stored.file} has shape {stored.shape}; the model's "
            f"config.json asks for {expected}"
        )
