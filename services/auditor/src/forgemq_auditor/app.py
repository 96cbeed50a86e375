"""Wiring of the auditor: audits groups that retire, trims and sweeps, watches the run."""

import asyncio

from forgemq_auditor import run_watch
from forgemq_auditor.active import run_while_active
from forgemq_auditor.blob_sweep import BlobSweep
from forgemq_auditor.group_audit import TOPICS
from forgemq_auditor.log_trim import trim_log
from forgemq_auditor.rounds import keep_audited, repeat
from forgemq_auditor.settings import AuditorSettings
from forgemq_contracts.topics import AUDITED_GROUPS, Topic
from forgemq_settings.environment import parse
from forgemq_shell.service import Context

# The sweep looks at the headers of every other topic too, and decodes none of them.
CONSUMES: tuple[Topic, ...] = tuple({t.name: t for t in (*TOPICS, *run_watch.TOPICS)}.values())
PRODUCES: tuple[Topic, ...] = (AUDITED_GROUPS,)


async def main(context: Context) -> None:
    """Audit, trim and sweep, or stand by, until the context says stop."""
    settings = parse(AuditorSettings, prefix="FORGEMQ_AUDITOR_", environ=context.environ)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            watched = run_watch.keep_watched(context, every_s=settings.watch_every_s)
            beside = [group.create_task(watched)]
            if not context.configuration.log.keep_for_replay:
                beside += [
                    group.create_task(keep_trimmed(context, every_s=settings.trim_every_s)),
                    group.create_task(keep_swept(context, settings)),
                ]
            await keep_audited(context, every_s=settings.audit_every_s)
            # Cut short: the sweep's first look at a long log takes minutes, and nothing is lost.
            for task in beside:
                task.cancel()

    await run_while_active(context, work)


async def keep_trimmed(context: Context, *, every_s: float) -> None:
    """Delete records that nobody needs any more until the service stops."""

    async def trim() -> None:
        for topic, records in (await trim_log(context.log, context.configuration)).items():
            context.telemetry.count("auditor.trimmed_records", records, topic=topic)

    await repeat(context, trim, every_s=every_s, failed="trim_failed")


async def keep_swept(context: Context, settings: AuditorSettings) -> None:
    """Delete blobs that no record points at any more until the service stops."""
    telemetry = context.telemetry
    blob_sweep = BlobSweep(
        context.log,
        context.blobs,
        configuration=context.configuration,
        grace_s=settings.sweep_grace_s,
    )

    async def sweep() -> None:
        swept = await blob_sweep.sweep()
        for topic, size_bytes in blob_sweep.take_bytes().items():
            telemetry.count("auditor.swept_bytes", size_bytes, topic=topic)
        telemetry.gauge("auditor.blobs_kept", swept.kept)
        telemetry.gauge("auditor.kept_blob_bytes", swept.kept_bytes)
        if swept.deleted:
            telemetry.count("auditor.blobs_deleted", swept.deleted)
            telemetry.count("auditor.deleted_blob_bytes", swept.deleted_bytes)
            telemetry.event(
                "swept",
                kept=swept.kept,
                kept_bytes=swept.kept_bytes,
                deleted=swept.deleted,
                deleted_bytes=swept.deleted_bytes,
            )

    await repeat(context, sweep, every_s=settings.sweep_every_s, failed="sweep_failed")
