"""Which tensors of a model become 8-bit floats, from their names and shapes.

The projections of attention, of a layer's MLP and of its experts do. What stays as it is: the
embedding, the language-model head, norms, biases, and the router of a mixture of experts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from forgemq_fp8_blocks.values import BLOCK

SCALE_SUFFIX = "_scale_inv"
"""Of the name of a quantised tensor's scales."""

_PROJECTION = re.compile(r"(?P<place>.+\.layers\.\d+\..+)\.(?P<name>\w+_proj)\.weight")
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""An engine computes these as one product, so all of them have the same format."""


class NothingToQuantiseError(ValueError):
    """No projection of the model has whole blocks."""


class TensorFormats(NamedTuple):
    """Names of tensors that become 8-bit floats, and of modules whose matrix stays as it is."""

    quantised: frozenset[str]
    left: tuple[str, ...]


def plan(shapes: Mapping[str, Sequence[int]]) -> TensorFormats:
    """The plan for a model.

    A projection of which rows or columns are no multiple of `BLOCK` stays as it is, and with it
    those that an engine computes together with it.

    Args:
        shapes: Of all tensors, by name.

    Raises:
        NothingToQuantiseError: none would be quantised.
    """
    projections = {name for name in shapes if _PROJECTION.fullmatch(name)}
    chosen = frozenset(name for name in projections if _is_whole(name, shapes))
    if not chosen:
        raise NothingToQuantiseError(
            f"none of {len(projections)} projections has rows and columns that are multiples of "
            f"{BLOCK}: no tensor can have {BLOCK} x {BLOCK} blocks"
        )
    matrices = {name for name, shape in shapes.items() if len(shape) > 1} - chosen
    left = {name.removesuffix(".weight") for name in matrices} | {"lm_head"}
    return TensorFormats(chosen, tuple(sorted(left)))


def _is_whole(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    found = _PROJECTION.fullmatch(name)
    assert found is not None
    together = next((names for names in _TOGETHER if found["name"] in names), (found["name"],))
    beside = [f"{found['place']}.{each}.weight" for each in together]
    return all(_has_blocks(shapes[each]) for each in beside if each in shapes)


def _has_blocks(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and all(size and size % BLOCK == 0 for size in shape)
