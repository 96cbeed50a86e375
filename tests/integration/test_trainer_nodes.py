"""The trainer's pods of several nodes, as processes on loopback addresses of this machine.

Command, arguments and settings are those of the overlay `production`.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from forgemq_settings.ports import free_port
from tests.architecture.rendered import ROOT, environ, pods
from tests.integration.ranks_bench import announced_bench, work
from tests.unit.trainer.bench import Bench

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1800)]

OVERLAY = ROOT / "deploy/kubernetes/overlays/production"
STEPS = 5
WITHIN_S = 300.0
"""Two processes import torch and meet, on a machine with other work."""

END_S = 120.0


class Node:
    """One pod of the trainer.

    Args:
        ordinal: Of the pod.
        bench: Its run.
        bootstrap: Address of the broker.
        port: Where the nodes meet.
        log: Gets what it says, over all its lives.
    """

    def __init__(self, ordinal: int, *, bench: Bench, bootstrap: str, port: int, log: Path) -> None:
        self._container = next(
            each for each in pods(OVERLAY)["trainer"]["containers"] if each["name"] == "trainer"
        )
        self.log = log
        self.alive_file = log.with_suffix(".alive")
        self._environ = {
            **{name: text for name, text in os.environ.items() if not name.startswith("FORGEMQ_")},
            **self._of_the_pod(ordinal, port=port),
            "FORGEMQ_RUN": bench.configuration.run,
            "FORGEMQ_KAFKA": bootstrap,
            "FORGEMQ_TRAINER_DEVICE": "cpu",
            "FORGEMQ_TRAINER_FOLDER": str(bench.folder),
            "FORGEMQ_SERVICE_ALIVE_FILE": str(self.alive_file),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        self.process = self.start()

    def _of_the_pod(self, ordinal: int, *, port: int) -> dict[str, str]:
        """The pod's settings of its nodes, with an address of this machine for each name."""
        found = environ(OVERLAY, self._container)
        own = {k: v for k, v in found.items() if k.startswith("FORGEMQ_NODES_")}
        own["FORGEMQ_NODES_ADDRESS"] = own["FORGEMQ_NODES_ADDRESS"].replace(
            "trainer-0", f"trainer-{ordinal}"
        )
        hosts = {f"trainer-{n}.trainer": f"127.0.0.{n + 1}" for n in range(2)}
        for name, text in own.items():
            host, colon, _ = text.partition(":")
            own[name] = hosts.get(host, host) + (colon and f":{port}")
        return own

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the pod's container, again if it has ended."""
        python, *command = [*self._container["command"], *self._container["args"]]
        assert python == "python"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env=self._environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self.process

    def ranks(self) -> list[psutil.Process]:
        """Its ranks."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if each.cmdline()[-1:] == ["forgemq_trainer"]]

    def kill(self) -> None:
        """SIGKILL to the container's first process, as when the node is lost."""
        ranks = self.ranks()
        self.process.kill()
        self.process.wait(END_S)
        _, left = psutil.wait_procs(ranks, timeout=END_S)
        assert left == []

    def story(self) -> str:
        return self.log.read_text()[-6000:]


