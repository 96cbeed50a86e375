"""What SGLang lacks for engines of several processes, beside what one process computes."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed as dist

from forgemq_sglang_cpu import spread
from forgemq_sglang_cpu.options import EngineOptions, command_line, environment

EXPERTS, WIDTH, TOP_K, TOKENS = 6, 8, 3, 5


class Chosen(NamedTuple):
    """As SGLang's output of a router."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


def run_experts(layer: Any, x: torch.Tensor, chosen: Chosen, config: object) -> torch.Tensor:
    """As SGLang's experts in plain torch: an id of -1 would be the last one's."""
    del config
    assert int(chosen.topk_ids.min()) >= 0
    outputs = torch.einsum("ni,nkoi->nko", x, layer.weight[chosen.topk_ids])
    return torch.einsum("nko,nk->no", outputs, chosen.topk_weights)


@pytest.mark.parametrize("processes", [1, 2, 3, 6])
def test_the_sum_over_processes_is_the_output_of_all_experts(processes: int) -> None:
    torch.manual_seed(processes)
    weight = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.float64)
    weights, ids = logits.softmax(-1).topk(TOP_K)
    whole = run_experts(SimpleNamespace(weight=weight), x, Chosen(weights, ids, logits), None)
    each, total = EXPERTS // processes, torch.zeros_like(x)
    for first in range(0, EXPERTS, each):
        own = torch.where((ids >= first) & (ids < first + each), ids - first, -1)
        layer: Any = SimpleNamespace(weight=weight[first : first + each])
        total += spread.run_present_experts(
            run_experts, layer, x, Chosen(weights, own, logits), None
        )
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-12)


def test_a_process_that_has_none_of_the_chosen_experts_adds_nothing() -> None:
    absent = Chosen(torch.ones(2, 1), torch.full((2, 1), -1), torch.zeros(2, 1))
    layer: Any = SimpleNamespace(weight=torch.zeros(0, WIDTH, WIDTH))
    output = spread.run_present_experts(run_experts, layer, torch.ones(2, WIDTH), absent, None)
    assert output.shape == (2, WIDTH)
    assert not output.any()


def _report(rank: int, answers: list[tuple[bool, str]], path: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    updater = SimpleNamespace(tp_cpu_group=dist.group.WORLD)
    success, message = answers[rank]
    answer = SimpleNamespace(success=success, message=message)
    told = spread.report_every_process(lambda *_: answer, updater, None)
    results[rank] = (told.success, told.message)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([(True, "a"), (True, "b")], [(True, "a"), (True, "b")]),
        ([(True, "a"), (False, "b")], [(False, "process 1: b")] * 2),
        ([(False, "a"), (False, "b")], [(False, "process 0: a; process 1: b")] * 2),
    ],
)
def test_every_process_answers_for_all(
    answers: list[tuple[bool, str]], told: list[tuple[bool, str]], tmp_path: Any
) -> None:
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(
            _report, args=(answers, str(tmp_path / "store"), results), nprocs=2
        )
        assert [results[rank] for rank in (0, 1)] == told


def test_on_a_cpu_the_processes_share_the_cores_and_one_process_has_no_flag_for_it() -> None:
    options = EngineOptions(tensor_parallel=2, expert_parallel=2, attention_data_parallel=2)
    command = " ".join(command_line(options, model_path="m", host="h", port=7))
    assert "--device cpu" in command
    assert "--tp-size 2 --ep-size 2 --dp-size 2 --enable-dp-attention" in command
    variables = environment(options, {}, pid=1, weight_bytes=1)
    first, second = variables["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert first == second
    assert first.startswith("0-")
    alone = EngineOptions()
    assert "--tp-size" not in command_line(alone, model_path="m", host="h", port=7)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment(alone, {}, pid=1, weight_bytes=1)
