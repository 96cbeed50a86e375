"""Work that is done again and again until the service stops."""

from collections.abc import Awaitable, Callable

from forgemq_auditor.group_audit import GroupAudit
from forgemq_bus.errors import FencedError, LogError
from forgemq_shell.interruption import wait_at_most
from forgemq_shell.service import Context

Round = Callable[[], Awaitable[None]]

RETAKE_AFTER_S = 15.0
"""The active auditor is fenced if a process that lost the role while it stood still wakes up. Group
membership takes the role from it within 10 s; then the active one starts again."""


async def repeat(context: Context, work: Round, *, every_s: float, failed: str) -> None:
    """Do rounds of work until the service stops; a round that fails is the event `failed`."""
    while not context.stop.is_set():
        try:
            await work()
        except LogError as error:
            # Nothing was deleted that should not be; what stays costs space until the next round.
            context.telemetry.event(failed, error=str(error))
        await wait_at_most(context.stop, every_s)


async def keep_audited(context: Context, *, every_s: float) -> None:
    """Audit what has retired until the service stops, and then once more."""
    telemetry = context.telemetry
    while not context.stop.is_set():
        try:
            await _audit(context, every_s=every_s)
        except FencedError as error:
            telemetry.event("audit_fenced", error=str(error))
            await wait_at_most(context.stop, RETAKE_AFTER_S)
        except LogError as error:
            # Nothing is trimmed meanwhile; the next one goes on from what was committed.
            telemetry.event("audit_failed", error=str(error))
            await wait_at_most(context.stop, every_s)


async def _audit(context: Context, *, every_s: float) -> None:
    audit = await GroupAudit.open(context.log, configuration=context.configuration)
    try:
        is_last = False
        while not is_last:
            # The scheduler ends before the auditor: what it retired last is audited here too.
            is_last = context.stop.is_set()
            while (done := await audit.audit()).has_more:
                context.telemetry.count("auditor.groups_audited", done.groups)
            context.telemetry.count("auditor.groups_audited", done.groups)
            if not is_last:
                await wait_at_most(context.stop, every_s)
    finally:
        await audit.close()