@pytest.fixture
async def bench(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> AsyncIterator[Bench]:
    made = announced_bench(new_run_id(), kafka_bootstrap, tmp_path / "nodes", world_size=2)
    async with made as opened:
        yield opened


@pytest.fixture
def nodes(bench: Bench, kafka_bootstrap: str, tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes that have been started."""
    port = free_port()
    made = [
        Node(n, bench=bench, bootstrap=kafka_bootstrap, port=port, log=tmp_path / f"node-{n}.log")
        for n in range(2)
    ]
    yield made
    for node in made:
        node.process.kill()
        node.process.wait(END_S)


async def until(look: Callable[[], Awaitable[bool]], story: Callable[[], str]) -> None:
    """Wait until `look` sees it."""
    try:
        async with asyncio.timeout(WITHIN_S):
            while not await look():  # noqa: ASYNC110 - other processes change it
                await asyncio.sleep(0.3)
    except TimeoutError:
        pytest.fail(story())


async def until_trained(bench: Bench, step: int, *, lineage: int, story: Callable[[], str]) -> None:
    """Wait for a step of this life of the trainer."""

    async def is_trained() -> bool:
        return (step, lineage) in {(each.step, each.lineage) for each in await bench.trained()}

    await until(is_trained, story)


async def until_published(bench: Bench, *, lineage: int, story: Callable[[], str]) -> None:
    """Wait until this life of the trainer has restored the newest checkpoint."""

    async def is_there() -> bool:
        return lineage in {each.lineage for each in await bench.published()}

    await until(is_there, story)


async def schedule(bench: Bench, step: int) -> None:
    """Write a step and its trees, which the trainer would drop as stale some steps earlier."""
    trees, steps = work(STEPS)
    await bench.put_trees(trees[2 * step : 2 * step + 2])
    await bench.put_steps(steps[step : step + 1])


async def ended(node: Node) -> int:
    """The exit status of a node that ends by itself."""
    return await asyncio.to_thread(node.process.wait, END_S)


async def weights_of_one_node(bootstrap: str, run: str, folder: Path) -> list[str]:
    """Digests of what two ranks of one machine make of the same steps, by version."""
    async with announced_bench(run, bootstrap, folder, world_size=2) as bench:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "forgemq_trainer.ranks.torchrun", "2"),
            env={
                **os.environ,
                "FORGEMQ_RUN": run,
                "FORGEMQ_KAFKA": bootstrap,
                "FORGEMQ_TRAINER_DEVICE": "cpu",
                "FORGEMQ_TRAINER_FOLDER": str(bench.folder),
                "OMP_NUM_THREADS": "1",
            },
        )
        for step in range(STEPS):
            await schedule(bench, step)
            await until_trained(bench, step, lineage=1, story=str)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), END_S) == 0
        return await digests(bench)


async def digests(bench: Bench) -> list[str]:
    """SHA-256 of the weights after each step, of the newest lineage that published them."""
    newest = {each.version: each.sha256 for each in await bench.published()}
    return [newest[version] for version in range(1, STEPS + 1)]


async def test_two_nodes_train_what_one_does_and_go_on_together_when_one_is_lost(
    bench: Bench,
    nodes: list[Node],
    kafka_bootstrap: str,
    new_run_id: Callable[[], str],
    tmp_path: Path,
) -> None:
    first, second = nodes

    def story() -> str:
        return f"{first.story()}\n---\n{second.story()}"

    await schedule(bench, 0)
    await until_trained(bench, 0, lineage=1, story=story)
    assert [len(node.ranks()) for node in nodes] == [1, 1]
    assert '"following"' in second.story()

    # The next step ends the node that is left, and both are started again.
    second.kill()
    await schedule(bench, 1)
    assert await ended(first) == 1, story()
    assert "rank 0 lost another of 2 ranks" in first.story()
    second.start()
    first.start()
    await until_trained(bench, 1, lineage=2, story=story)

    # Without a next step the node that is left waits, and begins again once the other is back.
    second.kill()
    second.start()
    await until_published(bench, lineage=3, story=story)
    assert first.process.poll() is None, story()
    await schedule(bench, 2)
    await until_trained(bench, 2, lineage=3, story=story)

    # The one that the others meet by: its loss ends the other's ranks at once.
    followers = second.ranks()
    first.kill()
    _, left = await asyncio.to_thread(psutil.wait_procs, followers, timeout=END_S)
    assert left == [], story()
    first.start()
    await schedule(bench, 3)
    await until_trained(bench, 3, lineage=4, story=story)

    await schedule(bench, 4)
    await until_trained(bench, 4, lineage=4, story=story)
    for node in nodes:
        node.process.terminate()
    assert [await ended(node) for node in nodes] == [0, 0], story()
    assert '"ended"' in first.story(), story()
    alone = await weights_of_one_node(kafka_bootstrap, new_run_id(), tmp_path / "one")
    assert await digests(bench) == alone
