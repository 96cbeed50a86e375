"""Norm, gate and rotation of a layer: arithmetic that touches each value of a token once.

Torch runs it operator by operator, and on a GPU each operator reads and writes all tokens' values
in the device's memory, which takes longer than the arithmetic. There each function of this file is
compiled: one kernel forward and one or two backward. A CPU runs the same functions uncompiled.

Shapes: R rows, D values of a row; T tokens, H heads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

KINDS_MAX = 32
"""Kernels that one function may have in a process: one for each row size and dtype of its models.
More would mean that the number of rows is no symbol, and that each tree compiles again."""

ROWS_MIN = 2
"""torch.compile treats a size of 1 as a constant, and would compile again for it."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The wider of float32 and a dtype: that in which this file computes."""
    return torch.promote_types(dtype, torch.float32)


def compiled_on_gpu(*, rows: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for tensors on a GPU, once for all numbers of rows.

    Args:
        rows: How many of the first arguments are tensors whose first dimension is the row.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(  # type: ignore[call-overload]  # torch's stubs lack two names
            function,
            fullgraph=True,
            dynamic=False,
            recompile_limit=KINDS_MAX,
            isolate_recompiles=True,
        )

        def call(*arguments: Any) -> Any:  # noqa: ANN401  # as the function
            first = arguments[0]
            if not first.is_cuda or len(first) < ROWS_MIN:
                return function(*arguments)
            # Without autograd's state, for which the compiler would make kernels of their own.
            plain = [each.detach() if isinstance(each, Tensor) else each for each in arguments]
            for tensor in plain[:rows]:
                torch._dynamo.mark_dynamic(tensor, 0)
            return compiled(*plain)

        return call

    return decorate


@compiled_on_gpu(rows=1)
def _normed(hidden_RD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = hidden_RD.to(wide_dtype(hidden_RD.dtype))
    norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().div_(hidden_RD.shape[-1]).add_(eps).rsqrt_()
    # Rounded once, after the weight; the stock module of transformers rounds before it too.
    return (wide * scale).mul_(weight_D).to(hidden_RD.dtype), scale


@compiled_on_gpu(rows=3)
def _norm_gradients(
    grad_RD: Tensor, hidden_RD: Tensor, scale_R1: Tensor, weight_D: Tensor
) -> tuple[Tensor, Tensor]:
    grad = grad_RD.to(scale_R1.dtype)
    normed = hidden_RD.to(scale_R1.dtype) * scale_R1
    product = grad * normed
    weight_grad = product.sum(0)
    along = product.mul_(weight_D).mean(-1, keepdim=True)
    hidden_grad = torch.mul(grad, weight_D, out=product)
    hidden_grad.sub_(normed.mul_(along)).mul_(scale_R1)
    return hidden_grad.to(hidden_RD.dtype), weight_grad.to(weight_D.dtype)


class Normed(torch.autograd.Function):
    """Root-mean-square norm over the last dimension, times a weight.

    Saves its input and one number for each row; torch's composite saves three further tensors.

    y = x s w with s = 1 / sqrt(mean(x^2) + eps); dx = s (g w - x s mean(g w x s)), means by row.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        hidden: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Tensor:
        """The norm, of the input's shape and dtype."""
        output_RD: Tensor
        output_RD, scale_R1 = _normed(_by_row(hidden), weight, eps)
        ctx.save_for_backward(hidden, weight, scale_R1)
        return output_RD.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401  # as forward
        """Gradients of input and weight."""
        hidden, weight, scale_R1 = ctx.saved_tensors
        hidden_grad, weight_grad = _norm_gradients(_by_row(grad), _by_row(hidden), scale_R1, weight)
        return hidden_grad.view(hidden.shape), weight_grad, None


def _by_row(values: Tensor) -> Tensor:
    # Rows may have no values, as of a shared MLP of size 0: -1 would not tell their number.
    return values.reshape(values.shape[:-1].numel(), values.shape[-1])


@compiled_on_gpu(rows=2)
def _gated(gate_RD: Tensor, up_RD: Tensor) -> Tensor:
    return functional.silu(gate_RD).mul_(up_RD)


@compiled_on_gpu(rows=3)
def _gate_gradients(grad_RD: Tensor, gate_RD: Tensor, up_RD: Tensor) -> tuple[Tensor, Tensor]:
    gate_grad = torch.ops.aten.silu_backward(grad_RD * up_RD, gate_RD)
    return gate_grad, functional.silu(gate_RD).mul_(grad_RD)


class Gated(torch.autograd.Function):
    """silu(gate) * up; saves its two inputs, torch's composite also silu(gate)."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # as above
        gate: Tensor,
        up: Tensor,
    ) -> Tensor:
        """The product, of the inputs' shape."""
        ctx.save_for_backward(gate, up)
        product: Tensor = _gated(_by_row(gate), _by_row(up))
        return product.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401  # as above
        """Gradients of both inputs."""
        gate, up = ctx.saved_tensors
        gate_grad, up_grad = _gate_gradients(_by_row(grad), _by_row(gate), _by_row(up))
        return gate_grad.view(gate.shape), up_grad.view(up.shape)


@compiled_on_gpu(rows=3)
def _rotated(values_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    half = values_THD.shape[-1] // 2
    left, right = values_THD[..., :half].to(cos_TD.dtype), values_THD[..., half:].to(cos_TD.dtype)
    # The layout of transformers' rotate_half: both halves of a head have the same angles.
    cos, sin = cos_TD[:, None, :half], sin_TD[:, None, :half]
    output = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return output.to(values_THD.dtype)


class Rotated(torch.autograd.Function):
    """Rotary embedding of [T, H, D]: the two halves of a head turn by the token's angles."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # as above
        values_THD: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
    ) -> Tensor:
        """The turned values, rounded once to the dtype of `values_THD`."""
        ctx.save_for_backward(cos_TD, sin_TD)
        turned: Tensor = _rotated(values_THD, cos_TD, sin_TD)
        return turned

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401  # as above
        """The gradient, turned back; angles have none."""
        cos_TD, sin_TD = ctx.saved_tensors
        return _rotated(grad_THD, cos_TD, -sin_TD), None, None
