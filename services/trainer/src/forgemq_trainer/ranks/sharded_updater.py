"""AdamW on shards: every rank updates its part of every parameter; only the norm is exchanged.

The shards are fp32, so they are the master weights too. State is saved and restored whole, under
the names that `core.optimizer.Updater` uses, so a checkpoint does not depend on the number of
ranks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from forgemq_contracts.run import Optimizer
from forgemq_trainer.core.optimizer import NonFiniteGradientError, adamw
from forgemq_trainer.ranks.sharding import FsdpShards

CLIP_EPSILON = 1e-6
"""Added to the norm before division, as torch's clip_grad_norm_ does: both updaters clip alike."""


class ShardedUpdater:
    """Owns the optimizer's state of this rank's shards; every method is collective."""

    def __init__(self, model: nn.Module, settings: Optimizer, *, shards: FsdpShards) -> None:
        self._settings = settings
        self._shards = shards
        self._parameters = dict(model.named_parameters())
        self._masters = {name: shards.local(p) for name, p in self._parameters.items()}
        self._adamw = adamw(self._masters, self._parameters, settings)

    def update(self, *, lr: float) -> float:
        """Clip by the norm over all ranks, step, and drop the gradients; returns that norm.

        Raises:
            NonFiniteGradientError: On every rank: no weight and no moment was changed; the
                gradients are dropped.
        """
        # FSDP leaves a sharded gradient at the parameter; AdamW runs on the local shards.
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._masters[name].grad = self._shards.local(parameter.grad)
        owed = [master.grad for master in self._masters.values() if master.grad is not None]
        # Each rank's norm is of its shards; their squares add up to that of the whole gradient.
        norms = torch.stack([torch.linalg.vector_norm(grad) for grad in owed])
        norm = self._shards.all_reduce(norms.square().sum()).sqrt()
        if not bool(norm.isfinite()):
            self._drop_gradients()
            raise NonFiniteGradientError(
                "the gradient norm is not finite; the step was not applied"
            )
        share = (self._settings.grad_norm_max / (norm + CLIP_EPSILON)).clamp(max=1.0)
        for grad in owed:
            grad.mul_(share)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._drop_gradients()
        return float(norm)

    def _drop_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            self._masters[name].grad = parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """All state by name, every tensor whole, in rank 0's host memory; {} on the others.

        No device need have room for all of it: one tensor after the other is gathered and moved to
        host memory.
        """
        tensors: dict[str, Tensor] = {}

        def keep(key: str, tensor: Tensor) -> None:
            if self._shards.keeps_whole:
                tensors[key] = tensor.detach().cpu()

        for name, master in self._masters.items():
            parameter = self._parameters[name]
            if self._shards.are_masters:
                keep(f"{name}|master", self._shards.whole(master, like=parameter))
            for field, value in self._adamw.state.get(master, {}).items():
                is_count = field == "step"
                keep(
                    f"{name}|{field}",
                    value.reshape(1) if is_count else self._shards.whole(value, like=parameter),
                )
        return tensors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state()` of the same model, saved by any number of ranks.

        Raises:
            ValueError: the state belongs to another model.
        """
        for key, value in state.items():
            name, _, field = key.rpartition("|")
            if name not in self._masters:
                raise ValueError(f"optimizer state for {name}, which the model does not have")
            master, parameter = self._masters[name], self._parameters[name]
            with torch.no_grad():
                if field == "master":
                    master.copy_(self._shards.part(value, like=parameter))
                elif field == "step":
                    self._adamw.state[master][field] = value.reshape(()).to(
                        master.device, copy=True
                    )
                else:
                    self._adamw.state[master][field] = self._shards.part(value, like=parameter)
