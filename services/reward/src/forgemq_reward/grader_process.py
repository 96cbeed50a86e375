"""The parent's side of one grader process: starts it, asks it, kills it if user code hangs."""

import asyncio
import sys
from collections.abc import Mapping
from typing import cast

from forgemq_contracts.grading import GradingEpisode
from forgemq_reward.core.grading_clock import GradingClock
from forgemq_reward.core.verdict import Verdict
from forgemq_reward.grader_messages import (
    LENGTH_BYTES,
    Cancel,
    FromWorker,
    Grade,
    Graded,
    Load,
    Loaded,
    ToWorker,
    Waiting,
    frame_to_worker,
    from_worker,
)
from forgemq_settings.user_code import for_user_code

_START_TIMEOUT_S = 60.0
"""For the imports: the user's modules may import large libraries, such as torch."""

_CANCEL_S = 2.0
"""For a cancelled grading to end: time to close its connections. Beyond it the process hangs."""

_LOOK_S = 0.1
"""Between two looks at the time of a grading that waits, or has none left."""

_LOAD = 0
"""The number of the message Load; gradings count from 1."""


class GraderRefusedError(Exception):
    """A reward function of the run's configuration cannot be loaded."""


class GraderLostError(Exception):
    """The process ended before this grading did; another grading in it may be why."""


class GraderHungError(GraderLostError):
    """This grading ran out of time and did not let go, so its process was killed."""


class GraderProcess:
    """Grades episodes, any number at once; a process that ended is started again for the next one.

    Args:
        load: The functions that the process imports.
        timeout_s: Of all functions together, for one episode, without the time for which they wait
            for other gradings of the process.
        environ: The process gets it without the credentials of the run (`for_user_code`).
    """

    def __init__(self, load: Load, *, timeout_s: float, environ: Mapping[str, str]) -> None:
        self._load = load
        self._timeout_s = timeout_s
        self._environ = environ
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._number = _LOAD
        self.loaded = Loaded()
        self.in_flight = 0

    async def start(self) -> None:
        """Start the process, if it is not there, and import the user's functions.

        Raises:
            GraderRefusedError: names the function, or the time limit.
        """
        await self._running()

    def version(self, domain: str) -> str:
        """Hash of the code that grades this domain; "" before the first start."""
        return dict(self.loaded.versions).get(domain, "")

    async def grade(self, episode: GradingEpisode) -> Verdict:
        """Ask the functions; the verdict has an error if they raise, or let go at their time limit.

        Raises:
            GraderLostError: the process ended.
            GraderHungError: it was killed for this grading.
        """
        self.in_flight += 1
        try:
            return await self._graded(await self._running(), episode)
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        """Kill the process; idempotent."""
        if self._child is not None:
            await self._child.kill()

    async def _graded(self, child: "_Child", episode: GradingEpisode) -> Verdict:
        self._number += 1
        number = self._number
        now_s = asyncio.get_running_loop().time
        clock = GradingClock(limit_s=self._timeout_s, now_s=now_s())
        answer = child.ask(number, Grade(number=number, episode=episode), clock)
        while (left_s := clock.left_s(now_s())) > 0 and not answer.done():
            await asyncio.wait([answer], timeout=max(left_s, _LOOK_S))
        is_late = not answer.done()
        limit = f"the graders took more than {self._timeout_s:g} s"
        if is_late:
            child.send(Cancel(number=number))
            if not (await asyncio.wait([answer], timeout=_CANCEL_S))[0]:
                await child.kill()
                raise GraderHungError(limit)
        graded = answer.result()
        assert isinstance(graded, Graded), f"expected Graded, got {graded}"
        return Verdict(error=limit) if is_late else graded.verdict

    async def _running(self) -> "_Child":
        async with self._starting:
            if self._child is None or self._child.ended.is_set():
                self._child = await self._start()
            return self._child

    async def _start(self) -> "_Child":
        _, child = await asyncio.get_running_loop().subprocess_exec(
            _Child,
            sys.executable,
            "-m",
            "forgemq_reward.grader_worker",
            stderr=None,
            env=for_user_code(self._environ),
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                loaded = await child.ask(_LOAD, self._load)
        except TimeoutError:
            await child.kill()
            raise GraderRefusedError(
                f"importing the reward functions took more than {_START_TIMEOUT_S:g} s"
            ) from None
        except GraderLostError as error:
            raise GraderRefusedError(f"{error} while it imported the reward functions") from None
        except asyncio.CancelledError:
            await child.kill()
            raise
        assert isinstance(loaded, Loaded), f"expected Loaded, got {loaded}"
        if loaded.error:
            await child.kill()
            raise GraderRefusedError(loaded.error)
        self.loaded = loaded
        return child


class _Child(asyncio.SubprocessProtocol):
    """One life of the process: its open questions, and its end."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._answers: dict[int, asyncio.Future[FromWorker]] = {}
        self._clocks: dict[int, GradingClock] = {}
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the process."""
        self._process = cast("asyncio.SubprocessTransport", transport)
        self._requests = cast("asyncio.WriteTransport", self._process.get_pipe_transport(0))

    def ask(
        self, number: int, message: ToWorker, clock: GradingClock | None = None
    ) -> "asyncio.Future[FromWorker]":
        """Send a message; GraderLostError comes out of its future if the process ends first.

        The clock stands still while the process says so.
        """
        answer: asyncio.Future[FromWorker] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        if clock is not None:
            self._clocks[number] = clock
            answer.add_done_callback(lambda _: self._clocks.pop(number))
        if self.ended.is_set():
            self._lose()
        else:
            self.send(message)
        return answer

    def send(self, message: ToWorker) -> None:
        """Send a message; nothing happens if the process has ended."""
        if not self._requests.is_closing():
            self._requests.write(frame_to_worker(message))

    async def kill(self) -> None:
        """Kill the process and wait for its end; idempotent."""
        if self._process.get_returncode() is None:
            self._process.kill()
        await self.ended.wait()

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: ARG002 - of the protocol
        """Take the messages that are complete."""
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "big")
            if len(self._received) < end:
                return
            message = from_worker(bytes(self._received[LENGTH_BYTES:end]))
            del self._received[:end]
            self._take(message)

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Waiting):
            clock = self._clocks.get(message.number)
            if clock is not None:
                now_s = asyncio.get_running_loop().time()
                clock.note(is_waiting=message.is_waiting, now_s=now_s)
            return
        number = _LOAD if isinstance(message, Loaded) else message.number
        answer = self._answers.pop(number, None)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def process_exited(self) -> None:
        """Close the way to the process, so that its connection counts as lost."""
        self._requests.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - of the protocol
        """Fail whatever is not answered: the process is gone and all its answers are read."""
        self.ended.set()
        self._process.close()
        self._lose()

    def _lose(self) -> None:
        status = self._process.get_returncode()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                lost = GraderLostError(f"the grader process ended with status {status}")
                answer.set_exception(lost)
                answer.exception()  # Nobody may wait for it any more.
