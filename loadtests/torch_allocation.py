"""The most bytes that torch holds at once during a call, to compare with a predicted budget.

Counts every allocation and release of torch's own allocator, so neither the interpreter nor the
heap's fragments blur it. Tensors that exist before the call, as parameters do, are not counted.
"""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(run: Callable[[], object], *, device: str = "cpu") -> int:
    """The most bytes that torch held at once during `run`, beyond those it held before.

    Args:
        run: May allocate on one device, and should run a few thousand operators at most: on a CPU
            each one is recorded.
        device: Of the allocations.
    """
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    result = profiler.profiler
    assert result is not None
    held = peak = 0
    for event in sorted(_changes(result.kineto_results), key=lambda change: change[0]):
        held += event[1]
        peak = max(peak, held)
    return peak


def _changes(results: object) -> list[tuple[int, int]]:
    """(nanoseconds, bytes) of each change; bytes are below zero if released."""
    events = getattr(results, "events")()  # noqa: B009  # torch's result has no public type
    return [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
