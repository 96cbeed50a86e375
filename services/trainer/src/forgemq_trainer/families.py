"""Which models the trainer accepts: tested families, without settings that are not exact.

A family of another name is never accepted for what it contains: norms, routers and the memory
formula are known by class, and no test compares it. The refusal says what it contains all the same,
as that decides whether it could be supported.
"""

from typing import Any

import torch
from torch import nn

from forgemq_contracts.model_families import MODEL_TYPES, REFUSED_MODEL_TYPES, refusal
from forgemq_settings.environment import SettingsError
from forgemq_trainer.contents import (
    contents_of_class,
    contents_of_configuration,
    contents_of_modules,
)
from forgemq_trainer.engine_differences import differences
from forgemq_trainer.model_config import check_sizes
from forgemq_trainer.model_sizes import expert_count

ROW_BYTES = 16
"""The rows that torch's product of a group of matrices takes are a multiple of it."""

GPU_HEAD_SIZE_MIN = 16
"""FlexAttention compiles no smaller head size."""

GPU_HEAD_SIZE_MAX = 256
"""Larger head sizes are untested, and torch's flash kernels have none."""


class UnsupportedModelError(SettingsError):
    """The model cannot be trained exactly on trees; says which field and rule."""


def check_supported(config: Any) -> None:  # noqa: ANN401  # a configuration of transformers
    """Refuse a model that tree training would not train exactly.

    Raises:
        UnsupportedModelError: names the field of the model's configuration and the rule.
        ModelConfigError: sizes contradict each other.
    """
    kind = getattr(config, "model_type", "")
    if kind not in MODEL_TYPES:
        found = [] if kind in REFUSED_MODEL_TYPES else contents_of_class(config)
        contained = f"; it contains: {'; '.join(found)}" if found else ""
        raise UnsupportedModelError(f"model_type {kind!r} is {refusal(kind)}{contained}")
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        raise UnsupportedModelError(
            f"quantization_config must be left out, got {quantised}: training needs weights in "
            "full, and model.engine_quantization says how engines hold them"
        )
    if found := contents_of_configuration(config):
        raise UnsupportedModelError("; ".join(found))
    check_sizes(config)
    if found := list(differences(config)):
        raise UnsupportedModelError("; ".join(found))
    dense = getattr(config, "mlp_only_layers", None) or []
    if dense:
        raise UnsupportedModelError(f"mlp_only_layers must be empty, got {list(dense)}")
    step = getattr(config, "decoder_sparse_step", 1)
    if step != 1:
        raise UnsupportedModelError(f"decoder_sparse_step must be 1, got {step}")


def check_modules(model: nn.Module) -> None:
    """Refuse a built model for what it contains.

    Raises:
        UnsupportedModelError: names the kind of module and one of them.
    """
    if found := contents_of_modules(model):
        raise UnsupportedModelError("; ".join(found))
    head = model.get_output_embeddings()  # type: ignore[operator]  # transformers' method
    # The chunked head computes hidden @ weights only.
    if getattr(head, "bias", None) is not None:
        raise UnsupportedModelError("a head with a bias is not supported")


def check_expert_rows(config: Any, *, dtype: torch.dtype) -> None:  # noqa: ANN401
    """Refuse experts whose rows torch does not multiply in this dtype, on a CPU or a GPU.

    Raises:
        UnsupportedModelError: names the field of the model's configuration and the rule.
    """
    if not expert_count(config):
        return
    multiple = ROW_BYTES // dtype.itemsize
    own = "moe_intermediate_size"
    for name in ("hidden_size", own if hasattr(config, own) else "intermediate_size"):
        if (size := getattr(config, name)) % multiple:
            raise UnsupportedModelError(
                f"{name} must be a multiple of {multiple} in a mixture of experts of "
                f"{dtype.itemsize} bytes a value, got {size}: torch multiplies rows of experts by "
                f"{ROW_BYTES} bytes"
            )


def check_head_size(head_size: int, *, device: str) -> None:
    """Refuse a head size that a GPU's kernels do not support; a CPU's support every size.

    Raises:
        UnsupportedModelError: names the size and the rule.
    """
    if device == "cuda" and not GPU_HEAD_SIZE_MIN <= head_size <= GPU_HEAD_SIZE_MAX:
        raise UnsupportedModelError(
            f"head_dim is {head_size}; attention on a GPU needs {GPU_HEAD_SIZE_MIN} to "
            f"{GPU_HEAD_SIZE_MAX}"
        )
