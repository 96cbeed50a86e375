"""The cluster of one node that the tests of a session share."""

import shutil
from collections.abc import Iterator

import pytest

from tests.cluster.go_modules import ROUTER
from tests.cluster.node import Node, node
from tests.cluster.programs import FOLDER, NODE, missing_for_node, program


@pytest.fixture(scope="session")
def cluster_node() -> Iterator[Node]:
    """A node that is ready; its logs stay in .cache/cluster/logs."""
    is_compiled = program(NODE).is_file() and ROUTER.is_compiled()
    if (lacks := missing_for_node()) or not is_compiled:
        pytest.skip(lacks or "make test-cluster compiles Kubernetes first")
    folder, logs = FOLDER / "node", FOLDER / "logs"
    for each in (folder, logs):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir(parents=True)
    try:
        with node(folder, logs=logs) as made:
            yield made
    finally:
        shutil.rmtree(folder)
