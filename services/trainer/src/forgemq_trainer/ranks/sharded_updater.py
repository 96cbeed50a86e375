"""AdamW on shards: every rank updates its part of every parameter; only the norm is exchanged.

The shards are fp32, so they are the master weights too. State has the names that
`core.optimizer.Updater` uses, and each rank saves its part with its place in the whole, so another
number of ranks can go on from it. Replicas hold the same state, and share the saving of it.
"""

from collections.abc import Mapping

import torch
from torch import nn

from forgemq_contracts.run import Optimizer
from forgemq_trainer.core.optimizer import NonFiniteGradientError, adamw
from forgemq_trainer.loading import own_part
from forgemq_trainer.ranks.sharding import FsdpShards
from forgemq_trainer.storage.optimizer_state import StatePart, StoredState

CLIP_EPSILON = 1e-6
"""Added to the norm before division, as torch's clip_grad_norm_ does: both updaters clip alike."""


class ShardedUpdater:
    """Owns the optimizer's state of this rank's shards that train; every method is collective."""

    def __init__(self, model: nn.Module, settings: Optimizer, *, shards: FsdpShards) -> None:
        self._settings = settings
        self._shards = shards
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
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
        norm = self._shards.sum_shards(norms.square().sum()).sqrt()
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

    def parts(self) -> dict[str, StatePart]:
        """What this rank saves of all state, by name, in the memory that holds it.

        Each value is in the part of one rank. What all ranks have, as counts of updates, is in the
        parts of the first shard.
        """
        parts: dict[str, StatePart] = {}
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            tensors = {"master": master} if self._shards.are_masters else {}
            tensors |= self._adamw.state.get(master, {})
            for field, value in tensors.items():
                if field == "step":
                    if self._shards.is_first:
                        count = value.detach().reshape(1)
                        parts[f"{name}|{field}"] = StatePart(tensor=count, start=(0,), shape=(1,))
                elif value.numel():
                    parts[f"{name}|{field}"] = StatePart(
                        tensor=value.detach(),
                        start=own_part(parameter)[1],
                        shape=tuple(parameter.shape),
                    )
        replica, replicas = self._shards.replica, self._shards.replicas
        return {name: parts[name] for name in _shares(parts, count=replicas)[replica]}

    def restore(self, state: StoredState) -> None:
        """Continue from the state of the same model, saved by any number of ranks.

        Each rank reads its part of one tensor after the other.

        Raises:
            ValueError: the state belongs to another model.
        """
        for key in state:
            name, _, field = key.rpartition("|")
            if name not in self._masters:
                raise ValueError(f"optimizer state for {name}, which the model does not have")
            master, parameter = self._masters[name], self._parameters[name]
            if field == "step":
                self._adamw.state[master][field] = state[key].reshape(()).to(master.device)
                continue
            if field != "master":
                self._adamw.state[master][field] = torch.empty_like(master)
            part = master if field == "master" else self._adamw.state[master][field]
            state.read(key, into=part, start=own_part(parameter)[1])


def _shares(parts: Mapping[str, StatePart], *, count: int) -> list[list[str]]:
    """The parts in shares of about equal bytes, the same on all ranks that have equal parts."""
    shares: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name, part in parts.items():
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += part.tensor.nbytes
    return shares
