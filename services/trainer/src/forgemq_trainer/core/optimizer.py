"""AdamW with a warm-up and a linear decay; fp32 master weights if the model is narrower.

AdamW: arXiv 1711.05101, algorithm 2. Gradients of a bfloat16 model are added up in fp32, and the
update is applied to fp32 masters, from which the model's weights are rounded after each step. So
updates smaller than bfloat16's spacing accumulate instead of being rounded away.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from forgemq_contracts.run import Optimizer


class NonFiniteGradientError(Exception):
    """The gradient norm is infinite or NaN; the step would destroy the weights."""


def learning_rate(settings: Optimizer, *, step: int, steps: int) -> float:
    """Rate of a step: linear warm-up times linear decay to `lr_final_fraction` at the last step.

    Example: lr 1, no warm-up, final fraction 0.2, 5 steps give 1, 0.8, 0.6, 0.4, 0.2.
    """
    warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    decay = 1 - (1 - settings.lr_final_fraction) * min(1.0, step / max(1, steps - 1))
    return settings.lr * warm * decay


def adamw(
    masters: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], settings: Optimizer
) -> torch.optim.AdamW:
    """AdamW over masters, or over a rank's parts of them, with weight decay of matrices only.

    Norm weights and biases do not decay: their size does not make the model more complex. The
    biases of all experts of a layer are one tensor of two dimensions, and biases all the same.

    On a GPU this uses torch's fused kernel. Torch's default there runs operator by operator over
    all masters at once, and needs as many bytes again for the roots of the second moments.
    """
    decays = {n: p.dim() > 1 and not n.endswith("bias") for n, p in parameters.items()}
    matrices, others = (
        [masters[name] for name, each in decays.items() if each is has_decay]
        for has_decay in (True, False)
    )
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    is_on_cpu = all(master.device.type == "cpu" for master in masters.values())
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        fused=None if is_on_cpu else True,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )


class Updater:
    """Owns the optimizer's state of the parameters that train; frozen ones have none.

    Backward adds gradients, then `update` applies and drops them.
    """

    def __init__(self, model: nn.Module, settings: Optimizer) -> None:
        self._settings = settings
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                add = self._accumulate_into(name)
                parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        self._adamw = adamw(self._masters, self._parameters, settings)

    def sum_gradients(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Replace each gradient by its sum over the ranks, each of which has all parameters.

        Args:
            all_reduce: Returns the sum over the ranks, the same bytes on each of them.
        """
        for master in self._masters.values():
            own = torch.zeros_like(master) if master.grad is None else master.grad
            master.grad = all_reduce(own)

    def update(self, *, lr: float) -> float:
        """Clip, step, and drop the gradients; returns the norm before clipping.

        Raises:
            NonFiniteGradientError: No weight and no moment was changed; the gradients are dropped.
        """
        with_grad = [master for master in self._masters.values() if master.grad is not None]
        norm = nn.utils.get_total_norm(
            [master.grad for master in with_grad if master.grad is not None]
        )
        if not bool(norm.isfinite()):
            self._adamw.zero_grad(set_to_none=True)
            raise NonFiniteGradientError(
                "the gradient norm is not finite; the step was not applied"
            )
        nn.utils.clip_grads_with_norm_(with_grad, self._settings.grad_norm_max, norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """All state by name: moments, counts, and the masters of a model narrower than fp32."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                tensors[f"{name}|master"] = master.detach()
            for field, value in self._adamw.state.get(master, {}).items():
                tensors[f"{name}|{field}"] = value.detach().reshape(value.shape or (1,))
        return tensors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state()` of the same model.

        Raises:
            ValueError: the state belongs to another model.
        """
        for key, value in state.items():
            name, _, field = key.rpartition("|")
            if name not in self._masters:
                raise ValueError(f"optimizer state for {name}, which the model does not have")
            master = self._masters[name]
            with torch.no_grad():
                # In place: AdamW and the gradient hooks hold this very tensor.
                if field == "master":
                    master.copy_(value)
                else:
                    shape = () if field == "step" else value.shape
                    self._adamw.state[master][field] = value.reshape(shape).to(
                        master.device, copy=True
                    )

    def _accumulate_into(self, name: str) -> Callable[[Tensor], None]:
        """A hook that moves a parameter's gradient into its fp32 master as soon as it is ready."""

        def accumulate(parameter: Tensor) -> None:
            assert parameter.grad is not None
            master = self._masters[name]
            grad = parameter.grad.to(master.dtype)
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            # Freed at once: the next block's gradients would be added in bfloat16 otherwise.
            parameter.grad = None

        return accumulate


def _master(parameter: nn.Parameter) -> Tensor:
    if torch.finfo(parameter.dtype).bits >= torch.finfo(torch.float32).bits:
        return parameter
    return parameter.detach().to(torch.float32).clone()
