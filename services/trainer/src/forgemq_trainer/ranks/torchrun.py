"""`python -m forgemq_trainer.ranks.torchrun 2`: all ranks of this machine as one process.

If one rank dies, torchrun ends the others, and this process names it and fails. If this process
dies, however it does, the ranks end too (`lifeline.py`).

With `FORGEMQ_NODES_COUNT` above 1 it is started once on each machine, and the ranks of all train
together (`nodes.py`). A machine that is lost ends the ranks of the others with their next
exchange, or as soon as it is back. The supervisors that start these processes again start the
trainer as a whole: ranks begin only when all machines are there.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from forgemq_settings.environment import SettingsError, parse
from forgemq_shell.service import EXIT_FAILED, EXIT_OK, EXIT_REFUSED, ServiceSettings
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.ranks.alive import touching
from forgemq_trainer.ranks.lifeline import TORCHRUN_PID
from forgemq_trainer.ranks.nodes import LOOK_EVERY_S, NodesSettings, nodes_of, wait_for_first

RANK_MODULE = "forgemq_trainer"
LOOPBACK = "127.0.0.1"

KILL_AFTER_GRACE_S = 5
"""A rank whose grace is over is cancelled first, and then has this long."""


def run_ranks(count: int, environ: Mapping[str, str]) -> int:
    """Start this machine's ranks and wait for their end; returns the exit status.

    0: they ended, or a signal stopped them. 2: one of them refused its settings. 1: one of them
    died, or the other machines are not there.

    Args:
        count: Ranks of this machine.
        environ: Of this process.
    """
    telemetry = Telemetry(service="trainer")
    try:
        nodes = nodes_of(environ)
        service = parse(ServiceSettings, prefix="FORGEMQ_SERVICE_", environ=environ)
    except SettingsError as error:
        telemetry.event("refused", error=str(error))
        return EXIT_REFUSED
    _prepare(nodes)
    kill_after_s = math.ceil(service.stop_grace_s) + KILL_AFTER_GRACE_S
    try:
        with touching(service.alive_file, until_others_do=True):
            return _run(count, nodes, telemetry, kill_after_s=kill_after_s)
    except SignalException:
        return EXIT_OK
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        telemetry.event("ranks_ended", error=describe_ends(statuses))
        return EXIT_REFUSED if EXIT_REFUSED in statuses.values() else EXIT_FAILED


def _prepare(nodes: NodesSettings) -> None:
    """Set what torchrun and the ranks read of this process and its environment."""
    # torchrun passes its environment to the ranks; its API takes no other.
    environ = os.environ  # noqa: TID251 - see above
    environ[TORCHRUN_PID] = str(os.getpid())
    if nodes.count == 1:
        # Without an interface, gloo resolves the host's name, which may fail; the loopback also
        # keeps strangers out.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        # Ranks that start again beside a torchrun that stays would find their former addresses in
        # its store.
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # torchrun handles signals only once ranks run. In a container this is process 1, which a
    # signal without a handler does not end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)


def _stop(number: int, _: FrameType | None) -> None:
    raise SignalException("stopped before its ranks ran", signal.Signals(number))


def _run(count: int, nodes: NodesSettings, telemetry: Telemetry, *, kill_after_s: int) -> int:
    """Run the ranks to their end.

    The first machine fails at once if the others are lost: its process holds what they met by, and
    only a new process begins without it. The others try again for `start_timeout_s`, as the first
    may be about to start again.
    """
    deadline_s = time.monotonic() + nodes.start_timeout_s
    while True:
        try:
            wait_for_first(nodes, deadline_s=deadline_s)
            launch = elastic_launch(_config(count, nodes, kill_after_s), sys.executable)
            launch("-m", RANK_MODULE)
        except (RendezvousError, dist.DistError, TimeoutError) as error:
            if nodes.is_first or time.monotonic() > deadline_s:
                telemetry.event("nodes_lost", error=f"{type(error).__name__}: {error}")
                return EXIT_FAILED
            time.sleep(LOOK_EVERY_S)
        else:
            return EXIT_OK


def _config(count: int, nodes: NodesSettings, kill_after_s: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=count,
        run_id=nodes.revision,  # A name in the first torchrun's own store.
        rdzv_backend="c10d",
        rdzv_endpoint=nodes.rendezvous or f"{LOOPBACK}:0",
        rdzv_configs={
            "is_host": nodes.is_first,
            "join_timeout": math.ceil(nodes.start_timeout_s),
        },
        local_addr=nodes.address or LOOPBACK,
        max_restarts=0,  # The supervisor restarts this process, and with it all ranks.
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        shutdown_timeout=kill_after_s,
    )


def describe_ends(statuses: Mapping[int, int]) -> str:
    """One line that names the ranks that ended, and how; the likely cause comes first.

    Args:
        statuses: Exit status by rank; -n if signal n killed it.
    """
    ends = [
        f"rank {rank} "
        + (
            f"was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with status {status}"
        )
        # A rank that was killed is the cause; one that failed may have failed because another died.
        for rank, status in sorted(statuses.items(), key=lambda each: (each[1] >= 0, each[0]))
    ]
    return f"{', '.join(ends)}; the trainer ends with all its ranks"


if __name__ == "__main__":
    sys.exit(run_ranks(int(sys.argv[1]), os.environ))  # noqa: TID251 - this is a main module
