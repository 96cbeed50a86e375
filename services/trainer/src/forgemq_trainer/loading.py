"""Loads a model's parameters from a folder into the memory that they train in, and nowhere else.

The model is built without memory for its parameters. Each rank then gets memory for what it holds
of them, and reads just that from the folder's files.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forgemq_trainer.core.low_rank import drawn_factors, factors_of
from forgemq_trainer.model_config import built
from forgemq_trainer.storage.adapters import read_adapter
from forgemq_trainer.storage.model_layout import model_layout
from forgemq_trainer.storage.tensor_files import (
    Piece,
    Place,
    StoredTensorsError,
    read_part,
    tensors_of_folder,
)

ROUTER_BIAS = "e_score_correction_bias"
"""Added to a router's scores for the choice of experts. SGLang has it in float32 in all families;
transformers' class of minimax_m2 does not say so, and rounded it may choose other experts."""


def empty_model(config: object, *, dtype: torch.dtype, attention: str) -> Any:  # noqa: ANN401  # transformers' model
    """A causal language model of transformers whose parameters are on the meta device.

    Buffers that follow from the configuration, as the frequencies of a rotary embedding, are in
    host memory and have their values.

    Args:
        config: Of transformers.
        dtype: Of the parameters, but those that stay float32: what the model's class keeps so, and
            a router's bias.
        attention: A name that is registered.

    Raises:
        ModelConfigError: no such model can be built.
    """
    with torch.device("meta"):
        model = built(config, dtype=dtype, attn_implementation=attention)
    _keep_wide(model)
    for module in model.modules():
        computed = sorted(module._non_persistent_buffers_set)
        for name in computed:
            buffer = getattr(module, name)
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
        if computed:
            # Each class of transformers computes its buffers here, as its own loading needs it to.
            model._init_weights(module)
    return model


def allocate(model: nn.Module, *, device: torch.device) -> None:
    """Give an empty model's parameters memory, uninitialised; other tensors move with their values.

    Tied parameters are no longer tied.
    """
    filled = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=device)
    for name, buffer in filled.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, buffer.to(device))


def fill(model: nn.Module, folder: Path) -> None:
    """Read a model's tensors from a folder of Hugging Face format; of sharded ones its own part.

    Adapters stay as they are: they are in a folder of their own.

    Args:
        model: A causal language model of transformers, allocated and tied.
        folder: Holds its weights.

    Raises:
        StoredTensorsError: a tensor is missing, there twice, unknown, of another shape, or has a
            value that is not finite.
        OSError: a file cannot be read.
    """
    layout = model_layout(model, tensors_of_folder(folder))
    own_of_adapters = {id(factor) for factor in factors_of(model).values()}
    for names, tensor in _distinct(model):
        if id(tensor) in own_of_adapters:
            continue
        stored = [name for name in names if name in layout]
        if not stored:
            raise StoredTensorsError(f"{folder} has no tensor for {names[0]}")
        own, start = own_part(tensor)
        read_part(own, layout[stored[0]], start=start)
        _check_finite(own, name=stored[0], folder=folder)
        for other in stored[1:]:
            _check_tied(own, layout[other], start=start, names=(stored[0], other), folder=folder)


@torch.no_grad()
def fill_adapters(model: nn.Module, folder: Path | None, *, seed: int) -> None:
    """Give a model's adapters the values in a folder, or first ones; of sharded ones its own part.

    Args:
        model: Has adapters.
        folder: Of the adapter to go on with; None for a new one.
        seed: Of a new one.

    Raises:
        ValueError: the folder has another adapter.
        OSError: it has none.
    """
    values = drawn_factors(model, seed=seed) if folder is None else read_adapter(folder)
    factors = factors_of(model)
    for name in sorted(factors.keys() | values.keys()):
        is_known = name in factors and name in values
        if not is_known or factors[name].shape != values[name].shape:
            raise ValueError(f"the adapter's file must have the tensors of lora.targets: {name}")
        own, start = own_part(factors[name])
        part = values[name]
        for dim, (first, size) in enumerate(zip(start, own.shape, strict=True)):
            part = part.narrow(dim, first, size)
        own.copy_(part)


def _keep_wide(model: Any) -> None:  # noqa: ANN401
    """Make float32, whatever the model's dtype, what its class keeps so and a router's bias."""
    wide = (*(model._keep_in_fp32_modules_strict or ()), ROUTER_BIAS)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and any(each in name for each in wide):
            parent, _, child = name.rpartition(".")
            widened = tensor.to(torch.float32)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(
                model.get_submodule(parent),
                child,
                nn.Parameter(widened) if is_parameter else widened,
            )


def _distinct(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Each tensor of the model's state once, with all names that it has there."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, value in model.state_dict().items():
        tensor = parameters.get(name, value)
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def own_part(tensor: Tensor) -> tuple[Tensor, Place]:
    """This rank's part of a tensor, which shares its memory, and where it begins in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.dim()
    _, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    with torch.no_grad():
        return tensor.to_local().detach(), start


def _check_finite(own: Tensor, *, name: str, folder: Path) -> None:
    """Refuse weights with which no step could train.

    Raises:
        StoredTensorsError: names the tensor.
    """
    # What is not finite makes the sum so too, and a sum needs no memory as a comparison of each
    # value does. But one of large finite values may overflow.
    if own.sum().isfinite() or own.isfinite().all():
        return
    dtype = str(own.dtype).removeprefix("torch.")
    raise StoredTensorsError(
        f"{folder}: tensor {name} has values that are infinite or no numbers in {dtype}; no step "
        "could train them"
    )


def _check_tied(
    own: Tensor, pieces: tuple[Piece, ...], *, start: Place, names: tuple[str, str], folder: Path
) -> None:
    """Refuse a folder that has both of two tied tensors, and not with the same values.

    Raises:
        StoredTensorsError: names both.
    """
    other = torch.empty_like(own)
    read_part(other, pieces, start=start)
    if not torch.equal(own, other):
        raise StoredTensorsError(
            f"{folder}: {names[0]} and {names[1]} differ, which config.json ties; set "
            "tie_word_embeddings to false if they are two"
        )
