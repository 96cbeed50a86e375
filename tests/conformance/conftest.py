"""The cluster and the log that each test of the suite gets."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Log
from tests.conformance.clusters import Cluster, KafkaCluster, MemoryCluster


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.integration)])
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, new_run_id: Callable[[], str]
) -> AsyncIterator[Cluster]:
    """An empty run on a cluster of each kind."""
    blobs = BlobStore(str(tmp_path / "blobs"), run="r")
    opened: Cluster
    if request.param == "memory":
        opened = MemoryCluster(blobs)
    else:
        opened = KafkaCluster(request.getfixturevalue("kafka_bootstrap"), new_run_id(), blobs)
    yield opened
    await opened.close()


@pytest.fixture
async def log(cluster: Cluster) -> Log:
    """A handle on the cluster, with topics a and b of two partitions and c of one."""
    log = cluster.process()
    await log.create_topics({"a": 2, "b": 2, "c": 1})
    return log
