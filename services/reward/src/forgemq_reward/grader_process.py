"""The parent's side of one grader process: starts it, asks it, kills it if user code hangs."""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping

from forgemq_contracts.grading import GradingEpisode
from forgemq_reward.core.verdict import Verdict
from forgemq_reward.grader_messages import (
    LENGTH_BYTES,
    FromWorker,
    Grade,
    Graded,
    Load,
    Loaded,
    ToWorker,
    frame_to_worker,
    from_worker,
)
from forgemq_settings.user_code import for_user_code

_START_TIMEOUT_S = 60.0
"""For the imports: the user's modules may import large libraries, such as torch."""


class GraderRefusedError(Exception):
    """A reward function of the run's configuration cannot be loaded."""


class GraderProcess:
    """Grades one episode at a time; a process that ended is started again for the next one.

    Args:
        load: The functions that the process imports.
        timeout_s: Of all functions together, for one episode.
        environ: The process gets it without the `FORGEMQ_*` variables.
    """

    def __init__(self, load: Load, *, timeout_s: float, environ: Mapping[str, str]) -> None:
        self._load = load
        self._timeout_s = timeout_s
        self._environ = environ
        self._process: Process | None = None
        self._versions: dict[str, str] = {}

    async def start(self) -> None:
        """Start the process and import the user's functions.

        Raises:
            GraderRefusedError: names the function, or the time limit.
        """
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "forgemq_reward.grader_worker",
            stdin=PIPE,
            stdout=PIPE,
            env=for_user_code(self._environ),
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                loaded = await self._ask(self._process, self._load)
        except TimeoutError:
            await self.close()
            raise GraderRefusedError(
                f"importing the reward functions took more than {_START_TIMEOUT_S:g} s"
            ) from None
        except EOFError:
            status = await self._process.wait()
            raise GraderRefusedError(
                f"the grader process ended with status {status} while it imported the "
                "reward functions"
            ) from None
        assert isinstance(loaded, Loaded), f"expected Loaded, got {loaded}"
        if loaded.error:
            await self.close()
            raise GraderRefusedError(loaded.error)
        self._versions = dict(loaded.versions)

    def version(self, domain: str) -> str:
        """Hash of the code that grades this domain; "" before the first start."""
        return self._versions.get(domain, "")

    async def grade(self, episode: GradingEpisode) -> Verdict:
        """Ask the functions; if the process hangs or dies, the verdict has an error."""
        if self._process is None:
            await self.start()
        assert self._process is not None, "started above"
        try:
            async with asyncio.timeout(self._timeout_s):
                graded = await self._ask(self._process, Grade(episode=episode))
        except TimeoutError:
            await self.close()
            return Verdict(error=f"the graders took more than {self._timeout_s:g} s")
        except (EOFError, ConnectionError):
            status = await self._process.wait()
            self._process = None
            return Verdict(error=f"the grader process ended with status {status}")
        assert isinstance(graded, Graded), f"expected Graded, got {graded}"
        return graded.verdict

    async def close(self) -> None:
        """Kill the process; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    async def _ask(self, process: Process, message: ToWorker) -> FromWorker:
        """Send a message and read its answer; EOFError if the process died."""
        assert process.stdin is not None, "opened with PIPE"
        assert process.stdout is not None, "opened with PIPE"
        process.stdin.write(frame_to_worker(message))
        await process.stdin.drain()
        try:
            head = await process.stdout.readexactly(LENGTH_BYTES)
            payload = await process.stdout.readexactly(int.from_bytes(head, "big"))
        except asyncio.IncompleteReadError as error:
            raise EOFError from error
        return from_worker(payload)
