"""Puts the records of a synthetic run on a real log, as its services would."""

from forgemq_bus.log import Log
from forgemq_contracts.messages import Output
from forgemq_contracts.topics import BY_NAME
from forgemq_shell.records import emit_of
from tests.unit.run_view.synthetic import SyntheticRun


async def write(log: Log, run: SyntheticRun, *, first: int) -> None:
    """The run's messages from this one on, in transactions where the registry says so."""
    writer, transactions = await log.writer(), await log.transaction_writer("test")
    for message in run.messages[first:]:
        output = Output(topic=message.topic, partition=message.partition, record=message.record)
        if BY_NAME[message.topic].is_transactional:
            await transactions.commit(outputs=[emit_of(output)], group="test", positions={})
        else:
            await writer.write(emit_of(output))
