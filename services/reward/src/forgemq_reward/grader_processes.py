"""The grader processes of the service: which one grades an episode, and again if it is lost.

Two kinds of the same process. *Shared* ones grade many episodes at once: those of queues with an
`async` function. *Single* ones grade an episode each at a time: those of all other queues, and the
last try of an episode whose shared processes were lost, so that nobody is masked for what the
function of another episode did.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from forgemq_contracts.grading import GradingEpisode
from forgemq_reward.core.verdict import Verdict
from forgemq_reward.grader_messages import Load
from forgemq_reward.grader_process import GraderHungError, GraderLostError, GraderProcess


class Places:
    """How many gradings of one kind are under way, and how many may be."""

    def __init__(self, count_max: int) -> None:
        self.count = 0
        self._count_max = count_max

    @property
    def is_free(self) -> bool:
        """Whether one more may begin."""
        return self.count < self._count_max


class GraderProcesses:
    """Grades episodes in `count` processes of each kind that the run needs.

    Life: `start`, any number of `grade` at once, `close`.

    Args:
        load: The functions of all queues.
        timeout_s: For one episode.
        count: Processes of a kind.
        gradings_max: At once in a shared process.
        tries_max: Of an episode whose process is lost; then it is masked.
        environ: For the processes.
    """

    def __init__(
        self,
        load: Load,
        *,
        timeout_s: float,
        count: int,
        gradings_max: int,
        tries_max: int,
        environ: Mapping[str, str],
    ) -> None:
        self._processes = tuple(
            GraderProcess(load, timeout_s=timeout_s, environ=environ) for _ in range(2 * count)
        )
        self._domains = frozenset(queue.domain for queue in load.queues)
        self._single, self._shared = self._processes[:count], self._processes[count:]
        self._idle: asyncio.LifoQueue[GraderProcess] = asyncio.LifoQueue()
        self._tries_max = tries_max
        self._shared_places = Places(count * gradings_max)
        self._single_places = Places(count)

    async def start(self) -> None:
        """Start the processes of each kind that a queue needs.

        Raises:
            GraderRefusedError: a function cannot be loaded; the first process says so.
        """
        first = self._processes[0]
        await first.start()
        shared = frozenset(first.loaded.async_domains)
        if shared == self._domains:
            # The process that has named the domains runs already.
            self._single, self._shared = self._shared, self._single
        if shared:
            await _start_all(self._shared)
        if shared != self._domains:
            await _start_all(self._single)
        for process in self._single:
            self._idle.put_nowait(process)

    def places(self, domain: str) -> Places:
        """Those that a grading of this domain takes."""
        return self._shared_places if self._is_shared(domain) else self._single_places

    def version(self, domain: str) -> str:
        """Hash of the code that grades this domain; "" before the first start."""
        return self._processes[0].version(domain)

    async def grade(self, episode: GradingEpisode) -> Verdict:
        """Ask the functions; its error says that they hung or were lost too often."""
        lost = ""
        for left in reversed(range(self._tries_max)):
            try:
                if left and self._is_shared(episode.domain):
                    return await self._least_busy().grade(episode)
                async with self._single_process() as process:
                    return await process.grade(episode)
            except GraderHungError as error:
                if not left or not self._is_shared(episode.domain):
                    return Verdict(error=str(error))
                lost = str(error)
            except GraderLostError as error:
                lost = str(error)
        return Verdict(error=lost)

    async def close(self) -> None:
        """End all processes; idempotent."""
        for process in self._processes:
            await process.close()

    @asynccontextmanager
    async def _single_process(self) -> AsyncIterator[GraderProcess]:
        process = await self._idle.get()
        try:
            yield process
        finally:
            self._idle.put_nowait(process)

    def _is_shared(self, domain: str) -> bool:
        return domain in self._processes[0].loaded.async_domains

    def _least_busy(self) -> GraderProcess:
        return min(self._shared, key=lambda process: process.in_flight)


async def _start_all(processes: Sequence[GraderProcess]) -> None:
    for process in processes:
        await process.start()
