"""The epoch that a lane claims, for every kind of record among its reports."""

from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.weights import ReportedEngine
from forgemq_inference.epoch import claim_epoch

LANE = 1
BAD = b"\x81\xaarequest_id\xa4\xff\xff\xff\xff"


def report(epoch: int) -> Emit:
    record = ReportedEngine(
        lane=LANE,
        epoch=epoch,
        url="",
        is_serving=False,
        lineage=0,
        version=0,
        running=0,
        queued=0,
        reported_ms=0,
    )
    return written(topics.REPORTED_ENGINES, topics.encode(record))


def written(topic: topics.Topic, value: bytes) -> Emit:
    return Emit(topic=topic.name, partition=LANE, key=b"1", value=value)


async def test_records_that_do_not_decode_do_not_keep_a_lane_down() -> None:
    log = MemoryLog(run="r")
    await log.create_topics({topics.REPORTED_ENGINES.name: 2, topics.LOADED_WEIGHTS.name: 2})
    writer = await log.writer()
    await writer.write_all(
        [
            written(topics.REPORTED_ENGINES, BAD),
            report(4),
            written(topics.REPORTED_ENGINES, b""),
            written(topics.LOADED_WEIGHTS, BAD),
        ]
    )
    claim = await claim_epoch(log, writer, lane=LANE, report=report)
    assert (claim.epoch, claim.position) == (5, 4)


async def test_a_lane_finds_its_last_epoch_after_its_reports_were_trimmed() -> None:
    kept = topics.REPORTED_ENGINES.newest_kept
    log = MemoryLog(run="r")
    await log.create_topics({topics.REPORTED_ENGINES.name: 2, topics.LOADED_WEIGHTS.name: 2})
    writer = await log.writer()
    await writer.write_all([report(3) for _ in range(10)] + [report(4) for _ in range(kept)])
    await log.trim({Place(topics.REPORTED_ENGINES.name, LANE): 10})
    claim = await claim_epoch(log, writer, lane=LANE, report=report)
    assert (claim.epoch, claim.position) == (5, kept + 11)
