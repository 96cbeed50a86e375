"""The pointwise functions are torch's composites; the layers made of them are transformers' own."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from forgemq_trainer.core.attention.flash4_varlen import Flash4Varlen, choose_kernel, has_head_size
from forgemq_trainer.core.attention.flash_varlen import FlashVarlen, PackedPieces
from forgemq_trainer.core.layers import GatedMlp, RotaryAttention, replace_layers
from forgemq_trainer.core.pointwise import Gated, Normed, Rotated
from forgemq_trainer.core.precision import make_precise
from forgemq_trainer.families import UnsupportedModelError
from forgemq_trainer.model import prepare
from tests.unit.trainer.scene import make_model

EPS = 1e-6


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]


def _angles() -> tuple[Tensor, Tensor]:
    angle = torch.arange(20, dtype=torch.float64).view(5, 4).repeat(1, 2)
    return angle.cos(), angle.sin()


def _stock_rotation(values: Tensor) -> Tensor:
    cos, sin = _angles()
    heads = values.transpose(0, 1)[None]
    turned, _ = apply_rotary_pos_emb(heads, heads, cos[None], sin[None])
    return turned[0].transpose(0, 1)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
    "normed": (
        lambda hidden, weight: Normed.apply(hidden, weight, EPS),
        lambda hidden, weight: functional.rms_norm(hidden, (8,), weight, EPS),
        _leaves((1, 5, 8), (8,)),
    ),
    "gated": (Gated.apply, lambda gate, up: functional.silu(gate) * up, _leaves((5, 8), (5, 8))),
    "rotated": (
        lambda values: Rotated.apply(values, *_angles()),
        _stock_rotation,
        _leaves((5, 3, 8)),
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_output_and_gradients_are_those_of_torchs_composite(case: str) -> None:
    ours, composite, inputs = CASES[case]
    found, expected = ours(*inputs), composite(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    owed = torch.randn(found.shape, dtype=torch.float64)
    for seen, wanted in zip(
        torch.autograd.grad(found, inputs, owed),
        torch.autograd.grad(expected, inputs, owed),
        strict=True,
    ):
        torch.testing.assert_close(seen, wanted, rtol=1e-12, atol=1e-13)


def test_a_gate_of_no_values_has_none_and_gradients_of_none() -> None:
    """As of the MLP beside experts in a model whose `n_shared_experts` is 0."""
    gate, up = _leaves((1, 5, 0), (1, 5, 0))
    found = Gated.apply(gate, up)
    found.sum().backward()
    assert found.shape == gate.grad.shape == up.grad.shape == (1, 5, 0)


@pytest.mark.parametrize(
    ("kind", "attentions", "mlps"),
    [("llama", 2, 2), ("qwen2", 2, 2), ("qwen3", 2, 2), ("qwen3_moe", 2, 0)],
)
def test_replaced_layers_keep_their_parameters_and_compute_the_same(
    kind: str, attentions: int, mlps: int
) -> None:
    stock, replaced = (make_model(kind, torch.float64) for _ in range(2))
    for model in (stock, replaced):
        make_precise(model)
        if kind == "qwen3_moe":
            model.set_experts_implementation("eager")  # The grouped kernel has no float64.
    replace_layers(replaced)
    modules = list(replaced.modules())
    assert sum(isinstance(module, RotaryAttention) for module in modules) == attentions
    assert sum(isinstance(module, GatedMlp) for module in modules) == mlps
    names = [name for name, _ in stock.named_parameters()]
    assert [name for name, _ in replaced.named_parameters()] == names
    tokens = torch.arange(1, 12)[None]
    with torch.no_grad():
        expected, found = (model(input_ids=tokens).logits for model in (stock, replaced))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class RenamedAttention(nn.Module):
    """As transformers might name a class one day, with a part that nobody here knows."""

    def __init__(self, stock: nn.Module, *, part: str) -> None:
        super().__init__()
        self.__dict__.update(stock.__dict__)
        self._modules = {**stock._modules, part: nn.Identity()}


@pytest.mark.parametrize(
    ("place", "part"), [("self_attn", "gate"), ("self_attn", "q_norm"), ("mlp", "act")]
)
def test_a_layer_with_other_parts_than_were_known_is_an_error_at_the_start(
    place: str, part: str
) -> None:
    model = make_model("llama", torch.float32)
    layer = model.model.layers[1]
    setattr(layer, place, RenamedAttention(getattr(layer, place), part=part))
    with pytest.raises(UnsupportedModelError, match=f"^model.layers.1.{place} is RenamedAttention"):
        prepare(model)


def test_a_class_of_another_name_is_replaced_for_what_it_has() -> None:
    model = make_model("qwen3", torch.float32)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Renamed", (type(layer.self_attn),), {})
    replace_layers(model)
    assert all(isinstance(layer.self_attn, RotaryAttention) for layer in model.model.layers)
    moved = make_model("qwen3", torch.float32)
    moved.model.layers[0].attention = moved.model.layers[0].self_attn
    del moved.model.layers[0].self_attn
    with pytest.raises(ValueError, match="has 1 modules named self_attn in 2 layers"):
        replace_layers(moved)


def test_a_replaced_model_generates_with_a_cache_what_it_computes_without() -> None:
    model = make_model("qwen3", torch.float64)
    replace_layers(model)
    tokens = torch.arange(1, 6)[None]
    found = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=True)
    expected = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=False)
    assert found.tolist() == expected.tolist()


def test_without_a_gpu_the_kernel_is_torchs_and_flash_4_takes_multiples_of_16() -> None:
    assert isinstance(choose_kernel(128), FlashVarlen)
    assert [size for size in (8, 16, 40, 64, 128, 136, 256) if has_head_size(size)] == [16, 64, 128]


@pytest.mark.slow
def test_the_pinned_flash_4_takes_the_arguments_that_it_gets() -> None:
    """Without a GPU it can be loaded, not run."""
    interface = pytest.importorskip("flash_attn.cute.interface")
    pieces = PackedPieces(
        query_bounds=torch.tensor([0, 3]),
        key_bounds=torch.tensor([0, 3]),
        query_max=3,
        key_max=3,
        is_causal=True,
    )
    tensors = [torch.zeros(3, 2, 16)] * 3
    kernel = Flash4Varlen()
    calls: list[inspect.BoundArguments] = []

    class Recorded:
        @staticmethod
        def _flash_attn_fwd(*arguments: object, **named: object) -> tuple[Tensor, ...]:
            calls.append(inspect.signature(interface._flash_attn_fwd).bind(*arguments, **named))
            return tensors[0], torch.zeros(2, 3), tensors[0]

    kernel._interface = Recorded
    output, lse = kernel.forward(*tensors, pieces, scale=0.5)
    assert (output.shape, lse.shape) == ((3, 2, 16), (2, 3))
    assert calls[0].arguments["return_lse"] is True
    assert calls[0].arguments["causal"] is True
    assert calls[0].arguments["softmax_scale"] == 0.5
