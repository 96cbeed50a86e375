"""How many bytes torch holds at most during a call: what a memory budget is checked against.

Counts every allocation and release of torch's own allocator, so neither the interpreter nor the
heap's fragments blur it; parameters and whatever else lives before the call are not counted.
"""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(run: Callable[[], object], *, device: str = "cpu") -> int:
    """The most bytes that torch held at once during `run`, beyond those it held before.

    Args:
        run: may allocate on one device and should run a few thousand operators at most: on a CPU
            each one is recorded.
        device: `cpu` or that of the allocations.
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
    """(nanoseconds, bytes allocated or, below zero, released)."""
    events = getattr(results, "events")()  # noqa: B009  # torch's result has no public type
    return [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
