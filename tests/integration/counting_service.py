"""A transform service with the counting core, started by test_shell as its own process."""

import asyncio
import os
import sys

from forgemq_contracts import topics
from forgemq_shell.service import Context, run_service
from forgemq_shell.transform import Transform
from tests.simulation.counting_core import CountingCore


async def main(context: Context) -> None:
    transform = Transform(
        service="merger",
        inputs=(topics.SCORED_GROUPS,),
        journal=topics.MERGER_JOURNAL,
        make_core=lambda partition: CountingCore(partition=partition),
        logic_version=1,
        tick_s=0.1,
    )
    await transform.run(context)


async def broken(context: Context) -> None:
    """Fail as a service with a broken invariant does."""
    raise RuntimeError(f"the invariant of {context.configuration.run} is broken")


async def deaf(context: Context) -> None:
    """Run without ever looking at `context.stop`."""
    context.telemetry.event("deaf")
    await asyncio.sleep(600)


if __name__ == "__main__":
    chosen = {"broken": broken, "deaf": deaf}.get(sys.argv[-1], main)
    sys.exit(run_service("merger", chosen, os.environ))
