"""Audits the run while the console is up, so that what was compared may be trimmed."""

import asyncio
from contextlib import suppress

from forgemq_bus.errors import FencedError, LogError
from forgemq_run_view.auditing import Auditor
from forgemq_shell.service import Context

_RETAKE_ROUNDS = 20
"""A console that was fenced takes over again after so many rounds: the newer one may be gone."""


async def keep_audited(context: Context, *, every_s: float) -> None:
    """Audit what has retired, again and again, until the console stops."""
    telemetry = context.telemetry
    while not context.stop.is_set():
        try:
            await _audit(context, every_s=every_s)
        except FencedError as error:
            telemetry.event("audit_fenced", error=str(error))
            await _stopped_within(context, _RETAKE_ROUNDS * every_s)
        except LogError as error:
            # Nothing is trimmed meanwhile; the next auditor goes on from what was committed.
            telemetry.event("audit_failed", error=str(error))
            await _stopped_within(context, every_s)


async def _audit(context: Context, *, every_s: float) -> None:
    partitions = context.configuration.log.group_partitions
    auditor = await Auditor.open(context.log, partitions=partitions)
    try:
        while not context.stop.is_set():
            done = await auditor.audit()
            context.telemetry.count("console.groups_audited", done.groups)
            if not done.has_more:
                await _stopped_within(context, every_s)
    finally:
        await auditor.close()


async def _stopped_within(context: Context, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await context.stop.wait()
