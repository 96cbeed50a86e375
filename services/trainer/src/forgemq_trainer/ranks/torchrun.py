"""`python -m forgemq_trainer.ranks.torchrun 2`: all ranks of one machine as one process.

If one rank dies, torchrun ends the others, and this process names it and fails. If this process
dies, however it does, the ranks end too (`lifeline.py`).
"""

import os
import signal
import sys
from collections.abc import Mapping

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from forgemq_shell.service import EXIT_FAILED, EXIT_OK, EXIT_REFUSED
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.ranks.lifeline import TORCHRUN_PID

RANK_MODULE = "forgemq_trainer"
LOOPBACK = "127.0.0.1"


def run_ranks(count: int) -> int:
    """Start the ranks and wait for their end; returns the exit status.

    0: they ended, or a signal stopped them. 2: one of them refused its settings. 1: one of them
    died.
    """
    # torchrun passes its environment to the ranks; its API takes no other. Without an interface,
    # gloo resolves the host's name, which may fail; the loopback also keeps strangers out.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # noqa: TID251 - see above
    os.environ[TORCHRUN_PID] = str(os.getpid())  # noqa: TID251 - see above
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="ranks",  # A name in this torchrun's own store, so it need not be unique.
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,  # The supervisor restarts this process, and with it all ranks.
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        elastic_launch(config, sys.executable)("-m", RANK_MODULE)
    except SignalException:
        return EXIT_OK
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        Telemetry(service="trainer").event("ranks_ended", error=describe_ends(statuses))
        return EXIT_REFUSED if EXIT_REFUSED in statuses.values() else EXIT_FAILED
    return EXIT_OK


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
    sys.exit(run_ranks(int(sys.argv[1])))
