"""Schedule, clipping, master weights and state of the optimizer."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from forgemq_contracts.run import Optimizer
from forgemq_trainer.core.optimizer import NonFiniteGradientError, Updater, adamw, learning_rate


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)


def _add_gradients(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(5, 4).to(next(model.parameters()).dtype)
    model(x).float().pow(2).sum().backward()


def test_the_rate_warms_up_and_decays_to_its_fraction_at_the_last_step() -> None:
    settings = Optimizer(lr=1.0, warmup_steps=2, lr_final_fraction=0.2)
    rates = [learning_rate(settings, step=k, steps=5) for k in range(5)]
    assert rates == pytest.approx([0.5, 0.8, 0.6, 0.4, 0.2])
    assert learning_rate(Optimizer(lr=3.0), step=0, steps=1) == 3.0


def test_an_update_is_adamw_with_the_gradient_clipped() -> None:
    settings = Optimizer(lr=0.1, grad_norm_max=0.01, eps=1e-8)
    ours, plain = _model(), _model()
    updater = Updater(ours, settings)
    adamw = torch.optim.AdamW(
        plain.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    for seed in range(3):
        _add_gradients(ours, seed)
        _add_gradients(plain, seed)
        norm = updater.update(lr=0.1)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        adamw.step()
        adamw.zero_grad()
        assert norm == float(expected)
        assert norm > 0.01
    for left, right in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)
        assert left.grad is None


def test_only_matrices_decay() -> None:
    model = _model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    updater = Updater(model, Optimizer(lr=0.1, weight_decay=0.5))
    (model[0].weight.sum() * 0 + model[0].bias.sum() * 0).backward()
    updater.update(lr=0.1)
    assert torch.allclose(model[0].weight, before["0.weight"] * 0.95)
    assert torch.equal(model[0].bias, before["0.bias"])


def test_biases_of_all_experts_in_one_tensor_do_not_decay() -> None:
    """Of gpt-oss, whose experts are one tensor for all of a layer and have biases."""
    names = ("experts.gate_up_proj", "experts.gate_up_proj_bias", "sinks")
    sizes = ((2, 3, 4), (2, 4), (3,))
    model = nn.Module()
    experts = nn.Module()
    model.add_module("experts", experts)
    experts.gate_up_proj = nn.Parameter(torch.ones(sizes[0]))
    experts.gate_up_proj_bias = nn.Parameter(torch.ones(sizes[1]))
    model.sinks = nn.Parameter(torch.ones(sizes[2]))
    updater = Updater(model, Optimizer(lr=0.1, weight_decay=0.5))
    sum(each.sum() * 0 for each in model.parameters()).backward()
    updater.update(lr=0.1)
    found = {name: float(each.detach().mean()) for name, each in model.named_parameters()}
    assert found == pytest.approx(dict(zip(names, (0.95, 1.0, 1.0), strict=True)))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = _model()
    updater = Updater(model, Optimizer(lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    _add_gradients(model, 0)
    model[0].weight.grad[0, 0] = float("nan")
    with pytest.raises(NonFiniteGradientError, match="not finite"):
        updater.update(lr=0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_error_while_the_norm_is_computed_is_no_gradient_that_is_not_finite() -> None:
    """Here the norm has no value, as of tensors without data; on a GPU memory may run out."""
    model = nn.Linear(2, 1, device="meta")
    updater = Updater(model, Optimizer(lr=0.1))
    model(torch.ones(3, 2, device="meta")).sum().backward()
    with pytest.raises(RuntimeError, match="meta"):
        updater.update(lr=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_continues_to_the_same_bytes(dtype: torch.dtype) -> None:
    settings = Optimizer(lr=0.01)
    whole = _model(dtype)
    updater = Updater(whole, settings)
    for seed in range(2):
        _add_gradients(whole, seed)
        updater.update(lr=0.01)
    other = _model(dtype)
    other.load_state_dict(whole.state_dict())
    restored = Updater(other, settings)
    restored.restore(updater.state())
    for seed in (2, 3):
        for model, each in ((whole, updater), (other, restored)):
            _add_gradients(model, seed)
            each.update(lr=0.01)
    for left, right in zip(whole.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
    for name, tensor in updater.state().items():
        assert torch.equal(tensor, restored.state()[name])


def test_a_rate_too_small_for_bfloat16_still_adds_up() -> None:
    """A bfloat16 weight of 1 rounds steps of 1e-3 away; its fp32 master does not."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    updater = Updater(model, Optimizer(lr=1e-3))
    for _ in range(20):
        model.weight.sum().backward()
        updater.update(lr=1e-3)
    assert float(model.weight.detach()) == pytest.approx(0.98, abs=0.004)
    assert float(updater.state()["weight|master"]) == pytest.approx(0.98, abs=1e-5)


def test_gradients_of_bfloat16_are_added_up_in_fp32() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    updater = Updater(model, Optimizer(lr=1e-3, grad_norm_max=1e9))
    for _ in range(300):
        model.weight.sum().backward()
    assert updater.update(lr=0.0) == 300.0


def test_state_of_another_model_is_refused() -> None:
    state = Updater(_model(), Optimizer()).state()
    assert state == {}
    with pytest.raises(ValueError, match="which the model does not have"):
        Updater(_model(), Optimizer()).restore({"9.weight|exp_avg": torch.zeros(1)})


def test_a_gpu_steps_in_one_kernel_and_a_restored_count_is_on_the_gpu_too() -> None:
    """Checks shapes and devices by the real operators, without a kernel or a GPU."""
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(4, 3, device="cuda:0", dtype=torch.bfloat16))
        updater = Updater(nn.ParameterDict({"weight": weight}), Optimizer())
        moments = {f"weight|{name}": torch.empty(4, 3) for name in ("exp_avg", "exp_avg_sq")}
        state = {"weight|master": torch.empty(4, 3), "weight|step": torch.empty(1), **moments}
        updater.restore(state)
        optimizer = updater._adamw
        (master,) = optimizer.param_groups[0]["params"]
        master.grad = torch.empty_like(master)
        optimizer.step()
        assert optimizer.defaults["fused"] is True
        found = updater.state()
    assert found.keys() == state.keys()
    assert {(tensor.device.type, tensor.dtype) for tensor in found.values()} == {
        ("cuda", torch.float32)
    }
    on_cpu = adamw({"w": torch.zeros(2, 2)}, {"w": nn.Parameter(torch.zeros(2, 2))}, Optimizer())
    assert on_cpu.defaults["fused"] is None
