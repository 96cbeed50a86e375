"""What the log says about previous lives of the trainer."""

import msgspec

from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.examples import minimal
from forgemq_contracts.steps import TrainedStep
from forgemq_trainer.previous_lives import read_previous_lives

BAD = b"\x81\xaarequest_id\xa4\xff\xff\xff\xff"


def written(topic: topics.Topic, value: bytes) -> Emit:
    return Emit(topic=topic.name, partition=0, key=b"", value=value)


async def test_records_that_do_not_decode_are_skipped() -> None:
    step = msgspec.structs.replace(minimal(TrainedStep), step=3, lineage=7, checkpoint_step=2)
    log = MemoryLog(run="r")
    await log.create_topics({topics.TRAINED_STEPS.name: 1, topics.PUBLISHED_WEIGHTS.name: 1})
    writer = await log.writer()
    await writer.write_all(
        [
            written(topics.TRAINED_STEPS, BAD),
            written(topics.TRAINED_STEPS, topics.encode(step)),
            written(topics.TRAINED_STEPS, b"\xc1"),
            written(topics.PUBLISHED_WEIGHTS, BAD),
        ]
    )
    history = await read_previous_lives(log)
    assert (set(history.trained), history.lineage, history.checkpoint_step) == ({3}, 7, 2)
