"""What a lane without an engine writes, for tests and load tests."""

from forgemq_contracts.weights import ReportedEngine


def heartbeat(
    *,
    lane: int = 0,
    epoch: int = 1,
    version: int = 0,
    weights_address: str = "",
    process_group: str = "",
) -> ReportedEngine:
    """A report of a lane that serves a version of the first lineage, with nothing to do."""
    return ReportedEngine(
        lane=lane,
        epoch=epoch,
        url="http://127.0.0.1:9",
        is_serving=True,
        lineage=1,
        version=version,
        running=0,
        queued=0,
        reported_ms=0,
        weights_address=weights_address,
        process_group=process_group,
    )
