"""Follows finished-completions for the probe, from where the log ends at the trainer's start."""

import msgspec

from forgemq_bus.errors import BlobError, OutOfRangeError
from forgemq_bus.log import Place, Reader
from forgemq_contracts import topics
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.topics import FINISHED_COMPLETIONS
from forgemq_shell.service import Context
from forgemq_trainer.core.fresh import FreshCompletions

READ_TIMEOUT_S = 0.5
"""A read returns this late if nothing arrives."""

RECORDS_MAX = 64
"""Records of one read, some tens of KB each."""

KEPT_BYTES_MAX = 256 * 1024 * 1024
"""Some 10,000 completions of 25 KB. Episodes that are open need their first turns."""


async def follow_completions(context: Context, fresh: FreshCompletions) -> None:
    """Give every finished completion to `fresh`, until cancelled.

    It is a sample: what cannot be read (a blob is lost, or the record was deleted because every
    reader that needs it has it) is passed over, up to the end of the log.
    """
    count = topics.partition_count(FINISHED_COMPLETIONS, context.configuration)
    places = [Place(FINISHED_COMPLETIONS.name, number) for number in range(count)]
    while True:
        reader = await context.log.reader(await context.log.end_positions(places))
        try:
            await _follow(reader, fresh)
        except (BlobError, OutOfRangeError) as error:
            context.telemetry.event("completions_passed_over", error=str(error))
        finally:
            await reader.close()


async def _follow(reader: Reader, fresh: FreshCompletions) -> None:
    while True:
        for record in await reader.read(timeout_s=READ_TIMEOUT_S, records_max=RECORDS_MAX):
            try:
                completion = topics.decode(FINISHED_COMPLETIONS, record.value)
            except msgspec.ValidationError:
                continue  # The merger writes its dead letter.
            assert isinstance(completion, FinishedCompletion)
            fresh.observe(completion)
