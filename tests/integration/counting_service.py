"""A transform service with the counting core, started by test_shell as its own process."""

import asyncio
import os
import sys

from msgspec import structs

from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_shell.service import Context, run_service
from forgemq_shell.transform import Transform
from tests.simulation.counting_core import CountingCore


class NewerCore(CountingCore):
    """The next version of the counting core: it writes higher numbers."""

    def _output(self, group_id: str, count: int) -> Output:
        output = super()._output(group_id, count)
        tokens = output.record.loss_tokens + 1000
        return structs.replace(output, record=structs.replace(output.record, loss_tokens=tokens))


def transform(core: type[CountingCore], *, logic_version: int) -> Transform:
    return Transform(
        service="merger",
        inputs=(topics.SCORED_GROUPS,),
        journal=topics.MERGER_JOURNAL,
        make_core=lambda partition: core(partition=partition),
        logic_version=logic_version,
        tick_s=0.1,
    )


async def main(context: Context) -> None:
    await transform(CountingCore, logic_version=1).run(context)


async def newer(context: Context) -> None:
    """Run the next version of the core."""
    await transform(NewerCore, logic_version=2).run(context)


async def broken(context: Context) -> None:
    """Fail as a service with a broken invariant does."""
    raise RuntimeError(f"the invariant of {context.configuration.run} is broken")


async def deaf(context: Context) -> None:
    """Run without ever looking at `context.stop`."""
    context.telemetry.event("deaf")
    await asyncio.sleep(600)


if __name__ == "__main__":
    chosen = {"broken": broken, "deaf": deaf, "newer": newer}.get(sys.argv[-1], main)
    sys.exit(run_service("merger", chosen, os.environ))
