"""A pair of engines: one reads contexts (prefill), the other samples (decode).

K/V of a context goes from the first to the second over Mooncake, on a CPU over TCP. SGLang's own
paths serve there but for one: a sender numbers its pages in pinned memory. On any device a decode
engine forgets which weights sampled what it holds over a pause, and keeps out of a pause what has
come and it has not looked at; hooks mend both.
"""

import ctypes
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Literal, Protocol, TypeAlias

Role: TypeAlias = Literal["unified", "prefill", "decode"]

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
"""Of Mooncake's wheels the one that loads without CUDA; the extra `pd-cpu` has the same."""

GPU_PACKAGES = {
    "mooncake": "--no-deps mooncake-transfer-engine-cuda13==0.3.13.post1",
    "nixl": "nixl",
}
"""What moves K/V between GPUs, by the module's name, and how uv installs it; in no lock. The first
is SGLang's default."""

INSTALL = f".venv/bin/uv pip install --no-deps {WHEEL}"
"""Without what the wheel says it needs: the lock has all of it that a pair uses."""

EXPERTS_REFUSAL = (
    "the prefill engine records which experts read the context and sampled the first token, and "
    "SGLang 0.5.23 sends that to no decode engine"
)
"""Why a pair cannot record expert routes."""

LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
}
"""What the wheel links against, and the Debian package of each."""

_MOONCAKE_SENDERS = "sglang.srt.disaggregation.mooncake.conn"


_TAKE_ROUNDS_MAX = 400
_TAKE_POLL_S = 0.005
"""Both together: 2 s. Counted, as each process of an engine must look equally often."""


class _HeldRequest(Protocol):
    output_ids: Sequence[int]
    pd_rebootstrap_forced_output_id: int | None
    weight_version_events: list[object]


class _PreallocationQueue(Protocol):
    held_rebootstrap_reqs: list[_HeldRequest]


class _Scheduler(Protocol):
    disagg_decode_prealloc_queue: _PreallocationQueue | None


class _Queue(Protocol):
    @property
    def queue(self) -> Sequence[object]: ...


class _RunningScheduler(Protocol):
    _engine_paused: bool

    @property
    def disagg_decode_prealloc_queue(self) -> _Queue | None: ...

    @property
    def disagg_decode_transfer_queue(self) -> _Queue: ...

    def process_decode_queue(self) -> None: ...


def arguments(role: Role, *, has_gpu: bool, bootstrap_port: int) -> list[str]:
    """The flags of SGLang for an engine of a pair.

    Args:
        role: Of the engine; a unified one needs none.
        has_gpu: The engine serves on GPUs, where SGLang moves K/V by RDMA by default.
        bootstrap_port: Of a prefill engine: where decode engines ask how to reach it.
    """
    if role == "unified":
        return []
    flags = ["--disaggregation-mode", role]
    if role == "prefill":
        flags += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    else:
        # Without it each turn of an episode would bring its whole context again.
        flags += ["--disaggregation-decode-enable-radix-cache"]
    if not has_gpu:
        # Overlapped steps need events of CUDA.
        flags += ["--disaggregation-transfer-backend", "mooncake_tcp", "--disable-overlap-schedule"]
    return flags


def missing_on_cpu(*, libraries: Mapping[str, str] = LIBRARIES) -> str:
    """What this machine lacks for a pair on its CPU, with what installs it; "" if nothing.

    Args:
        libraries: What Mooncake links against, and the Debian package of each.
    """
    packages = sorted(package for name, package in libraries.items() if not _loads(name))
    lacks = []
    if packages:
        lacks.append(f"the Debian packages {' '.join(packages)} (apt-get install)")
    if find_spec("mooncake") is None:
        lacks.append(f"the Python package mooncake ({INSTALL})")
    return " and ".join(lacks)


def missing_on_gpu(flags: Sequence[str]) -> str:
    """What this machine lacks for a pair on its GPUs, with what installs it; "" if nothing.

    Args:
        flags: Of the engine beyond ForgeMQ's own; they may name another way for K/V than Mooncake.
    """
    backend = next((name for name in GPU_PACKAGES if name in flags), "mooncake")
    if find_spec(backend) is not None:
        return ""
    return f"the Python package {backend} (.venv/bin/uv pip install {GPU_PACKAGES[backend]})"


def number_pages_unpinned(result: None, *_: object, **__: object) -> None:
    """Have a prefill engine number its pages in plain memory; a hook when its queue is made."""
    del result
    # Loaded only by an engine that sends over Mooncake.
    senders = sys.modules.get(_MOONCAKE_SENDERS)
    if senders is not None:
        senders.MooncakeKVSender.supports_host_tensor_indices = False


def note_versions_of_held(scheduler: _Scheduler, new_version: str | None) -> None:
    """Note which weights sampled the tokens of requests that decode holds over a pause.

    A hook before SGLang gives the weights another name. It notes that for running and waiting
    requests only, so that those held would name the new weights for all of their tokens.
    """
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    if queue is None:
        return
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    old_version = get_serving().weight_version
    if new_version is None or new_version == old_version:
        return
    for request in queue.held_rebootstrap_reqs:
        # The last token is kept apart until its K/V is there again.
        is_apart = request.pd_rebootstrap_forced_output_id is not None
        tokens = len(request.output_ids) + is_apart
        if tokens:
            event = WeightVersionEvent(old_version=old_version, num_output_tokens=tokens)
            request.weight_version_events.append(event)


def take_what_has_come(scheduler: _RunningScheduler, *_: object, **__: object) -> None:
    """Take over the requests whose K/V has come; a hook before an engine pauses.

    A decode engine looks for that between two steps, and a paused one never does. A request between
    both is not retracted and refuses that the cache is dropped: all requests of the pair would have
    to be aborted. Prefill has sent all that it has by then, so this is over after a look or two.
    """
    preallocated = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    if preallocated is None or scheduler._engine_paused:
        return
    for _round in range(_TAKE_ROUNDS_MAX):
        if not preallocated.queue and not scheduler.disagg_decode_transfer_queue.queue:
            return
        scheduler.process_decode_queue()
        time.sleep(_TAKE_POLL_S)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
