"""Hooks for what SGLang lacks for engines of several processes.

On a GPU each process has one; on a CPU the processes share the cores. The names of SGLang's parts
are in `plugin.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def report_every_process(original: Callable[..., Any], updater: Any, request: Any) -> Any:  # noqa: ANN401
    """Do a step of a weight update; the answer says if it failed in any process of the engine.

    A hook around the steps of SGLang's `SchedulerWeightUpdaterManager`, which answers for the first
    process alone: an engine of which another one keeps the old weights would go on as if it had the
    new ones.
    """
    answer = original(updater, request)
    group = updater.tp_cpu_group
    outcomes: list[tuple[bool, str]] = [(False, "")] * dist.get_world_size(group)
    if len(outcomes) > 1:
        dist.all_gather_object(outcomes, (answer.success, answer.message), group=group)
        failed = [
            f"process {number}: {message}"
            for number, (is_done, message) in enumerate(outcomes)
            if not is_done
        ]
        if failed:
            answer.success, answer.message = False, "; ".join(failed)
    return answer


def wake_often(result: None, scheduler: Any) -> None:  # noqa: ANN401
    """Let an idle scheduler look for work every 10 ms if other groups may have some.

    A hook after SGLang makes what a scheduler sleeps on: its own socket, for a second. The groups
    of an engine compute in step, so a request to one of them, or a command, which comes to the
    first one alone, would wait until the others wake up.
    """
    del result
    from sglang.srt.runtime_context import get_parallel

    sleeper = scheduler.idle_sleeper
    if sleeper is not None and get_parallel().attn_dp_size > 1:
        sleeper.poller = _ShortPoller(sleeper.poller)


class _ShortPoller:
    _POLL_MS_MAX = 10
    """Less than a step of a large model, and 100 times a second for a process that does nothing."""

    def __init__(self, poller: Any) -> None:  # noqa: ANN401
        self._poller = poller

    def poll(self, timeout_ms: int) -> object:
        return self._poller.poll(min(timeout_ms, self._POLL_MS_MAX))


def run_present_experts(
    original: Callable[..., torch.Tensor],
    layer: torch.nn.Module,
    x: torch.Tensor,
    topk_output: Any,  # noqa: ANN401
    config: object,
) -> torch.Tensor:
    """Run the experts that this process has; the processes' sum is the layer's output.

    A hook around SGLang's experts in plain torch, which takes the -1 of an expert that another
    process has for an index.

    Args:
        original: Runs `[N, K]` experts of N rows.
        layer: With the weights of this process's experts.
        x: `[N, width]`.
        topk_output: Expert ids and weights, `[N, K]` both.
        config: Of the layer.
    """
    is_present = topk_output.topk_ids >= 0
    if bool(is_present.all()):
        return original(layer, x, topk_output, config)
    rows, places = is_present.nonzero(as_tuple=True)
    output = torch.zeros_like(x)
    if len(rows):
        # Each pair of a row and one of its experts by itself: rows have unlike numbers of them.
        pairs = topk_output._replace(
            topk_ids=topk_output.topk_ids[rows, places, None],
            topk_weights=topk_output.topk_weights[rows, places, None],
        )
        output.index_add_(0, rows, original(layer, x[rows], pairs, config))
    return output


def copy_rows(*arguments: object) -> None:
    """Move a group's tokens in or out of those of all; SGLang's own way for a CPU."""
    from sglang.srt.layers.dp_attention import memcpy_cpu

    memcpy_cpu(*arguments)


def gather_tensors(group: Any, output: torch.Tensor, own: torch.Tensor) -> None:  # noqa: ANN401
    """Gather tensors of a group's processes; SGLang's operator for it knows no CPU."""
    group._all_gather_into_tensor(output, own)


def scatter_sums(group: Any, output: torch.Tensor, own: torch.Tensor) -> None:  # noqa: ANN401
    """Sum tensors of a group's processes, each of which keeps its part; as `gather_tensors`."""
    group._reduce_scatter_tensor(output, own)


def scatter_unequal_sums(
    group: Any,  # noqa: ANN401
    input_: torch.Tensor,
    output: torch.Tensor | None = None,
    sizes: list[int] | None = None,
) -> torch.Tensor:
    """As `scatter_sums`, of parts that are not equal, for which SGLang's own way needs NCCL."""
    summed: torch.Tensor = group._deterministic_reduce_scatterv(input_, output, sizes)
    return summed


def keep_sizes(model_config: object, load_config: object, tp_size: int) -> object:
    """A model's configuration as it is, as for GPUs.

    SGLang's own enlarges heads and MLPs for its kernels on CPUs; without these the weights no
    longer fit.
    """
    del load_config, tp_size
    return model_config


def padded_length(backend: object) -> int:
    """Length of the requests that fill up a group's batch to the size of the largest one."""
    del backend
    return 1
